"""Inputs of drafters after a step: next_tokens, draft_inputs, block_inputs, next_slots.

Output sizes depend on shapes alone, and outputs are written completely. Padding rows of a CUDA graph come last and
have no tokens; elements without a row become harmless padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import BlockInputs, DraftInputs, NextTokens
from .device import LAUNCH, wait

CHUNK = 128  # elements that a program writes at once


def next_tokens(
    chosen: Tensor, drafted: Tensor, query_starts: Tensor, backup: Tensor, discard: Tensor, vocabulary: int
) -> NextTokens:
    rows, columns = chosen.shape
    out = torch.empty((4, rows), dtype=torch.int32, device=chosen.device)
    if rows:
        _next_tokens[(rows,)](
            chosen,
            drafted,
            query_starts,
            backup,
            discard,
            out,
            rows,
            columns,
            vocabulary,
            padded=triton.next_power_of_2(columns),
            num_warps=1,
        )
    return NextTokens(*out.unbind())


@triton.jit(do_not_specialize=["rows", "columns", "vocabulary"])
def _next_tokens(chosen, drafted, query_starts, backup, discard, out, rows, columns, vocabulary, padded: tl.constexpr):
    row = tl.program_id(0)
    first, following = tl.load(query_starts + row), tl.load(query_starts + row + 1)
    column = tl.arange(0, padded)
    ids = tl.load(chosen + row.to(tl.int64) * columns + column, mask=column < columns, other=-1)
    valid = tl.min(tl.where((ids >= 0) & (ids < vocabulary), padded, column), 0)
    speaks = (tl.load(discard + row) == 0) & (following > first)
    count = tl.where(speaks, valid, 0)
    rejected = tl.where(count > 0, tl.load(drafted + row) + 1 - count, 0)
    spare = tl.minimum(tl.maximum(tl.load(backup + row), 0), vocabulary - 1)
    last = tl.sum(tl.where(column == count - 1, ids, 0), 0)
    tl.store(out + row, tl.where(count > 0, last, spare))
    tl.store(out + rows + row, count)
    tl.store(out + 2 * rows + row, rejected)
    tl.store(out + 3 * rows + row, tl.maximum(following - 1 - rejected, 0))


def draft_inputs(
    tokens: Tensor,
    positions: Tensor,
    query_starts: Tensor,
    ends: Tensor,
    newest: Tensor,
    extra: int,
    shift: bool,
    mask: int,
) -> DraftInputs:
    count, rows, device = tokens.shape[0], ends.shape[0], tokens.device
    total = count + rows * (extra - shift)  # X
    read = torch.empty((2, total), dtype=torch.int32, device=device)
    rejected = torch.empty(total, dtype=torch.uint8, device=device)
    starts = torch.empty(rows + 1, dtype=torch.int32, device=device)
    samples = torch.empty(rows * extra, dtype=torch.int32, device=device)
    sources = torch.empty(count, dtype=torch.int32, device=device)
    _draft_inputs[(rows + 1,)](
        tokens,
        positions,
        query_starts,
        ends,
        newest,
        read,
        rejected,
        starts,
        samples,
        sources,
        rows,
        count,
        total,
        extra,
        mask,
        shift=int(shift),
        chunk=CHUNK,
        num_warps=2,
    )
    return DraftInputs(read[0], read[1], starts, samples, sources, rejected)


@triton.jit(do_not_specialize=["rows", "count", "total", "mask"])
def _draft_inputs(
    tokens,
    positions,
    query_starts,
    ends,
    newest,
    read,  # [2, X]: tokens and positions
    rejected,
    starts,
    samples,
    sources,
    rows,
    count,
    total,
    extra,
    mask,
    shift: tl.constexpr,
    chunk: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.load(query_starts + row)
    start = first + rows_before(query_starts, row, chunk) * (extra - shift)
    tl.store(starts + row, start)
    at = tl.arange(0, chunk)
    if row == rows:  # elements without a row
        begin = start
        while begin < total:
            output = begin + at
            tl.store(read + output, 0, mask=output < total)
            tl.store(read + total + output, 0, mask=output < total)
            tl.store(rejected + output, 1, mask=output < total)
            begin += chunk
        begin = first
        while begin < count:
            tl.store(sources + begin + at, -1, mask=begin + at < count)
            begin += chunk
    else:
        length = tl.load(query_starts + row + 1) - first
        real = length > 0
        kept = tl.load(ends + row) - first + 1 - shift
        new = tl.load(newest + row)
        origin = tl.load(positions + first, mask=real, other=0)
        here = tl.where(real, length + extra - shift, 0)
        begin = 0
        while begin < tl.maximum(here, extra):
            column = begin + at
            inside = column < here
            token = tl.load(tokens + first + shift + column, mask=inside & (column < kept), other=0)
            token = tl.where(column < kept, token, tl.where(column == kept, new, mask))
            dropped = column >= kept + extra
            tl.store(read + start + column, tl.where(dropped, 0, token), mask=inside)
            tl.store(read + total + start + column, tl.where(dropped, 0, origin + column), mask=inside)
            tl.store(rejected + start + column, dropped.to(tl.uint8), mask=inside)
            tl.store(samples + row * extra + column, tl.where(real, start + kept + column, 0), mask=column < extra)
            begin += chunk
        begin = 0
        while begin < length:
            offset = begin + at
            stays = (offset < kept) | (shift == 1)
            tl.store(sources + first + offset, tl.where(stays, start + offset, -1), mask=offset < length)
            begin += chunk


def block_inputs(
    positions: Tensor,
    query_starts: Tensor,
    ends: Tensor,
    newest: Tensor,
    page_tables: Tensor,
    page_size: int,
    width: int,
    mask: int,
    limit: int,
) -> BlockInputs:
    count, (rows, pages), device = positions.shape[0], page_tables.shape, positions.device
    context_slots = torch.empty(count, dtype=torch.int32, device=device)
    block = torch.empty((3, rows * (width + 1)), dtype=torch.int32, device=device)
    starts = torch.empty(rows + 1, dtype=torch.int32, device=device)
    _block_inputs[(rows + 1,)](
        positions,
        query_starts,
        ends,
        newest,
        page_tables,
        page_tables.stride(0),
        pages,
        page_size,
        limit,
        context_slots,
        block,
        starts,
        rows,
        count,
        width + 1,
        mask,
        chunk=CHUNK,
        num_warps=2,
    )
    return BlockInputs(context_slots, block[0], block[1], block[2], starts)


@triton.jit(do_not_specialize=["table_stride", "pages", "limit", "rows", "count", "mask"])
def _block_inputs(
    positions,
    query_starts,
    ends,
    newest,
    page_tables,
    table_stride,
    pages,
    page_size,
    limit,
    context_slots,
    filled,  # [3, B * (W + 1)]: tokens, positions and slots
    starts,
    rows,
    count,
    across,
    mask,
    chunk: tl.constexpr,
):
    row = tl.program_id(0)
    first = tl.load(query_starts + row)
    tl.store(starts + row, rows_before(query_starts, row, chunk) * across)
    at = tl.arange(0, chunk)
    if row == rows:
        begin = first
        while begin < count:
            tl.store(context_slots + begin + at, -1, mask=begin + at < count)
            begin += chunk
    else:
        following, end, new = tl.load(query_starts + row + 1), tl.load(ends + row), tl.load(newest + row)
        real = following > first
        table = page_tables + row.to(tl.int64) * table_stride
        begin = first
        while begin < following:
            token = begin + at
            position = tl.load(positions + token, mask=token < following, other=0).to(tl.int64)
            slot = slot_of(table, position, token <= end, pages, page_size, limit)
            tl.store(context_slots + token, slot, mask=token < following)
            begin += chunk
        origin = tl.load(positions + end, mask=real, other=0).to(tl.int64) + 1
        begin = 0
        while begin < across:
            offset = begin + at
            inside = offset < across
            slot = slot_of(table, origin + offset, inside & real, pages, page_size, limit)
            output = filled + row * across + offset
            tl.store(output, tl.where(real, tl.where(offset == 0, new, mask), 0), mask=inside)
            tl.store(output + rows * across, tl.where(slot < 0, 0, origin + offset).to(tl.int32), mask=inside)
            tl.store(output + 2 * rows * across, slot, mask=inside)
            begin += chunk


def next_slots(
    positions: Tensor, page_tables: Tensor, page_size: int, limit: int, count: int = 1
) -> tuple[Tensor, Tensor]:
    rows, pages = page_tables.shape
    out = torch.empty((2, rows * count), dtype=torch.int32, device=positions.device)
    if rows * count:
        _next_slots[(triton.cdiv(rows * count, CHUNK),)](
            positions,
            page_tables,
            page_tables.stride(0),
            pages,
            page_size,
            limit,
            count,
            out,
            rows * count,
            chunk=CHUNK,
            **LAUNCH,
        )
    return out[0], out[1]


@triton.jit(
    do_not_specialize=["table_stride", "pages", "limit", "total", "count"],
    do_not_specialize_on_alignment=["positions", "page_tables", "out"],
)
def _next_slots(positions, page_tables, table_stride, pages, page_size, limit, count, out, total, chunk: tl.constexpr):
    wait()
    output = tl.program_id(0) * chunk + tl.arange(0, chunk)
    inside = output < total
    row = output // count
    position = tl.load(positions + row, mask=inside, other=0).to(tl.int64) + 1 + output % count
    slot = slot_of(page_tables + row.to(tl.int64) * table_stride, position, inside, pages, page_size, limit)
    tl.store(out + output, tl.where(slot < 0, 0, position).to(tl.int32), mask=inside)
    tl.store(out + total + output, slot, mask=inside)


@triton.jit
def slot_of(table, position, wanted, pages, page_size, limit):
    """Return the slots of int64 positions in the page table at `table`; -1 if there is none or it is not wanted."""
    index = position // page_size
    there = wanted & (position >= 0) & (position < limit) & (index < pages)
    page = tl.load(table + index, mask=there, other=-1)
    return tl.where(page < 0, -1, page * page_size + (position % page_size).to(tl.int32))


@triton.jit
def rows_before(query_starts, row, chunk: tl.constexpr):
    """Return how many rows before this one have tokens."""
    found = 0
    begin = 0
    while begin < row:
        at = begin + tl.arange(0, chunk)
        first = tl.load(query_starts + at, mask=at < row, other=0)
        following = tl.load(query_starts + at + 1, mask=at < row, other=0)
        found += tl.sum((following > first).to(tl.int32), 0)
        begin += chunk
    return found
