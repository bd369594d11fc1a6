"""Paged attention: prefill, decoding, chains, trees and blocks in one kernel.

A program takes a tile of queries (some tokens of one row, all query heads of one KV head) and iterates over tiles of
keys that are aligned to absolute positions. Key tiles are combined into chunks, chunks into the result; those outside a
query's range change none of its bits. In a batch-invariant layer all chunks have the same length and are combined in
ascending order. So a token's result does not depend on its batch, on the width of the page table, or on how the chunks
of a row are split over programs. In other layers a program has one chunk: its share of the keys, or all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import Batch, LayerPages
from .device import LAUNCH, loop_bound, multiply, rounded, shared_memory, wait
from .pointwise import capped
from .rope import (
    HeadShape,
    KvPages,
    RopeTables,
    RopeWeights,
    Tokens,
    kv_pages,
    load_angles,
    load_new_tokens,
    rotated,
    store_kv,
    store_row_kv,
)

CHUNK, ENDLESS = 256, 1 << 30  # positions per chunk; ENDLESS: one chunk
# Positions per chunk of a text that is alone in its batch: a program takes about 1 us for a tile of keys, `_combine`
# 1.4 us. On an H200 a layer of 8B takes 119 instead of 118 us after 60 tokens, 121 instead of 128 after 440, and 122
# instead of 124 after 1,000. With 8 texts it takes longer.
ALONE = 64
NARROW, WIDE, WIDEST = 16, 64, 256  # lines in a query tile, each a token and one of its query heads
PROMPT, LONG = 64, 1024  # average tokens per row from which wide tiles are faster, and the widest
HOPPER_MEMORY = 200 << 10  # bytes of shared memory; the widest tiles do not fit into those of smaller GPUs
FEW = 2  # up to this many chunks, splitting and combining costs more than it saves
BUSY = 256  # programs that fill the GPU: with fewer, the chunks of a row are split among several
SCRATCH = 1 << 28  # largest scratch memory of split chunks, bytes
# Programs above which tiles of fewer keys are faster: of these four fit on a multiprocessor of an H200, of others two
# or three. Microseconds of a layer of 8B: 64 texts of 128 tokens 15 instead of 20, of 1,000 tokens 68 instead of 81, 32
# texts with five new tokens each 13.6 instead of 16.0; but 32 texts of 320 tokens, 320 programs, 21 instead of 19.
# Steps of more than MOST_TOKENS keep the others: those with prompts are not captured, so nothing would compile the
# kernel before the first request, and for 64 texts with five new tokens each no difference was found.
MANY_PROGRAMS, FEW_KEYS, MOST_TOKENS = 396, 32, 256
WARPS, STAGES = 4, 5  # stages: page table, then keys and values two tiles ahead
LARGE, LARGE_WARPS, LARGE_STAGES = 128, 8, 3  # the same for heads of more than LARGE dimensions and for wide tiles
LINES_PER_WARP = 16  # of wide tiles of smaller heads
COMBINED = 64  # chunks that are combined at a time, if the order of sums does not matter
BRANCHES = 4  # tree tokens in a query tile: each reads its own branch
LOG2E = 1.4426950408889634
# Weights times the scales of values are rounded to halves: 512 times as large, they lose no more bits to underflow than
# the weights alone would, for values of about 1.
SCALE_UNIT: tl.constexpr = tl.constexpr(512.0)
STARTS: tl.constexpr = tl.constexpr(64)  # rows whose first tokens are read at a time


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer and their attention range: see AttentionWeights."""

    count: int  # H
    kv: int  # G
    size: int  # D
    scale: float
    window: int
    skip: int
    causal: bool
    anchored: bool
    batch_invariant: bool  # use the same tiles for any batch
    soft_cap: float = 0.0
    sinks: Tensor | None = None  # [H] f32
    key_factors: Tensor | None = None  # [G, D] f32, see kv_quantization.py; only for int8 pages


class Chunks(NamedTuple):
    """Argument of kernels: results of single chunks, which `_combine` combines."""

    mixed: Tensor  # [chunks, T, H * D] f32: weighted sums of values
    sums: Tensor  # [chunks, T, H, 2] f32: the largest score, the sum of weights
    spans: Tensor  # [T, 2] int32: the first and the last chunk of a token, as indices into `mixed` and `sums`


