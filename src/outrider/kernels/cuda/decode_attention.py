"""Attention of decode steps with few, short texts: one new token for each row.

Such a step is bound by latency, not by bytes. A program loads all that is known before the projected states are: the
page table, the first tile of cached keys and values, the angles. After the wait a warp runs 600 to 700 instructions, in
`paged_attention` 1,700 to 2,100: a tile has one query position, so lines need no masks of their own, and new keys are
taken in from registers. If a text has more cached keys than fit into a tile, and multiprocessors are idle, several
programs share them; the last one to end merges the results. Sums have another order than in `paged_attention`, so
layers that are batch-invariant do not use this kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import Batch, LayerPages
from .device import DEVICE, LAUNCH, loop_bound, multiply, rounded, wait
from .matmul import MULTIPROCESSORS
from .paged_attention import (
    LOG2E,
    SCALE_UNIT,
    STARTS,
    Heads,
    merge_softmax,
    page_row,
    softmax_step,
    weigh,
    weighted_mean,
)
from .pointwise import capped
from .rope import (
    HeadShape,
    Keys,
    KvPages,
    RopeTables,
    RopeWeights,
    Tokens,
    kv_pages,
    load_new_tokens,
    rotated,
    store_kv,
)

# Positions of a page table up to which this kernel is used: the narrower tables of captured steps (device/graphs.py).
SHORT = 512
NARROW = 128  # bytes of a key up to which a tile is small enough for several programs on a multiprocessor
PARTS = 4  # programs that share a text and a KV head: SHORT positions in tiles of 128
IDLE = MULTIPROCESSORS // 2  # programs up to which texts are shared
STAGES = 3  # of the loop over further tiles: page table, then keys and values one tile ahead


class Merge(NamedTuple):
    """Argument of the kernel: results of programs that share a text."""

    mixed: Tensor  # [programs, parts, tile, D] f32: weighted sums of values
    tops: Tensor  # [programs, parts, tile] f32: the largest scores
    totals: Tensor  # [programs, parts, tile] f32: the sums of weights
    counters: Tensor  # [IDLE] int32: programs that have ended; 0 between launches


class Variant(NamedTuple):
    """Constants of the kernel beside HeadShape."""

    tile: int  # lines in a query tile: the query heads of a KV head
    block: int  # keys in a tile
    parts: int  # programs that share a text and a KV head
    capped: bool  # scores have a soft cap


def share_counters() -> Tensor:
    """Return counters for the programs of a layer that share a text. Each launch leaves them at 0."""
    return torch.zeros(IDLE, dtype=torch.int32, device=DEVICE)


def serves(heads: Heads, batch: Batch, pages: LayerPages) -> bool:
    """Return whether this kernel is faster for a causal chain: measured on an H200.

    Microseconds of a layer with `paged_attention` and with this kernel: 135M in bf16, one text of 60 tokens 14.8, 12.7,
    of 440 15.3, 14.1, 32 texts of 300 25.9, 24.6; 1.5B in bf16, one text of 160 44.1, 42.1, 8 texts of 400 49.9, 44.0;
    8B in int4, one text of 160 58.9, 58.3, 4 texts of 160 60.4, 61.6, of 400 65.8, 65.3. 8 texts of 400 would take 8B
    70.7 instead of 67.8: then a program has several tiles of keys, and the pipeline of `paged_attention` is longer.
    """
    rows, width = batch.page_tables.shape
    page, programs = pages.keys.shape[2], rows * heads.kv
    most = 2 * MULTIPROCESSORS if _key_bytes(heads, pages) <= NARROW else IDLE // 2
    is_short = len(batch.positions) == rows and width * page <= SHORT
    return is_short and programs <= most and not heads.batch_invariant


def decode_attention(
    projected: Tensor,
    heads: Heads,
    batch: Batch,
    pages: LayerPages,
    result: torch.dtype,
    rope: RopeWeights,
    counters: Tensor,
) -> Tensor:
    """Rotate `projected` [T, (H + 2 * G) * D] f32, store keys and values; return the attention [T, H * D]."""
    tokens, (rows, width) = projected.shape[0], batch.page_tables.shape
    assert rope.cos is not None and rope.sin is not None
    assert heads.causal and not heads.anchored and batch.parents is None
    page, group = pages.keys.shape[2], heads.count // heads.kv
    padded, tile = max(16, triton.next_power_of_2(heads.size)), max(16, triton.next_power_of_2(group))
    key_bytes, programs = _key_bytes(heads, pages), tokens * heads.kv
    block = 128 if key_bytes <= 2 * NARROW else 64 if key_bytes <= 4 * NARROW else 32
    parts = min(PARTS, max(IDLE // max(programs, 1), 1))
    parts = 1 << (parts.bit_length() - 1)
    device = projected.device
    out = torch.empty(tokens, heads.count * heads.size, dtype=result, device=device)
    merge = Merge(out, out, out, counters)  # placeholders
    if parts > 1:
        sums = torch.empty(2, programs, parts, tile, device=device)
        merge = Merge(torch.empty(programs, parts, tile, padded, device=device), sums[0], sums[1], counters)
    if tokens:
        _attend_decoding[(programs, parts)](
            projected,
            kv_pages(pages),
            Tokens(batch.positions, batch.slots, batch.slots, batch.query_starts, batch.page_tables),
            out,
            merge,
            RopeTables(rope.cos, rope.sin),
            heads.sinks,
            heads.key_factors if pages.keys.dtype is torch.int8 else None,
            rows,
            width,
            batch.page_tables.stride(0),
            heads.window,
            heads.skip,
            rope.cos.shape[0],
            heads.scale * LOG2E,
            heads.soft_cap * LOG2E,
            shape=HeadShape(heads.count, heads.kv, heads.size, padded, page, pages.key_scales is not None),
            variant=Variant(tile, block, parts, heads.soft_cap > 0),
            num_warps=4 if key_bytes <= NARROW else 8,
            num_stages=STAGES,
            enable_fp_fusion=False,  # keys are stored with the bits of other kernels
            **LAUNCH,
        )
    return out


def _key_bytes(heads: Heads, pages: LayerPages) -> int:
    """Return the bytes of a key in a tile; quantized keys become halves."""
    return int(max(16, triton.next_power_of_2(heads.size)) * max(pages.keys.dtype.itemsize, 2))


@triton.jit(do_not_specialize=["rows", "width", "table_stride", "window", "skip", "limit"])
def _attend_decoding(
    projected,
    pages,
    batch,
    out,
    merge,
    tables,
    sinks,  # or None
    key_factors,  # or None
    rows,
    width,
    table_stride,
    window,
    skip,
    limit,
    scale,
    soft_cap,
    shape: tl.constexpr,
    variant: tl.constexpr,
):
    heads: tl.constexpr = shape.heads
    kv_heads: tl.constexpr = shape.kv_heads
    size: tl.constexpr = shape.size
    page: tl.constexpr = shape.page
    tile: tl.constexpr = variant.tile
    block: tl.constexpr = variant.block
    parts: tl.constexpr = variant.parts
    group: tl.constexpr = heads // kv_heads
    kv_head, token, here = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads, tl.program_id(1)
    row = _row_of(batch.query_starts, token, rows)
    if row >= rows:  # padding
        return
    begin = tl.load(batch.query_starts + row)
    position, origin = tl.load(batch.positions + token), tl.load(batch.positions + begin)
    first = tl.maximum(tl.where(window > 0, position - window + 1, 0), skip)
    end = tl.minimum(position + 1, width * page)
    cached = tl.minimum(end, origin)  # earlier steps have stored the keys before it
    chunk = tl.maximum(tl.cdiv(cached - first, parts), block)  # cached keys of a program
    used = tl.maximum(tl.cdiv(cached - first, chunk), 1)  # programs that have some
    if here >= used:
        return
    start = first + here * chunk
    stop = tl.minimum(cached, start + chunk)
    head_pages = KvPages(
        pages.k + kv_head * page * size,
        pages.v + kv_head * page * size,
        pages.k_scales + kv_head * page,
        pages.v_scales + kv_head * page,
    )
    table = batch.page_tables + row.to(tl.int64) * table_stride
    key_row, needed = _rows_at(table, start, stop, shape, block)
    keys = _load_keys(head_pages, key_row, needed, shape)
    new = load_new_tokens(tables, batch, token, token + 1, limit, shape, 1)
    line, dim = tl.arange(0, tile), tl.arange(0, shape.padded)
    valid, head = line < group, kv_head * group + line
    wait()  # no kernel of a pass writes what was read so far
    query = rotated(projected, token * (heads + 2 * kv_heads) + head, valid, new.cosine, new.sine, shape)
    if key_factors is not None:
        query = query * tl.load(key_factors + kv_head * size + dim, mask=dim < size, other=0.0)[None, :]
    query = (query * scale).to(tl.float16 if shape.scaled else pages.k.dtype.element_ty)
    own = store_kv(projected, pages, key_factors, new, kv_head, here == 0, shape)
    top, total, mixed = _attend_first(query, keys, needed, soft_cap, shape, variant)
    if here == 0:
        for each in tl.range(loop_bound(begin), loop_bound(token), num_stages=1):  # earlier new tokens of the row
            at = tl.load(batch.positions + each)
            other = load_new_tokens(tables, batch, each, each + 1, limit, shape, 1)
            other_key = store_kv(projected, pages, key_factors, other, kv_head, False, shape)
            other_key = _in_pages(other_key, other.slot, head_pages, table, at, end, shape)
            seen = (at >= first) & (at < end)
            top, total, mixed = _attend_one(query, other_key, seen, top, total, mixed, soft_cap, shape, variant)
        own = _in_pages(own, new.slot, head_pages, table, position, end, shape)
        seen = (position >= first) & (position < end)
        top, total, mixed = _attend_one(query, own, seen, top, total, mixed, soft_cap, shape, variant)
    if start + block < stop:
        for each in range(loop_bound(start + block), loop_bound(stop), block):
            key_row, needed = _rows_at(table, each, stop, shape, block)
            top, total, mixed = softmax_step(
                query, head_pages, key_row, needed, needed[None, :], top, total, mixed, soft_cap, shape, variant.capped
            )
    is_last = used > 0
    if parts > 1:
        is_last, top, total, mixed = _merged(merge, here, used, line, valid, top, total, mixed, shape, parts)
    if is_last:
        if shape.scaled:
            mixed = mixed * (1.0 / SCALE_UNIT)
        mean = weighted_mean(top, total, mixed, sinks, head, valid)
        at = (token * heads + head).to(tl.int64)[:, None] * size + dim[None, :]
        tl.store(out + at, rounded(mean, out.dtype.element_ty), mask=valid[:, None] & (dim < size)[None, :])


@triton.jit
def _row_of(query_starts, token, rows):
    """Return the row of a token; `rows` for padding."""
    row = token * 0
    for first in range(loop_bound(token * 0), loop_bound(rows), STARTS):
        other = first + tl.arange(0, STARTS)
        end = tl.load(query_starts + other + 1, mask=other < rows, other=0x3FFFFFFF)
        row += tl.sum((end <= token).to(tl.int32), 0)
    return row


@triton.jit
def _rows_at(table, start, stop, shape: tl.constexpr, block: tl.constexpr):
    """Return the rows of the pages that hold a tile of keys, and which of them are before `stop`."""
    at = start + tl.arange(0, block)
    needed = at < stop
    return page_row(tl.load(table + at // shape.page, mask=needed, other=0), at % shape.page, shape), needed


@triton.jit
def _in_pages(keys, slot, pages, table, position, end, shape: tl.constexpr):
    """Return the key of a new token; without a slot it is not stored, but what the pages hold for its position."""
    if tl.max(slot, 0) < 0:
        row, needed = _rows_at(table, position, end, shape, 1)
        keys = _load_keys(pages, row, needed, shape)
    return keys


@triton.jit
def _load_keys(pages, row, needed, shape: tl.constexpr):
    """Load one head's keys and values at rows [n] of the pages."""
    dim = tl.arange(0, shape.padded)
    at = row[:, None] * shape.size + dim[None, :]
    inside = needed[:, None] & (dim < shape.size)[None, :]
    key, value = tl.load(pages.k + at, mask=inside, other=0.0), tl.load(pages.v + at, mask=inside, other=0.0)
    k_scale, v_scale = needed.to(tl.float32), needed.to(tl.float32)
    if shape.scaled:
        k_scale = tl.load(pages.k_scales + row, mask=needed, other=0.0)
        v_scale = tl.load(pages.v_scales + row, mask=needed, other=0.0)
    return Keys(key, value, k_scale, v_scale)


