"""Attention with gradients, where each query sees one range of its row's keys, and perhaps one of a second set.

The meaning is that of train/modules.py. Keys of a query's own are that second set: laid end to end they are a row of
keys like any other, of which it sees a short range. No scores are written down, no tile is read that nobody sees, and
nothing is added up in an order that hangs on who is first: the same numbers come out every time.

Letters: B rows, N queries of a row, M keys of a row, H heads, G key/value heads, D.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..sight import Sight
from .ranges_kernel import by_keys, by_queries, forward


class Tiling(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int


FORWARD = Tiling(64, 64, 4, 3)
BY_QUERIES = Tiling(64, 64, 4, 2)
BY_KEYS = Tiling(64, 64, 4, 2)
BY_OWN_KEYS = Tiling(16, 64, 4, 1)  # few queries see a tile of them
SCAN = 1024  # queries that are asked at a time which keys they see


def attend(query: Tensor, sight: Sight) -> Tensor:
    """As in train/modules.py: query [B, N, H, D]."""
    common, own, begins = (sight.keys, sight.values, sight.begins, sight.ends), sight.own, sight.begins
    assert query.dtype == sight.keys.dtype == sight.values.dtype and begins.dtype == sight.ends.dtype == torch.int32
    mixed: Tensor
    if own is None:
        mixed = _Ranges.apply(query, *common)  # type: ignore[no-untyped-call]
        return mixed
    assert own.keys.dtype == own.values.dtype == query.dtype
    count, (_, groups, each, *_) = query.shape[1], own.keys.shape
    own_begins = torch.arange(count, dtype=torch.int32, device=query.device) // (count // groups) * each
    own_begins = own_begins.expand_as(begins)  # [B, N]
    own_ends = own_begins + (each if own.counts is None else own.counts)
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
        forward[(triton.cdiv(count, FORWARD.queries), heads, rows)](
            query,
            keys,
            values,
            begins,
            ends,
            *own,
            out,
            logsums,
            count,
            length,
            0 if own[0] is None else own[0].shape[1],
            **_sizes(query, keys, FORWARD),
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
        by_queries[(triton.cdiv(count, BY_QUERIES.queries), heads, rows)](
            query,
            keys,
            values,
            begins,
            ends,
            *own,
            out,
            logsums,
            by_out,
            by_query,
            inner,
            count,
            length,
            0 if own[0] is None else own[0].shape[1],
            **_sizes(query, keys, BY_QUERIES),
        )
        known = by_out, logsums, inner
        by_common = _keys(BY_KEYS, *known, query, keys, values, begins, ends)
        if own[0] is None:
            return by_query, *by_common, None, None, None, None, None, None
        by_own = _keys(BY_OWN_KEYS, *known, query, *own)
        return by_query, *by_common, None, None, *by_own, None, None


def _keys(
    tiling: Tiling,
    by_out: Tensor,
    logsums: Tensor,
    inner: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    begins: Tensor,
    ends: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradients of one set of keys and its values, [B, M, G, D] each."""
    rows, length, groups, _ = keys.shape
    for_keys, for_values = torch.empty_like(keys), torch.empty_like(values)
    by_keys[(triton.cdiv(length, tiling.keys), groups, rows)](
        query,
        keys,
        values,
        begins,
        ends,
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


def _whole(*tensors: Any) -> tuple[Any, ...]:
    return tuple(None if each is None else each.contiguous() for each in tensors)


def _sizes(query: Tensor, keys: Tensor, tiling: Tiling) -> dict[str, Any]:
    heads, size = query.shape[2:]
    return {
        "scale": size**-0.5,
        "heads": heads,
        "groups": keys.shape[2],
        "size": size,
        "width": max(triton.next_power_of_2(size), 16),
        "query_block": tiling.queries,
        "key_block": tiling.keys,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