class Variant(NamedTuple):
    """Constants of the attention kernel beside HeadShape."""

    tile: int  # lines in a query tile
    in_tile: int  # tokens in a query tile
    block: int  # keys in a tile
    chunk: int  # positions in a chunk
    balanced: bool  # a row is cut into one chunk for each of its programs, of at least `chunk` positions
    causal: bool
    anchored: bool
    trees: bool
    split: bool  # the chunks of a row are split over programs
    wide: bool  # long prompts: positions that all lines attend to have a loop without masks
    single: bool  # a row has one chunk
    capped: bool  # scores have a soft cap
    new_rows: int  # tokens of a tile that the kernel rotates and stores; 0: they are stored already


class Lines(NamedTuple):
    """The lines of a query tile, and their attention ranges."""

    token: tl.tensor  # [tile]
    first: tl.tensor  # [tile]: first and last position of each range
    last: tl.tensor
    lowest: tl.tensor  # of all lines
    highest: tl.tensor
    all_first: tl.tensor  # all valid lines attend to the positions from all_first to all_last
    all_last: tl.tensor


class TileTokens(NamedTuple):
    """The tokens `first` .. `end` - 1 of a query tile, in a row from token `begin` at position `origin`."""

    begin: tl.tensor
    origin: tl.tensor
    first: tl.tensor
    end: tl.tensor
    chained: tl.tensor  # the row is a chain up to this tile