@triton.jit
def _attend_first(query, keys, needed, soft_cap, shape: tl.constexpr, variant: tl.constexpr):
    """Attend to a tile of keys: return the largest score, the sum of weights, the weighted values."""
    tile: tl.constexpr = variant.tile
    padded: tl.constexpr = shape.padded
    none = tl.full([tile], float("-inf"), tl.float32)
    key_scale = keys.k_scale if shape.scaled else None
    top, _, weight = weigh(query, keys.k.to(query.dtype), key_scale, needed[None, :], none, soft_cap, variant.capped)
    total = tl.sum(weight, 1)
    if shape.scaled:
        weight = weight * (keys.v_scale * SCALE_UNIT)[None, :]
    return top, total, multiply(weight.to(query.dtype), keys.v.to(query.dtype), tl.zeros([tile, padded], tl.float32))


@triton.jit
def _attend_one(query, keys, seen, top, total, mixed, soft_cap, shape: tl.constexpr, variant: tl.constexpr):
    """Take in one key, without a matrix instruction."""
    score = tl.sum(query.to(tl.float32) * keys.k.to(query.dtype).to(tl.float32), 1)  # [tile]
    value = keys.v.to(query.dtype).to(tl.float32)  # [1, D]
    if shape.scaled:
        score = score * tl.sum(keys.k_scale, 0)
        value = value * (keys.v_scale * SCALE_UNIT)[:, None]
    if variant.capped:
        score = capped(score, soft_cap)
    weight = tl.where(seen, score * 0.0 + 1.0, 0.0)
    return merge_softmax(top, total, mixed, tl.where(seen, score, float("-inf")), weight, weight[:, None] * value)


