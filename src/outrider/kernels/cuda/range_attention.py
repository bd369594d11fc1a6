"""Attention with gradients over ranges of keys, for training: `AttentionRanges` (structures.py) defines it.

A query attends to one range of its row's keys, and optionally to one range of a second set, the keys of its group laid
end to end. Scores are not stored, tiles outside all ranges are not read, and sums have a fixed order, so that results
are reproducible.

Letters: B rows, N queries of a row, M keys of a row, H heads, G key/value heads, D.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..structures import AttentionRanges
from .device import loop_bound, multiply, rounded, shared_memory

BEYOND: tl.constexpr = tl.constexpr(2**31 - 1)
LEAST: tl.constexpr = tl.constexpr(-1e30)  # initial maximum: finite, so that its distance to -inf is defined
LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


class AttentionTiling(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int


class KeySet(NamedTuple):
    """Argument of kernels: a set of keys and values, and the range of each query in it. All None: no such set."""

    k: Tensor | None  # [B, M, G, D]
    v: Tensor | None
    begins: Tensor | None  # [B, N] int32
    ends: Tensor | None


class Sizes(NamedTuple):
    """Constants of kernels."""

    heads: int  # H
    groups: int  # G
    size: int  # D
    width: int  # the power of two that covers D
    query_block: int
    key_block: int


FORWARD = AttentionTiling(64, 64, 4, 3)
BY_QUERIES = AttentionTiling(64, 64, 4, 2)
BY_KEYS = AttentionTiling(64, 64, 4, 2)
BY_OWN_KEYS = AttentionTiling(16, 64, 4, 1)  # few queries attend to a tile of them
LEAST_TILE = 16  # queries, keys or columns: tensor cores need it
SCAN = 1024  # ranges of queries that are read at a time


def attend(query: Tensor, ranges: AttentionRanges) -> Tensor:
    """Return the attention of query [B, N, H, D] over its ranges: [B, N, H * D]."""
    common, own, begins = (ranges.keys, ranges.values, ranges.begins, ranges.ends), ranges.own, ranges.begins
    assert query.dtype == ranges.keys.dtype == ranges.values.dtype and begins.dtype == ranges.ends.dtype == torch.int32
    mixed: Tensor
    if own is None:
        mixed = _Ranges.apply(query, *common)  # type: ignore[no-untyped-call]
        return mixed
    assert own.keys.dtype == own.values.dtype == query.dtype
    count, (_, groups, size, *_) = query.shape[1], own.keys.shape
    own_begins = torch.arange(count, dtype=torch.int32, device=query.device) // (count // groups) * size
    own_begins = own_begins.expand_as(begins)  # [B, N]
    own_ends = own_begins + (size if own.counts is None else own.counts)
    laid = own.keys.flatten(1, 2), own.values.flatten(1, 2)  # [B, A * S, G, D] each
    mixed = _Ranges.apply(query, *common, *laid, own_begins, own_ends)  # type: ignore[no-untyped-call]
    return mixed


class _Ranges(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        begins: Tensor,
        ends: Tensor,
        own_keys: Tensor | None = None,
        own_values: Tensor | None = None,
        own_begins: Tensor | None = None,
        own_ends: Tensor | None = None,
    ) -> Tensor:
        query, keys, values, begins, ends = _whole(query, keys, values, begins, ends)
        own = _whole(own_keys, own_values, own_begins, own_ends)
        (rows, count, heads, size), length = query.shape, keys.shape[1]
        out = torch.empty(rows, count, heads * size, dtype=query.dtype, device=query.device)
        logsums = torch.empty(rows, heads, count, dtype=torch.float32, device=query.device)
        tiling = _fitting(FORWARD, query)
        forward[(triton.cdiv(count, tiling.queries), heads, rows)](
            query,
            KeySet(keys, values, begins, ends),
            KeySet(*own),
            out,
            logsums,
            count,
            length,
            0 if own[0] is None else own[0].shape[1],
            **_sizes(query, keys, tiling),
        )
        ctx.save_for_backward(query, keys, values, begins, ends, *own, out, logsums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, begins, ends, *own, out, logsums = ctx.saved_tensors
        (rows, count, heads, _), length = query.shape, keys.shape[1]
        by_out = by_out.contiguous()
        by_query, inner = torch.empty_like(query), torch.empty_like(logsums)
        tiling = _fitting(BY_QUERIES, query)
        by_queries[(triton.cdiv(count, tiling.queries), heads, rows)](
            query,
            KeySet(keys, values, begins, ends),
            KeySet(*own),
            out,
            logsums,
            by_out,
            by_query,
            inner,
            count,
            length,
            0 if own[0] is None else own[0].shape[1],
            **_sizes(query, keys, tiling),
        )
        known = by_out, logsums, inner
        by_common = _keys(BY_KEYS, *known, query, keys, values, begins, ends)
        if own[0] is None:
            return by_query, *by_common, None, None, None, None, None, None
        by_own = _keys(BY_OWN_KEYS, *known, query, *own)
        return by_query, *by_common, None, None, *by_own, None, None


def _keys(
    tiling: AttentionTiling,
    by_out: Tensor,
    logsums: Tensor,
    inner: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    begins: Tensor,
    ends: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of one set of keys and its values, [B, M, G, D] each."""
    rows, length, groups, _ = keys.shape
    tiling = _fitting(tiling, query)
    for_keys, for_values = torch.empty_like(keys), torch.empty_like(values)
    by_keys[(triton.cdiv(length, tiling.keys), groups, rows)](
        query,
        KeySet(keys, values, begins, ends),
        logsums,
        by_out,
        inner,
        for_keys,
        for_values,
        query.shape[1],
        length,
        scan=SCAN,
        **_sizes(query, keys, tiling),
    )
    return for_keys, for_values


