"""The walk of an attention kernel over the keys that a tile of queries sees, block by block."""

from __future__ import annotations

import triton
import triton.language as tl

from .bounds import bound
from .sight import branch
from .softmax import step


@triton.jit
def walk(
    query, keys, values, table, positions, slots, parents,
    start, stop, first, last, lowest, highest, own, begin, origin, token, end, chained,
    kv_heads: tl.constexpr, size: tl.constexpr, padded: tl.constexpr, page: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, trees: tl.constexpr,
):  # fmt: skip
    """Blocks of keys from `start` to `stop`: the largest score, the sum of weights, the weighted values."""
    top = tl.full([tile], float("-inf"), tl.float32)
    total = tl.zeros([tile], tl.float32)
    mixed = tl.zeros([tile, padded], tl.float32)
    common = stop  # below, all tokens of a row see the same keys
    if trees:
        common = tl.minimum(stop, tl.maximum(start, origin // block * block))
    for each in range(bound(start), bound(common), block):
        at = each + tl.arange(0, block)
        needed = (at >= lowest) & (at <= highest)
        slot = tl.maximum(tl.load(table + at // page, mask=needed, other=0), 0) * page + at % page  # [block]
        seen = (at[None, :] >= first[:, None]) & (at[None, :] <= last[:, None])
        top, total, mixed = step(
            query, keys, values, slot, needed, seen, top, total, mixed, kv_heads, size, padded, page, tile, block
        )
    if trees:
        ends = tl.where(chained, token + 1, end)
        for each in range(bound(common), bound(stop), block):
            at = each + tl.arange(0, block)
            for node in range(bound(token), bound(ends)):
                reach = tl.where(chained, highest, tl.load(positions + node))
                needed = (at >= lowest) & (at <= reach)
                slot = tl.maximum(tl.load(table + at // page, mask=needed, other=0), 0) * page + at % page  # [block]
                slot = branch(slot, at, needed, node, reach, begin, origin, chained, slots, parents, each)
                mine = (own == node) | chained
                seen = mine[:, None] & (at[None, :] >= first[:, None]) & (at[None, :] <= last[:, None])
                top, total, mixed = step(
                    query, keys, values, slot, needed, seen, top, total, mixed,
                    kv_heads, size, padded, page, tile, block,
                )  # fmt: skip
    return top, total, mixed