@triton.jit
def _merged(merge, here, used, line, valid, top, total, mixed, shape: tl.constexpr, parts: tl.constexpr):
    """Return whether this program is the last one of its text, and the results of all that share it."""
    padded: tl.constexpr = shape.padded
    lines: tl.constexpr = line.shape[0]
    is_last = used == 1
    if used > 1:
        dim = tl.arange(0, padded)
        mine = (tl.program_id(0) * parts + here) * lines + line  # [tile]
        tl.store(merge.mixed + mine[:, None] * padded + dim[None, :], mixed, mask=valid[:, None])
        tl.store(merge.tops + mine, top, mask=valid)
        tl.store(merge.totals + mine, total, mask=valid)
        tl.debug_barrier()  # all writes of this program come before its count
        is_last = tl.atomic_add(merge.counters + tl.program_id(0), 1, sem="acq_rel") == used - 1
        if is_last:
            tl.store(merge.counters + tl.program_id(0), 0)
            top = tl.full([lines], float("-inf"), tl.float32)
            total = tl.zeros([lines], tl.float32)
            mixed = tl.zeros([lines, padded], tl.float32)
            for part in tl.static_range(parts):  # in one order, whichever program is last
                each = (tl.program_id(0) * parts + part) * lines + line
                known = valid & (part < used)
                part_top = tl.load(merge.tops + each, mask=known, other=float("-inf"), cache_modifier=".cg")
                part_total = tl.load(merge.totals + each, mask=known, other=0.0, cache_modifier=".cg")
                inside = merge.mixed + each[:, None] * padded + dim[None, :]
                part_mixed = tl.load(inside, mask=known[:, None], other=0.0, cache_modifier=".cg")
                top, total, mixed = merge_softmax(top, total, mixed, part_top, part_total, part_mixed)
    return is_last, top, total, mixed
