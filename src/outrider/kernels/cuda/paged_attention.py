"""Attention over pages: prompts, decoding, chains, trees and blocks in one kernel.

A program takes a tile of queries (some tokens of one row, all query heads of one key/value head) over keys in blocks
that are aligned to absolute positions. Blocks add up to chunks of fixed length, chunks to the whole, in ascending
order; a block or a chunk that a query does not see changes none of its bits. So a token's result depends neither on
its batch nor on the page table's width, nor on whether the chunks of a row are walked by one program or each by its
own. Wide tiles, for long prompts, do without chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import Batch, LayerPages
from .device import bound, multiply, rounded
from .pdl import LAUNCH, wait
from .rope import Turn, angles, store, store_all, turned

CHUNK, ENDLESS = 256, 1 << 30  # positions
NARROW, WIDE = 16, 64  # lines in a tile: a token and one of its query heads each
PROMPT = 64  # tokens a row, on average, from which wide tiles pay
FEW = 2  # chunks that one program walks as fast as several would and a further kernel puts together
BUSY = 512  # programs that fill the device: from there on one walks all chunks of its row
SCRATCH = 1 << 28  # bytes that chunks may take until they are put together
WARPS, STAGES = 4, 5  # stages: the table first, then keys and values, two blocks ahead
LARGE, LARGE_WARPS, LARGE_STAGES = 128, 8, 3  # the same for heads of that size
BRANCHES = 4  # tokens of a tree in a tile: each reads its own branch

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Heads:
    """What an attention layer's heads are, and what they see: see AttentionWeights."""

    count: int  # H
    kv: int  # G
    size: int  # D
    scale: float
    window: int
    skip: int
    causal: bool
    anchored: bool
    fixed: bool  # the same tiles for any batch


