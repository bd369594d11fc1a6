"""Inputs of drafters after a step, by the native library: next_tokens, draft_inputs, block_inputs, next_slots.

Output sizes depend on the shapes of the inputs alone; the native code checks their values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..structures import BlockInputs, DraftInputs, NextTokens
from . import _native
from .runtime import FLAG, INTEGER, address, integers


def next_tokens(
    chosen: Tensor, drafted: Tensor, query_starts: Tensor, backup: Tensor, discard: Tensor, vocabulary: int
) -> NextTokens:
    rows, columns = chosen.shape
    out = NextTokens(
        tokens=torch.empty(rows, dtype=INTEGER),
        counts=torch.empty(rows, dtype=INTEGER),
        rejected=torch.empty(rows, dtype=INTEGER),
        ends=torch.empty(rows, dtype=INTEGER),
    )
    _native.next_tokens(
        integers(chosen, rows, columns),
        rows,
        columns,
        integers(drafted, rows),
        integers(query_starts, rows + 1),
        integers(backup, rows),
        address(discard, FLAG, rows),
        vocabulary,
        out.tokens.data_ptr(),
        out.counts.data_ptr(),
        out.rejected.data_ptr(),
        out.ends.data_ptr(),
    )
    return out


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
    if extra < 1:
        raise ValueError(f"`extra` is {extra}: a drafter reads at least the newest token")
    count, rows = tokens.shape[0], ends.shape[0]
    total = count + rows * (extra - shift)  # X: independent of the accepted tokens
    out = DraftInputs(
        tokens=torch.empty(total, dtype=INTEGER),
        positions=torch.empty(total, dtype=INTEGER),
        query_starts=torch.empty(rows + 1, dtype=INTEGER),
        samples=torch.empty(rows * extra, dtype=INTEGER),
        sources=torch.empty(count, dtype=INTEGER),
        rejected=torch.empty(total, dtype=FLAG),
    )
    _native.draft_inputs(
        integers(tokens, count),
        integers(positions, count),
        integers(query_starts, rows + 1),
        integers(ends, rows),
        integers(newest, rows),
        rows,
        count,
        extra,
        bool(shift),
        mask,
        out.tokens.data_ptr(),
        out.positions.data_ptr(),
        out.query_starts.data_ptr(),
        out.samples.data_ptr(),
        out.sources.data_ptr(),
        out.rejected.data_ptr(),
    )
    return out


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
    if width < 0:
        raise ValueError(f"`width` is {width}: a block has 0 masks or more")
    count, (rows, table_width) = positions.shape[0], page_tables.shape
    out = BlockInputs(
        context_slots=torch.empty(count, dtype=INTEGER),
        tokens=torch.empty(rows * (width + 1), dtype=INTEGER),
        positions=torch.empty(rows * (width + 1), dtype=INTEGER),
        slots=torch.empty(rows * (width + 1), dtype=INTEGER),
        query_starts=torch.empty(rows + 1, dtype=INTEGER),
    )
    _native.block_inputs(
        integers(positions, count),
        integers(query_starts, rows + 1),
        integers(ends, rows),
        integers(newest, rows),
        rows,
        count,
        integers(page_tables, rows, table_width),
        table_width,
        page_size,
        limit,
        width,
        mask,
        out.context_slots.data_ptr(),
        out.tokens.data_ptr(),
        out.positions.data_ptr(),
        out.slots.data_ptr(),
        out.query_starts.data_ptr(),
    )
    return out


def next_slots(
    positions: Tensor, page_tables: Tensor, page_size: int, limit: int, count: int = 1
) -> tuple[Tensor, Tensor]:
    if count < 0:
        raise ValueError(f"`count` is {count}: a row goes on by 0 positions or more")
    rows, width = page_tables.shape
    following = torch.empty(rows * count, dtype=INTEGER)  # [B * count]
    slots = torch.empty(rows * count, dtype=INTEGER)  # [B * count]
    _native.next_slots(
        integers(positions, rows),
        integers(page_tables, rows, width),
        rows,
        width,
        page_size,
        limit,
        count,
        following.data_ptr(),
        slots.data_ptr(),
    )
    return following, slots
