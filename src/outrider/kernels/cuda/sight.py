"""What the tokens of a tile see, for the attention kernel: their row, first and last positions, slots of a branch."""

from __future__ import annotations

import triton
import triton.language as tl

from .bounds import bound


@triton.jit
def row_of(query_starts, rows, tile_index, in_tile: tl.constexpr):
    """The row that a tile belongs to: row b has its first at query_starts[b] // in_tile + b."""
    low, high = tile_index * 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        after = tl.load(query_starts + middle) // in_tile + middle > tile_index
        low, high = tl.where(after, low, middle), tl.where(after, middle, high)
    return low


@triton.jit
def sight(
    positions,
    query_starts,
    row,
    begin,
    own,
    valid,
    window,
    skip,
    covered,
    causal: tl.constexpr,
    anchored: tl.constexpr,
):
    """The first and the last position that each line of a tile sees."""
    position = tl.load(positions + own, mask=valid, other=0)
    last = position
    if not causal:
        highest = 0
        end = tl.load(query_starts + row + 1)
        for each in range(bound(begin), bound(end), 64):
            place = each + tl.arange(0, 64)
            highest = tl.maximum(highest, tl.max(tl.load(positions + place, mask=place < end, other=0), 0))
        last = position * 0 + highest
    counted = position
    if anchored:
        counted = position * 0 + tl.load(positions + begin) - 1
    first = tl.maximum(tl.where(window > 0, counted - window + 1, 0), skip)
    last = tl.minimum(last, covered - 1)
    return tl.where(valid, first, 1), tl.where(valid, last, 0)


@triton.jit
def branch(slot, at, needed, node, position, begin, origin, chained, slots, parents, start):
    """Slots [block] of the page table, but those of this step's tokens on the way to `node`, which have their own."""
    if chained:
        own = tl.load(slots + begin + at - origin, mask=needed & (at >= origin), other=-1)
        slot = tl.where(own >= 0, own, slot)
    else:
        while (node >= 0) & (position >= start):
            own = tl.load(slots + node)
            slot = tl.where((at == position) & (own >= 0), own, slot)
            node = tl.load(parents + node)
            position -= 1
    return slot
