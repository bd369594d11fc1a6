"""Paged KV in plain torch: the slots that a token attends to, checks of trees, KV copies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..structures import AttentionWeights, Batch, LayerPages


def last_visible(batch: Batch, causal: bool) -> list[int]:
    """Return the last position that each token attends to: its own, or the highest of its row (padding has 0)."""
    positions = batch.positions.tolist()
    if causal:
        return positions
    rows = [positions[begin:end] for begin, end in pairwise(batch.query_starts.tolist())]
    return [highest for row in rows for highest in [max(row, default=0)] * len(row)]


def visible_slots(batch: Batch, row: int, token: int, last: int, weights: AttentionWeights, size: int) -> Tensor:
    """Return the slots of the keys that a token attends to, by position up to `last`: [keys]. `size`: of a page."""
    table, begin = batch.page_tables[row], int(batch.query_starts[row])
    origin = int(batch.positions[begin]) - 1 if weights.anchored else int(batch.positions[token])
    first = max(origin - weights.window + 1 if weights.window else 0, weights.skip)
    position = torch.arange(first, max(last + 1, first))
    slots = table.long()[position // size] * size + position % size
    while batch.parents is not None and token >= 0 and int(batch.positions[token]) >= first:
        if (slot := int(batch.slots[token])) != -1:
            slots[int(batch.positions[token]) - first] = slot
        token = int(batch.parents[token])
    return slots


def gather(pages: Tensor, slots: Tensor) -> Tensor:
    """Return the contents of these slots in fp32: [G, keys, D]."""
    size = pages.shape[2]
    return pages[slots // size, :, slots % size].float().transpose(0, 1).contiguous()


def page_and_offset(pages: LayerPages, slot: int) -> tuple[int, int]:
    """Return the page of a slot and the offset in it."""
    count, _, size, _ = pages.keys.shape
    if not 0 <= slot < count * size:
        raise ValueError(f"slot {slot} lies outside the storage of {count * size} slots")
    return divmod(slot, size)


def check_trees(batch: Batch, pages: LayerPages, causal: bool) -> None:
    """Check that parents precede their children in the row, positions grow by one per depth, and slots exist."""
    if batch.parents is None:
        return
    if not causal:
        raise ValueError("a layer that is not causal sees no trees: the batch must have no `parents`")
    starts, positions, slots = batch.query_starts.tolist(), batch.positions.tolist(), batch.slots.tolist()
    covered = batch.page_tables.shape[1] * pages.keys.shape[2]  # positions that a page table names
    for begin, end in pairwise(starts):
        for token, parent in enumerate(batch.parents[begin:end].tolist(), begin):
            if parent != -1 and not begin <= parent < token:
                raise ValueError(f"token {token} follows token {parent}, which does not come before it in its row")
            expected = positions[begin] if parent == -1 else positions[parent] + 1
            if positions[token] != expected or expected < 0:
                raise ValueError(f"token {token} stands at position {positions[token]}: expected {expected}")
            if slots[token] != -1:
                page_and_offset(pages, slots[token])
            elif expected >= covered:
                raise ValueError(f"token {token} has no slot, and its page table ends before position {expected}")


def copy_kv(pages: Sequence[LayerPages], sources: Tensor, targets: Tensor) -> None:
    steps = list(zip(sources.tolist(), targets.tolist(), strict=True))
    copies = [
        [(page_and_offset(layer, source), page_and_offset(layer, target)) for source, target in steps]
        for layer in pages
    ]
    for layer, moves in zip(pages, copies, strict=True):
        for (page, line), (to_page, to_line) in moves:
            for storage in (layer.keys, layer.values):
                storage[to_page, :, to_line] = storage[page, :, line]