def paged_attention(
    queries: Tensor,
    heads: Heads,
    batch: Batch,
    pages: LayerPages,
    result: torch.dtype = torch.float32,
    rope: RopeWeights | None = None,
    log_sums: Tensor | None = None,
) -> Tensor:
    """Return the attention of queries [T, H * D] f32 over the pages: [T, H * D] of the dtype `result`.

    log_sums: [T, H] f32, for long prompts: receives the logarithm of each sum of weights, -inf for no keys.
    With `rope`, `queries` holds projected queries, keys and values, [T, (H + 2 * G) * D]: they are rotated and stored
    first. Only for causal chains with rope and without per-head norms: see layers.py.
    """
    tokens, (rows, width) = queries.shape[0], batch.page_tables.shape
    page, dtype, group = pages.keys.shape[2], pages.keys.dtype, heads.count // heads.kv
    padded = max(16, triton.next_power_of_2(heads.size))
    wide = (
        not heads.batch_invariant and batch.parents is None and dtype is not torch.float32 and tokens >= PROMPT * rows
    )
    widest = padded <= LARGE and tokens >= LONG * rows and shared_memory() >= HOPPER_MEMORY
    lines = NARROW if not wide else WIDEST if widest else WIDE
    if not (wide or heads.batch_invariant) and batch.parents is None and dtype is not torch.float32:
        # One tile holds all tokens of a row, so that its keys are read once.
        lines = min(max(lines, triton.next_power_of_2(-(-tokens // rows) * group)), WIDE)
    tile = max(lines, triton.next_power_of_2(group))
    in_tile = tile // group if batch.parents is None else min(tile // group, BRANCHES)
    new_rows = 0 if rope is None else triton.next_power_of_2(in_tile)
    tiles = tokens // in_tile + rows  # an upper bound: the last tile of a row may not be full
    span = ALONE if rows == 1 and not heads.batch_invariant else CHUNK
    chunks, programs = -(-width * page // span), tiles * heads.kv
    strips = min(chunks, BUSY // programs)  # programs for a row
    stored = chunks if heads.batch_invariant else strips + 1  # the first position may be within a chunk
    fits = 4 * stored * tokens * heads.count * heads.size <= SCRATCH
    split = not wide and chunks > FEW and strips > 1 and fits
    strips = strips if split else 1
    single = wide or not (split or heads.batch_invariant)
    warps, stages = (LARGE_WARPS, LARGE_STAGES) if wide or padded > LARGE else (WARPS, STAGES)
    if wide and padded <= LARGE:
        warps = lines // LINES_PER_WARP
    device = queries.device
    out = torch.empty(tokens, heads.count * heads.size, dtype=result, device=device)
    cos, sin = (None, None) if rope is None else (rope.cos, rope.sin)
    key_factors = heads.key_factors if dtype is torch.int8 else None
    assert rope is None or not (cos is None or wide or batch.parents is not None)
    assert log_sums is None or wide
    parts = Chunks(out, out, batch.slots)  # placeholders, used only if chunks are split
    if split:
        parts = Chunks(
            torch.empty((stored, *out.shape), dtype=torch.float32, device=device),
            torch.empty((stored, tokens, heads.count, 2), dtype=torch.float32, device=device),
            torch.empty((tokens, 2), dtype=torch.int32, device=device),
        )
    block = _block(padded * max(dtype.itemsize, 2))  # quantized keys become halves
    if programs > MANY_PROGRAMS and tokens <= MOST_TOKENS and not (wide or heads.batch_invariant):
        block = min(block, FEW_KEYS)
    shape = HeadShape(heads.count, heads.kv, heads.size, padded, page, pages.key_scales is not None)
    _attend[(programs, 1, strips)](
        queries,
        kv_pages(pages),
        Tokens(
            batch.positions,
            batch.slots,
            batch.slots if batch.parents is None else batch.parents,
            batch.query_starts,
            batch.page_tables,
        ),
        out,
        parts,
        RopeTables(queries if cos is None else cos, queries if sin is None else sin),
        heads.sinks,
        key_factors,
        log_sums,
        tokens,
        rows,
        width,
        batch.page_tables.stride(0),
        strips,
        heads.window,
        heads.skip,
        1 if cos is None else cos.shape[0],
        heads.scale * LOG2E,
        heads.soft_cap * LOG2E,
        shape=shape,
        variant=Variant(
            tile=tile,
            in_tile=in_tile,
            block=block,
            chunk=ENDLESS if single else span if split else CHUNK,
            balanced=split and not heads.batch_invariant,
            causal=heads.causal,
            anchored=heads.anchored,
            trees=batch.parents is not None,
            split=split,
            wide=wide,
            single=single,
            capped=heads.soft_cap > 0,
            new_rows=new_rows,
        ),
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,  # all variants round alike
        **LAUNCH,
    )
    if split:
        _combine[(tokens, heads.count)](
            parts,
            out,
            heads.sinks,
            tokens,
            stored,
            at_once=1 if heads.batch_invariant else min(COMBINED, triton.next_power_of_2(stored)),
            shape=shape,
            num_warps=4,
            enable_fp_fusion=False,
            **LAUNCH,
        )
    return out


def _block(width: int) -> int:
    """Return the keys in a tile for keys of `width` bytes: two stages of keys and values fit into shared memory."""
    return 128 if width <= 128 else 64 if width <= 256 else 32


# Integers that must not be specialized are no members of tuples: Triton specializes those always.
@triton.jit(do_not_specialize=["tokens", "rows", "width", "table_stride", "strips", "window", "skip", "limit"])
def _attend(
    queries,
    pages,
    batch,
    out,
    parts,
    tables,
    sinks,  # or None
    key_factors,  # or None
    log_sums,  # or None
    tokens,
    rows,
    width,
    table_stride,
    strips,
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
    padded: tl.constexpr = shape.padded
    page: tl.constexpr = shape.page
    tile: tl.constexpr = variant.tile
    in_tile: tl.constexpr = variant.in_tile
    block: tl.constexpr = variant.block
    split: tl.constexpr = variant.split
    new_rows: tl.constexpr = variant.new_rows
    group: tl.constexpr = heads // kv_heads
    # The last tiles start first: in a prompt they have the most keys, and short programs fill the end of the launch.
    kv_head = tl.program_id(0) % kv_heads
    tile_index = (tl.num_programs(0) - 1 - tl.program_id(0)) // kv_heads
    row = row_of(batch.query_starts, rows, tile_index, in_tile)
    begin, end = tl.load(batch.query_starts + row), tl.load(batch.query_starts + row + 1)
    token = begin + (tile_index - begin // in_tile - row) * in_tile
    if token >= end:
        return
    end = tl.minimum(end, token + in_tile)
    line = tl.arange(0, tile)
    own, head = token + line // group, kv_head * group + line % group
    valid = own < end
    first, last = attention_range(
        batch, row, begin, own, valid, window, skip, width * page, variant.causal, variant.anchored
    )  # [tile] each; empty for invalid lines
    highest = tl.max(last, 0)
    # A tile without keys must not begin near 2**31: pipelined loops read the page tables of later tiles ahead.
    lowest = tl.min(tl.where(first <= last, first, highest + 1), 0)
    chunk = chunk_length(lowest, highest, strips, variant)
    own_chunk = tl.minimum(first, last) // chunk  # [tile]: the first chunk of each line
    from_chunk, to_chunk = tl.min(tl.where(valid, own_chunk, 0x7FFFFFFF), 0), highest // chunk + 1
    base = lowest // chunk if variant.balanced else 0  # the chunk with index 0 in `parts`
    if new_rows > 0:
        cosine, sine = load_angles(tables, batch.positions, own, valid, limit, shape)  # [tile, D]
        new = load_new_tokens(tables, batch, token, end, limit, shape, new_rows)  # the tile's tokens
    wait()  # no kernel of a pass writes the batch and the tables, which were read so far
    if split:
        here = tl.program_id(2)
        if here == 0:
            leads = valid & (line % group == 0) & (kv_head == 0)
            tl.store(parts.spans + 2 * own, own_chunk - base, mask=leads)
            tl.store(parts.spans + 2 * own + 1, last // chunk - base, mask=leads)
        from_chunk = here + tl.maximum((from_chunk - here + strips - 1) // strips, 0) * strips  # every strips-th
        if from_chunk >= to_chunk:  # never true for all programs: even an empty line has a chunk
            return
    dim = tl.arange(0, padded)
    at = (own * heads + head).to(tl.int64)[:, None] * size + dim[None, :]  # [tile, D]
    inside = valid[:, None] & (dim < size)[None, :]
    if new_rows > 0:
        store_row_kv(queries, pages, key_factors, tables, batch, begin, token, limit, kv_head, shape, new_rows)
        query = rotated(queries, own * (heads + 2 * kv_heads) + head, valid, cosine, sine, shape)
        store_kv(queries, pages, key_factors, new, kv_head, True, shape)
        tl.debug_barrier()  # other threads of this program read the stored KV
    else:
        query = tl.load(queries + at, mask=inside, other=0.0)
    if key_factors is not None:
        query = query * tl.load(key_factors + kv_head * size + dim, mask=dim < size, other=0.0)[None, :]
    query = (query * scale).to(tl.float16 if shape.scaled else pages.k.dtype.element_ty)
    origin = tl.load(batch.positions + begin)
    chained = tl.load(batch.positions + end - 1) - origin == end - 1 - begin
    head_pages = KvPages(
        pages.k + kv_head * page * size,
        pages.v + kv_head * page * size,
        pages.k_scales + kv_head * page,
        pages.v_scales + kv_head * page,
    )
    all_first, all_last = tl.max(tl.where(valid, first, 0), 0), tl.min(tl.where(valid, last, 0x7FFFFFFF), 0)
    lines = Lines(own, first, last, lowest, highest, all_first, all_last)
    tile_tokens = TileTokens(begin, origin, token, end, chained)
    table = batch.page_tables + row.to(tl.int64) * table_stride
    top = tl.full([tile], float("-inf"), tl.float32)
    total = tl.zeros([tile], tl.float32)
    mixed = tl.zeros([tile, padded], tl.float32)
    for index in range(loop_bound(from_chunk), loop_bound(to_chunk), loop_bound(strips)):
        start = tl.maximum(lowest // block * block, index * chunk)
        stop = tl.minimum(highest + 1, (index + 1) * chunk)
        part_top, part_total, part_mixed = attend_range(
            query, head_pages, table, batch, start, stop, lines, tile_tokens, soft_cap, shape, variant
        )
        if split:
            single = own_chunk == last // chunk  # [tile]: one chunk, nothing to combine
            part = ((index - base) * tokens.to(tl.int64) + own) * heads + head  # [tile]
            shared = valid & (own_chunk <= index) & (last // chunk >= index) & (own_chunk < last // chunk)
            tl.store(parts.sums + 2 * part, part_top, mask=shared)
            tl.store(parts.sums + 2 * part + 1, part_total, mask=shared)
            tl.store(parts.mixed + part[:, None] * size + dim[None, :], part_mixed, mask=inside & shared[:, None])
            alone = inside & (single & (own_chunk == index))[:, None]
            mean = weighted_mean(part_top, part_total, part_mixed, sinks, head, valid)
            tl.store(out + at, rounded(mean, out.dtype.element_ty), mask=alone)
        elif variant.single:
            top, total, mixed = part_top, part_total, part_mixed
        else:
            top, total, mixed = merge_softmax(top, total, mixed, part_top, part_total, part_mixed)
    if not split:
        mean = weighted_mean(top, total, mixed, sinks, head, valid)
        tl.store(out + at, rounded(mean, out.dtype.element_ty), mask=inside)
        store_log_sums(log_sums, own * heads + head, top, total, valid)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _combine(
    parts,
    out,
    sinks,  # or None
    tokens,
    chunks,
    at_once: tl.constexpr,
    shape: tl.constexpr,
):
    """Combine the chunks of one token and one head; one at a time (`at_once`) in the order of a single program."""
    size: tl.constexpr = shape.size
    padded: tl.constexpr = shape.padded
    heads: tl.constexpr = shape.heads
    unroll: tl.constexpr = 4 if at_once == 1 else 1
    wait()
    token, own = tl.program_id(0), tl.program_id(1)
    # Nothing was stored for padding tokens. Bound both numbers: their difference must not overflow.
    from_chunk = tl.minimum(tl.maximum(tl.load(parts.spans + 2 * token), 0), chunks)
    to_chunk = tl.minimum(tl.maximum(tl.load(parts.spans + 2 * token + 1), -1), chunks - 1) + 1
    if to_chunk - from_chunk < 2:
        return
    dim = tl.arange(0, padded)
    head = token.to(tl.int64) * heads + own
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([1, padded], tl.float32)
    stride = tokens.to(tl.int64) * heads
    for start in tl.range(loop_bound(from_chunk), loop_bound(to_chunk), at_once, loop_unroll_factor=unroll):
        index = start + tl.arange(0, at_once)
        known = index < to_chunk
        at = index * stride + head  # [at_once]
        part_top = tl.load(parts.sums + 2 * at, mask=known, other=float("-inf"))
        part_total = tl.load(parts.sums + 2 * at + 1, mask=known, other=0.0)
        inside = known[:, None] & (dim < size)[None, :]
        part_mixed = tl.load(parts.mixed + at[:, None] * size + dim[None, :], mask=inside, other=0.0)
        higher = tl.max(part_top, 0)
        weight = tl.exp2(part_top - tl.where(higher == float("-inf"), 0.0, higher))
        summed = tl.sum(part_mixed * weight[:, None], 0)[None, :]
        top, total, mixed = merge_softmax(
            top, total, mixed, higher + tl.zeros([1], tl.float32), tl.sum(part_total * weight, 0), summed
        )
    mean = weighted_mean(top, total, mixed, sinks, own + tl.zeros([1], tl.int32), tl.full([1], True, tl.int1))
    at = head * size + dim[None, :]
    tl.store(out + at, rounded(mean, out.dtype.element_ty), mask=(dim < size)[None, :])


@triton.jit
def row_of(query_starts, rows, tile_index, in_tile: tl.constexpr):
    """Return the row of a query tile: the first tile of row b is query_starts[b] // in_tile + b."""
    found = tile_index * 0
    for first in range(loop_bound(tile_index * 0 + 1), loop_bound(rows), STARTS):  # a search would wait for each load
        row = first + tl.arange(0, STARTS)
        start = tl.load(query_starts + row, mask=row < rows, other=0x3FFFFFFF)
        found += tl.sum((start // in_tile + row <= tile_index).to(tl.int32), 0)
    return found


@triton.jit
def chunk_length(lowest, highest, strips, variant: tl.constexpr):
    """Return the positions in a chunk of a row that attends to positions from `lowest` to `highest`."""
    chunk = variant.chunk
    if variant.balanced:
        block: tl.constexpr = variant.block
        share = (highest - lowest + strips) // strips
        chunk = tl.maximum(chunk, (share + block - 1) // block * block)
    return chunk


@triton.jit
def attention_range(
    batch,
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
    """Return the attention range of each line of a tile: first and last position."""
    position = tl.load(batch.positions + own, mask=valid, other=0)
    last = position
    if not causal:
        highest = 0
        end = tl.load(batch.query_starts + row + 1)
        for each in range(loop_bound(begin), loop_bound(end), 64):
            offset = each + tl.arange(0, 64)
            highest = tl.maximum(highest, tl.max(tl.load(batch.positions + offset, mask=offset < end, other=0), 0))
        last = position * 0 + highest
    counted = position
    if anchored:
        counted = position * 0 + tl.load(batch.positions + begin) - 1
    first = tl.maximum(tl.where(window > 0, counted - window + 1, 0), skip)
    last = tl.minimum(last, covered - 1)
    return tl.where(valid, first, 1), tl.where(valid, last, 0)


@triton.jit
def branch_slots(slot, at, needed, node, position, batch, tokens, start):
    """Replace slots [block] of the page table by those of `node` and its ancestors in this step."""
    if tokens.chained:
        own = tl.load(batch.slots + tokens.begin + at - tokens.origin, mask=needed & (at >= tokens.origin), other=-1)
        slot = tl.where(own >= 0, own, slot)
    else:
        while (node >= 0) & (position >= start):
            # Triton pipelines the loop over nodes, and runs this branch for a node beyond the last one too.
            own = tl.load(batch.slots + node, mask=node < tokens.end, other=-1)
            slot = tl.where((at == position) & (own >= 0), own, slot)
            node = tl.load(batch.parents + node, mask=node < tokens.end, other=-1)
            position -= 1
    return slot


@triton.jit
def attend_range(
    query, pages, table, batch, start, stop, lines, tokens, soft_cap, shape: tl.constexpr, variant: tl.constexpr
):
    """Attend to keys from `start` to `stop`: return the largest score, the sum of weights, the weighted values.

    `pages` and `table` are those of one head and one row; `lines` and `tokens` describe the query tile.
    """
    page: tl.constexpr = shape.page
    padded: tl.constexpr = shape.padded
    tile: tl.constexpr = variant.tile
    block: tl.constexpr = variant.block
    top = tl.full([tile], float("-inf"), tl.float32)
    total = tl.zeros([tile], tl.float32)
    mixed = tl.zeros([tile, padded], tl.float32)
    first, last, lowest, highest = lines.first, lines.last, lines.lowest, lines.highest
    common = stop  # below it, all tokens of a row share their keys
    if variant.trees:
        common = tl.minimum(stop, tl.maximum(start, tokens.origin // block * block))
    if variant.wide:  # the positions that all lines attend to need no mask
        unmasked = tl.where(lines.all_first <= start, (lines.all_last + 1) // block * block, start)
        for each in range(loop_bound(start), loop_bound(unmasked), block):
            at = each + tl.arange(0, block)
            needed = tl.full([block], True, tl.int1)
            row = page_row(tl.load(table + at // page), at % page, shape)  # [block]
            top, total, mixed = softmax_step(
                query, pages, row, needed, None, top, total, mixed, soft_cap, shape, variant.capped
            )
        start = tl.maximum(start, unmasked)
    for each in range(loop_bound(start), loop_bound(common), block):
        at = each + tl.arange(0, block)
        needed = (at >= lowest) & (at <= highest)
        row = page_row(tl.load(table + at // page, mask=needed, other=0), at % page, shape)  # [block]
        seen = (at[None, :] >= first[:, None]) & (at[None, :] <= last[:, None])
        top, total, mixed = softmax_step(
            query, pages, row, needed, seen, top, total, mixed, soft_cap, shape, variant.capped
        )
    if variant.trees:
        chained = tokens.chained
        ends = tl.where(chained, tokens.first + 1, tokens.end)
        for each in range(loop_bound(common), loop_bound(stop), block):
            at = each + tl.arange(0, block)
            for node in range(loop_bound(tokens.first), loop_bound(ends)):
                reach = tl.where(chained, highest, tl.load(batch.positions + node, mask=node < tokens.end, other=0))
                needed = (at >= lowest) & (at <= reach)
                slot = tl.maximum(tl.load(table + at // page, mask=needed, other=0), 0) * page + at % page  # [block]
                slot = branch_slots(slot, at, needed, node, reach, batch, tokens, each)
                mine = (lines.token == node) | chained
                seen = mine[:, None] & (at[None, :] >= first[:, None]) & (at[None, :] <= last[:, None])
                row = page_row(slot // page, slot % page, shape)
                top, total, mixed = softmax_step(
                    query, pages, row, needed, seen, top, total, mixed, soft_cap, shape, variant.capped
                )
    if shape.scaled:
        mixed = mixed * (1.0 / SCALE_UNIT)
    return top, total, mixed


@triton.jit
def page_row(number, offset, shape: tl.constexpr):
    """Return the row of one head's keys: of a position in a page. Pages without a number are read as page 0."""
    return tl.maximum(number, 0).to(tl.int64) * (shape.kv_heads * shape.page) + offset


@triton.jit
def softmax_step(
    query, pages, row, needed, seen, top, total, mixed, soft_cap, shape: tl.constexpr, has_cap: tl.constexpr
):
    """Take in one tile of keys: keys outside all ranges are not read; lines without a key stay unchanged.

    `seen` is None for a tile that all lines attend to.
    """
    size: tl.constexpr = shape.size
    dim = tl.arange(0, shape.padded)
    at = row[:, None] * size + dim[None, :]
    inside = needed[:, None] & (dim < size)[None, :]
    key = tl.load(pages.k + at, mask=inside, other=0.0).to(query.dtype)  # [block, D]
    key_scale = None
    if shape.scaled:
        key_scale = tl.load(pages.k_scales + row, mask=needed, other=0.0)
    higher, kept, weight = weigh(query, key, key_scale, seen, top, soft_cap, has_cap)
    total = total * kept + tl.sum(weight, 1)
    value = tl.load(pages.v + at, mask=inside, other=0.0).to(query.dtype)  # [block, D]
    if shape.scaled:
        weight = weight * (tl.load(pages.v_scales + row, mask=needed, other=0.0) * SCALE_UNIT)[None, :]
    mixed = multiply(weight.to(value.dtype), value, mixed * kept[:, None])
    return higher, total, mixed


@triton.jit
def weigh(query, key, key_scale, seen, top, soft_cap, has_cap: tl.constexpr):
    """Score a tile of keys [block, D]: return the largest scores so far, the factor of earlier weights, the weights."""
    score = multiply(query, tl.trans(key), tl.zeros([query.shape[0], key.shape[0]], tl.float32))
    if key_scale is not None:
        score = score * key_scale[None, :]
    if has_cap:
        score = capped(score, soft_cap)
    if seen is not None:
        score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, tl.exp2(top - base), tl.exp2(score - base[:, None])


@triton.jit
def merge_softmax(top, total, mixed, part_top, part_total, part_mixed):
    """Merge the softmax of two parts of the keys. An empty part, on either side, leaves the bits of the other."""
    higher = tl.maximum(top, part_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept, added = tl.exp2(top - base), tl.exp2(part_top - base)
    mixed = mixed * kept[:, None] + part_mixed * added[:, None]
    return higher, total * kept + part_total * added, mixed


@triton.jit
def store_log_sums(log_sums, at, top, total, valid):
    if log_sums is not None:
        log_sum = (top + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453  # log(2)
        tl.store(log_sums + at, log_sum, mask=valid)


@triton.jit
def weighted_mean(top, total, mixed, sinks, head, valid):
    """Return the weighted mean of values; 0 for lines without keys. The sink of a head is one more key of value 0."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * 1.4426950408889634  # log2(e)
        higher = tl.maximum(top, sink)
        kept = tl.exp2(top - higher)
        total = total * kept + tl.exp2(sink - higher)
        mixed = mixed * kept[:, None]
    return mixed / tl.where(total > 0, total, 1.0)[:, None]