def _fitting(tiling: AttentionTiling, query: Tensor) -> AttentionTiling:
    """Return the tiling, or one with fewer stages or smaller tiles if the shared memory of the GPU is too small for it.

    It holds tiles of queries, of their gradients, of keys and of values, and one of scores.
    """
    line = _padded(query.shape[3]) * query.element_size()  # bytes of a head
    while True:
        queries, keys, _, stages = tiling
        lines = 2 * queries + 2 * keys * max(stages - 1, 1)
        if lines * line + 4 * queries * keys + SCAN <= shared_memory() or max(queries, keys) <= LEAST_TILE:
            return tiling
        if stages > 2:
            tiling = tiling._replace(stages=stages - 1)
        else:
            tiling = tiling._replace(queries=max(queries // 2, LEAST_TILE), keys=max(keys // 2, LEAST_TILE))


def _padded(size: int) -> int:
    """Return the power of two that covers the size of a head."""
    return int(max(triton.next_power_of_2(size), LEAST_TILE))


def _whole(*tensors: Any) -> tuple[Any, ...]:
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def _sizes(query: Tensor, keys: Tensor, tiling: AttentionTiling) -> dict[str, Any]:
    heads, size = query.shape[2:]
    return {
        "scale": size**-0.5,
        "sizes": Sizes(heads, keys.shape[2], size, _padded(size), tiling.queries, tiling.keys),
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


@triton.jit
def _tile(tensor, at, stride, there, size: tl.constexpr, width: tl.constexpr):
    """Load lines [block, width]; 0 outside."""
    column = tl.arange(0, width)
    mask = there[:, None] & (column < size)[None, :]
    return tl.load(tensor + at[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def _store(tensor, at, stride, there, value, size: tl.constexpr, width: tl.constexpr):
    column = tl.arange(0, width)
    mask = there[:, None] & (column < size)[None, :]
    value = rounded(value, tensor.dtype.element_ty)
    tl.store(tensor + at[:, None] * stride + column[None, :], value, mask=mask)


@triton.jit
def _load_ranges(begins, ends, at, there):
    """Load the ranges of a tile of queries, and their union."""
    begin = tl.load(begins + at, mask=there, other=0)
    end = tl.load(ends + at, mask=there, other=0)
    low = tl.min(tl.where(begin < end, begin, BEYOND), 0)
    return begin, end, low, tl.max(tl.where(begin < end, end, 0), 0)


@triton.jit
def _scores(q, k, begin, end, at, scale):
    """Return log2 scores of queries [block, width] and keys [block, width]; -inf outside the ranges."""
    scores = multiply(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32)) * (scale * LOG2_E)
    seen = (at[None, :] >= begin[:, None]) & (at[None, :] < end[:, None])
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _mix(q, total, top, mass, key_set, at, there, stride, scale, sizes: tl.constexpr):
    """Accumulate one set of keys for a tile of queries: weighted values, largest score, sum of weights."""
    size: tl.constexpr = sizes.size
    width: tl.constexpr = sizes.width
    key_block: tl.constexpr = sizes.key_block
    begin, end, low, high = _load_ranges(key_set.begins, key_set.ends, at, there)
    for start in range(loop_bound(low), loop_bound(high), key_block):
        key_index = start + tl.arange(0, key_block)
        k = _tile(key_set.k, key_index, stride, key_index < high, size, width)
        scores = _scores(q, k, begin, end, key_index, scale)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        mass = mass * shrink + tl.sum(weights, 1)
        v = _tile(key_set.v, key_index, stride, key_index < high, size, width)
        total = multiply(rounded(weights, v.dtype), v, total * shrink[:, None])
        top = higher
    return total, top, mass


@triton.jit
def forward(query, common, own, out, logsums, count, length, own_length, scale, sizes: tl.constexpr):
    heads: tl.constexpr = sizes.heads
    groups: tl.constexpr = sizes.groups
    size: tl.constexpr = sizes.size
    width: tl.constexpr = sizes.width
    query_block: tl.constexpr = sizes.query_block
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * query_block + tl.arange(0, query_block)
    there = at < count
    lines = row * count * heads * size + head * size  # of this head in query and out
    stride: tl.constexpr = groups * size
    column = head // (heads // groups) * size
    q = _tile(query + lines, at, heads * size, there, size, width)
    total = tl.zeros([query_block, width], tl.float32)
    top = tl.full([query_block], LEAST, tl.float32)
    mass = tl.zeros([query_block], tl.float32)
    first = row * length * stride + column
    key_set = KeySet(common.k + first, common.v + first, common.begins + row * count, common.ends + row * count)
    total, top, mass = _mix(q, total, top, mass, key_set, at, there, stride, scale, sizes)
    if own.k is not None:
        first = row * own_length * stride + column
        own_set = KeySet(own.k + first, own.v + first, own.begins + row * count, own.ends + row * count)
        total, top, mass = _mix(q, total, top, mass, own_set, at, there, stride, scale, sizes)
    mass = tl.where(mass > 0, mass, 1.0)
    _store(out + lines, at, heads * size, there, total / mass[:, None], size, width)
    tl.store(logsums + (row * heads + head) * count + at, top + tl.log2(mass), mask=there)


@triton.jit
def _unmix(q, change, total, logsum, inner, key_set, at, there, stride, scale, sizes: tl.constexpr):
    """Add one set of keys to the gradient of a tile of queries. `change` [block, width]: the gradient of `out`."""
    size: tl.constexpr = sizes.size
    width: tl.constexpr = sizes.width
    key_block: tl.constexpr = sizes.key_block
    begin, end, low, high = _load_ranges(key_set.begins, key_set.ends, at, there)
    for start in range(loop_bound(low), loop_bound(high), key_block):
        key_index = start + tl.arange(0, key_block)
        k = _tile(key_set.k, key_index, stride, key_index < high, size, width)
        v = _tile(key_set.v, key_index, stride, key_index < high, size, width)
        weights = tl.exp2(_scores(q, k, begin, end, key_index, scale) - logsum[:, None])
        by_weights = multiply(change, tl.trans(v), tl.zeros([q.shape[0], key_block], tl.float32))
        total = multiply(rounded(weights * (by_weights - inner[:, None]), k.dtype), k, total)
    return total


@triton.jit
def by_queries(
    query, common, own, out, logsums, by_out, by_query, inners, count, length, own_length, scale, sizes: tl.constexpr
):
    """Compute the gradient of queries, and `inners` [B, H, N]: dot products of outputs and their gradients."""
    heads: tl.constexpr = sizes.heads
    groups: tl.constexpr = sizes.groups
    size: tl.constexpr = sizes.size
    width: tl.constexpr = sizes.width
    query_block: tl.constexpr = sizes.query_block
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * query_block + tl.arange(0, query_block)
    there = at < count
    lines = row * count * heads * size + head * size
    stride: tl.constexpr = groups * size
    column = head // (heads // groups) * size
    q = _tile(query + lines, at, heads * size, there, size, width)
    change = _tile(by_out + lines, at, heads * size, there, size, width)
    found = _tile(out + lines, at, heads * size, there, size, width)
    inner = tl.sum(found.to(tl.float32) * change.to(tl.float32), 1)
    tl.store(inners + (row * heads + head) * count + at, inner, mask=there)
    logsum = tl.load(logsums + (row * heads + head) * count + at, mask=there, other=0.0)
    total = tl.zeros([query_block, width], tl.float32)
    first = row * length * stride + column
    key_set = KeySet(common.k + first, common.v + first, common.begins + row * count, common.ends + row * count)
    total = _unmix(q, change, total, logsum, inner, key_set, at, there, stride, scale, sizes)
    if own.k is not None:
        first = row * own_length * stride + column
        own_set = KeySet(own.k + first, own.v + first, own.begins + row * count, own.ends + row * count)
        total = _unmix(q, change, total, logsum, inner, own_set, at, there, stride, scale, sizes)
    _store(by_query + lines, at, heads * size, there, total * scale, size, width)


@triton.jit
def _queries_of_keys(begins, ends, low, high, count, scan: tl.constexpr):
    """Return the first query whose range meets keys `low` .. `high` - 1, and the one after the last."""
    first, last = low * 0 + BEYOND, low * 0
    for start in range(0, loop_bound(count), scan):
        at = start + tl.arange(0, scan)
        begin = tl.load(begins + at, mask=at < count, other=0)
        end = tl.load(ends + at, mask=at < count, other=0)
        overlaps = tl.maximum(begin, low) < tl.minimum(end, high)
        first = tl.minimum(first, tl.min(tl.where(overlaps, at, BEYOND), 0))
        last = tl.maximum(last, tl.max(tl.where(overlaps, at + 1, 0), 0))
    return first, last


@triton.jit
def by_keys(
    query,
    key_set,
    logsums,
    by_out,
    inners,
    for_keys,
    for_values,
    count,
    length,
    scale,
    sizes: tl.constexpr,
    scan: tl.constexpr,
):
    """Compute the gradients of a tile of keys and of its values, over all heads of their group."""
    heads: tl.constexpr = sizes.heads
    groups: tl.constexpr = sizes.groups
    size: tl.constexpr = sizes.size
    width: tl.constexpr = sizes.width
    query_block: tl.constexpr = sizes.query_block
    key_block: tl.constexpr = sizes.key_block
    group, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_index = tl.program_id(0) * key_block + tl.arange(0, key_block)
    stride: tl.constexpr = groups * size
    heads_per_group: tl.constexpr = heads // groups
    entries = row * length * stride + group * size
    k = _tile(key_set.k + entries, key_index, stride, key_index < length, size, width)
    v = _tile(key_set.v + entries, key_index, stride, key_index < length, size, width)
    low = tl.program_id(0) * key_block
    begins, ends = key_set.begins + row * count, key_set.ends + row * count
    first, last = _queries_of_keys(begins, ends, low, tl.minimum(low + key_block, length), count, scan)
    sum_k = tl.zeros([key_block, width], tl.float32)
    sum_v = tl.zeros([key_block, width], tl.float32)
    for head in range(heads_per_group):
        lines = row * count * heads * size + (group * heads_per_group + head) * size
        sums = (row * heads + group * heads_per_group + head) * count
        for start in range(loop_bound(first), loop_bound(last), query_block):
            at = start + tl.arange(0, query_block)
            there = at < last
            q = _tile(query + lines, at, heads * size, there, size, width)
            change = _tile(by_out + lines, at, heads * size, there, size, width)
            begin = tl.load(begins + at, mask=there, other=0)
            end = tl.load(ends + at, mask=there, other=0)
            logsum = tl.load(logsums + sums + at, mask=there, other=0.0)
            inner = tl.load(inners + sums + at, mask=there, other=0.0)
            weights = tl.exp2(_scores(q, k, begin, end, key_index, scale) - logsum[:, None])
            sum_v = multiply(tl.trans(rounded(weights, change.dtype)), change, sum_v)
            by_weights = multiply(change, tl.trans(v), tl.zeros([query_block, key_block], tl.float32))
            by_scores = rounded(weights * (by_weights - inner[:, None]), q.dtype)
            sum_k = multiply(tl.trans(by_scores), q, sum_k)
    _store(for_keys + entries, key_index, stride, key_index < length, sum_k * scale, size, width)
    _store(for_values + entries, key_index, stride, key_index < length, sum_v, size, width)