def paged(
    queries: Tensor,
    heads: Heads,
    batch: Batch,
    pages: LayerPages,
    result: torch.dtype = torch.float32,
    turning: Turn | None = None,
) -> Tensor:
    """Attention of queries [T, H * D] f32 over the pages: [T, H * D] of the dtype `result`.

    With `turning`, queries are followed by keys and values, [T, (H + 2 * G) * D], all as they were projected: they are
    turned and stored first. Only for causal chains, with rotation and without norms of heads: see attention.py.
    """
    tokens, (rows, width) = queries.shape[0], batch.page_tables.shape
    page, dtype, group = pages.keys.shape[2], pages.keys.dtype, heads.count // heads.kv
    padded = max(16, triton.next_power_of_2(heads.size))
    wide = not heads.fixed and batch.parents is None and dtype is not torch.float32 and tokens >= PROMPT * rows
    tile = max(WIDE if wide else NARROW, triton.next_power_of_2(group))
    in_tile = tile // group if batch.parents is None else min(tile // group, BRANCHES)
    fresh = 0 if turning is None else triton.next_power_of_2(in_tile)
    tiles = tokens // in_tile + rows  # enough: each row may end with a tile that is not full
    chunks, programs = -(-width * page // CHUNK), tiles * heads.kv
    split = not wide and chunks > FEW and programs < BUSY and 4 * chunks * tokens * heads.count * heads.size <= SCRATCH
    strips = min(chunks, 2 * BUSY // programs) if split else 1
    large = padded > LARGE if wide else padded >= LARGE
    device = queries.device
    out = torch.empty(tokens, heads.count * heads.size, dtype=result, device=device)
    cos, sin = (None, None) if turning is None else (turning.cos, turning.sin)
    assert turning is None or not (cos is None or wide or batch.parents is not None)
    mixed, sums, spans = out, out, batch.slots  # not used, unless chunks must be put together
    if split:
        mixed = torch.empty((chunks, *out.shape), dtype=torch.float32, device=device)  # [chunks, T, H * D]
        sums = torch.empty((chunks, tokens, heads.count, 2), dtype=torch.float32, device=device)
        spans = torch.empty((tokens, 2), dtype=torch.int32, device=device)
    _attend[(tiles, heads.kv, strips)](
        queries,
        pages.keys,
        pages.values,
        batch.positions,
        batch.slots,
        batch.slots if batch.parents is None else batch.parents,
        batch.query_starts,
        batch.page_tables,
        out,
        mixed,
        sums,
        spans,
        queries if cos is None else cos,
        queries if sin is None else sin,
        tokens,
        rows,
        width,
        batch.page_tables.stride(0),
        strips,
        heads.window,
        heads.skip,
        1 if cos is None else cos.shape[0],
        heads.scale * LOG2E,
        heads=heads.count,
        kv_heads=heads.kv,
        size=heads.size,
        padded=padded,
        page=page,
        tile=tile,
        in_tile=in_tile,
        block=_block(padded * dtype.itemsize),
        chunk=ENDLESS if wide else CHUNK,
        causal=heads.causal,
        anchored=heads.anchored,
        trees=batch.parents is not None,
        split=split,
        wide=wide,
        fresh=fresh,
        num_warps=LARGE_WARPS if large else WARPS,
        num_stages=LARGE_STAGES if large else STAGES,
        enable_fp_fusion=False,  # the same roundings in every variant
        **LAUNCH,
    )
    if split:
        _combine[(tokens, heads.kv)](
            mixed,
            sums,
            spans,
            out,
            tokens,
            chunks,
            heads=heads.count,
            group=group,
            lines=triton.next_power_of_2(group),
            size=heads.size,
            padded=padded,
            num_warps=4,
            enable_fp_fusion=False,
            **LAUNCH,
        )
    return out


def _block(width: int) -> int:
    """Keys in a block, by the bytes of one: what two stages of keys and values fit with in shared memory."""
    return 128 if width <= 128 else 64 if width <= 256 else 32


@triton.jit(do_not_specialize=["tokens", "rows", "width", "table_stride", "strips", "window", "skip", "limit"])
def _attend(
    queries,
    keys,
    values,
    positions,
    slots,
    parents,
    query_starts,
    page_tables,
    out,
    mixed_parts,
    sum_parts,
    spans,
    cos,
    sin,
    tokens,
    rows,
    width,
    table_stride,
    strips,
    window,
    skip,
    limit,
    scale,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,
    in_tile: tl.constexpr,
    block: tl.constexpr,
    chunk: tl.constexpr,
    causal: tl.constexpr,
    anchored: tl.constexpr,
    trees: tl.constexpr,
    split: tl.constexpr,
    wide: tl.constexpr,
    fresh: tl.constexpr,
):
    group: tl.constexpr = heads // kv_heads
    kv_head = tl.program_id(1)
    row = row_of(query_starts, rows, tl.program_id(0), in_tile)
    begin, end = tl.load(query_starts + row), tl.load(query_starts + row + 1)
    token = begin + (tl.program_id(0) - begin // in_tile - row) * in_tile
    if token >= end:
        return
    end = tl.minimum(end, token + in_tile)
    line = tl.arange(0, tile)
    own, head = token + line // group, kv_head * group + line % group
    valid = own < end
    first, last = sight(
        positions, query_starts, row, begin, own, valid, window, skip, width * page, causal, anchored
    )  # [tile] each; whoever is not valid sees nothing
    lowest, highest = tl.min(tl.where(first <= last, first, 0x7FFFFFFF), 0), tl.max(last, 0)
    own_chunk = tl.minimum(first, last) // chunk  # [tile], the first that matters to a line
    from_chunk, to_chunk = tl.min(tl.where(valid, own_chunk, 0x7FFFFFFF), 0), highest // chunk + 1
    if fresh > 0:
        cosine, sine = angles(cos, sin, positions, own, valid, limit, size, padded)  # [tile, D]
        new = token + tl.arange(0, fresh)  # the tile's tokens
        new_cosine, new_sine = angles(cos, sin, positions, new, new < end, limit, size, padded)  # [fresh, D]
        slot = tl.load(slots + new, mask=new < end, other=-1)
    wait()  # so far only the batch and tables were read, which no kernel of a pass writes
    if split:
        here = tl.program_id(2)
        if here == 0:
            leads = valid & (line % group == 0) & (kv_head == 0)
            tl.store(spans + 2 * own, own_chunk, mask=leads)
            tl.store(spans + 2 * own + 1, last // chunk, mask=leads)
        from_chunk = here + tl.maximum((from_chunk - here + strips - 1) // strips, 0) * strips  # then every strips-th
        if from_chunk >= to_chunk:  # not true of all: even a line that sees nothing has a chunk
            return
    dim = tl.arange(0, padded)
    at = (own * heads + head).to(tl.int64)[:, None] * size + dim[None, :]  # [tile, D]
    inside = valid[:, None] & (dim < size)[None, :]
    if fresh > 0:
        store_all(
            queries, cos, sin, positions, slots, keys, values, begin, token, limit, kv_head,
            heads, kv_heads, size, padded, page, fresh,
        )  # fmt: skip
        query = turned(queries, own * (heads + 2 * kv_heads) + head, valid, cosine, sine, size, padded)
        store(queries, keys, values, new, slot, new_cosine, new_sine, kv_head, heads, kv_heads, size, padded, page)
        tl.debug_barrier()  # other threads of this program read what was stored
    else:
        query = tl.load(queries + at, mask=inside, other=0.0)
    query = (query * scale).to(keys.dtype.element_ty)
    origin = tl.load(positions + begin)
    chained = tl.load(positions + end - 1) - origin == end - 1 - begin  # all tokens of the row so far are a chain
    head_keys, head_values = keys + kv_head * page * size, values + kv_head * page * size
    table = page_tables + row.to(tl.int64) * table_stride
    top = tl.full([tile], float("-inf"), tl.float32)
    total = tl.zeros([tile], tl.float32)
    mixed = tl.zeros([tile, padded], tl.float32)
    for index in range(bound(from_chunk), bound(to_chunk), bound(strips)):
        start = tl.maximum(lowest // block * block, index * chunk)
        stop = tl.minimum(highest + 1, (index + 1) * chunk)
        part_top, part_total, part_mixed = walk(
            query, head_keys, head_values, table, positions, slots, parents,
            start, stop, first, last, lowest, highest, own, begin, origin, token, end, chained,
            kv_heads, size, padded, page, tile, block, trees,
        )  # fmt: skip
        if split:
            single = own_chunk == last // chunk  # [tile], nothing to be put together
            part = (index * tokens.to(tl.int64) + own) * heads + head  # [tile]
            shared = valid & (own_chunk <= index) & (last // chunk >= index) & (own_chunk < last // chunk)
            tl.store(sum_parts + 2 * part, part_top, mask=shared)
            tl.store(sum_parts + 2 * part + 1, part_total, mask=shared)
            tl.store(mixed_parts + part[:, None] * size + dim[None, :], part_mixed, mask=inside & shared[:, None])
            alone = inside & (single & (own_chunk == index))[:, None]
            tl.store(out + at, rounded(mean(part_total, part_mixed), out.dtype.element_ty), mask=alone)
        elif wide:
            top, total, mixed = part_top, part_total, part_mixed
        else:
            top, total, mixed = merge(top, total, mixed, part_top, part_total, part_mixed)
    if not split:
        tl.store(out + at, rounded(mean(total, mixed), out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _combine(
    mixed_parts,
    sum_parts,
    spans,
    out,
    tokens,
    chunks,
    heads: tl.constexpr,
    group: tl.constexpr,
    lines: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
):
    """Chunks of one token and one key/value head, where there are several."""
    wait()
    token = tl.program_id(0)
    from_chunk = tl.maximum(tl.load(spans + 2 * token), 0)
    to_chunk = tl.minimum(tl.load(spans + 2 * token + 1) + 1, chunks)
    if to_chunk - from_chunk < 2:
        return
    line, dim = tl.arange(0, lines), tl.arange(0, padded)
    valid = line < group
    inside = valid[:, None] & (dim < size)[None, :]
    head = token.to(tl.int64) * heads + tl.program_id(1) * group + line  # [lines]
    at = head[:, None] * size + dim[None, :]
    top = tl.full([lines], float("-inf"), tl.float32)
    total = tl.zeros([lines], tl.float32)
    mixed = tl.zeros([lines, padded], tl.float32)
    stride = tokens.to(tl.int64) * heads
    for index in tl.range(bound(from_chunk), bound(to_chunk), loop_unroll_factor=4):
        part_top = tl.load(sum_parts + 2 * (index * stride + head), mask=valid, other=0.0)
        part_total = tl.load(sum_parts + 2 * (index * stride + head) + 1, mask=valid, other=1.0)
        part_mixed = tl.load(mixed_parts + index * stride * size + at, mask=inside, other=0.0)
        top, total, mixed = merge(top, total, mixed, part_top, part_total, part_mixed)
    tl.store(out + at, rounded(mean(total, mixed), out.dtype.element_ty), mask=inside)


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


@triton.jit
def step(
    query,
    keys,
    values,
    slot,
    needed,
    seen,
    top,
    total,
    mixed,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    """One block of keys: what no line sees is not read; to a line that sees none of them nothing changes."""
    dim = tl.arange(0, padded)
    number = tl.maximum(slot // page, 0).to(tl.int64)
    place = number * (kv_heads * page * size) + slot % page * size  # [block]
    at = place[:, None] + dim[None, :]
    inside = needed[:, None] & (dim < size)[None, :]
    key = tl.load(keys + at, mask=inside, other=0.0)  # [block, D]
    score = tl.where(seen, multiply(query, tl.trans(key), tl.zeros([tile, block], tl.float32)), float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept = tl.exp2(top - base)
    weight = tl.exp2(score - base[:, None])
    value = tl.load(values + at, mask=inside, other=0.0)  # [block, D]
    mixed = multiply(weight.to(value.dtype), value, mixed * kept[:, None])
    return higher, total * kept + tl.sum(weight, 1), mixed


@triton.jit
def merge(top, total, mixed, part_top, part_total, part_mixed):
    """Two parts of a row's keys as one. An empty part, on either side, leaves the bits of the other."""
    higher = tl.maximum(top, part_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept, added = tl.exp2(top - base), tl.exp2(part_top - base)
    mixed = mixed * kept[:, None] + part_mixed * added[:, None]
    return higher, total * kept + part_total * added, mixed


@triton.jit
def mean(total, mixed):
    """0 where no key was seen."""
    return mixed / tl.where(total > 0, total, 1.0)[:, None]
