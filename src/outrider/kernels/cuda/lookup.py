"""Drafts that are copied from earlier in the text: an n-gram lookup over the tokens of each text on the device.

The first kernel compares the end of a text with each of its positions, a block of them per program, and keeps the
longest match of the block. The second one takes the longest of all blocks, and copies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import NgramLookup, TokenHistory
from .device import LAUNCH, wait

BLOCK = 1024  # positions that a program compares
NONE: tl.constexpr = tl.constexpr(1 << 30)  # a position that no text has


def ngram_drafts(
    history: TokenHistory,
    lookup: NgramLookup,
    newest: Tensor,
    positions: Tensor,
    max_lengths: Tensor,
    copies: Tensor,
    width: int,
) -> Tensor:
    rows, pages = history.page_tables.shape
    drafts = torch.empty((rows, width), dtype=torch.int32, device=newest.device)
    blocks = triton.cdiv(pages * history.page_size, BLOCK)
    longest_matches = torch.empty((rows, blocks), dtype=torch.int64, device=newest.device)
    if rows == 0:
        return drafts
    _longest_match[(rows, blocks)](
        history.tokens,
        history.page_tables,
        pages,
        history.page_size,
        newest,
        positions,
        longest_matches,
        shortest=lookup.shortest,
        longest=lookup.longest,
        block=BLOCK,
        **LAUNCH,
    )
    most = lookup.kept.shape[0] - 1
    _copy_tokens[(rows,)](
        history.tokens,
        history.page_tables,
        pages,
        history.page_size,
        newest,
        positions,
        max_lengths,
        longest_matches,
        blocks,
        lookup.kept,
        copies,
        drafts,
        width,
        lookup.window,
        longest=lookup.longest,
        most=most,
        padded_blocks=triton.next_power_of_2(blocks),
        padded_window=triton.next_power_of_2(lookup.window),
        padded_most=triton.next_power_of_2(most),
        padded_width=triton.next_power_of_2(max(width, 1)),
        num_warps=1,
        **LAUNCH,
    )
    return drafts


@triton.jit
def _token(tokens, table, pages, page_size, newest, last, position):
    """Return the tokens of a text at `position`; -1 outside it. `last`: the position of `newest`."""
    stored = (position >= 0) & (position < last) & (position // page_size < pages)
    page = tl.load(table + position // page_size, mask=stored, other=-1)
    slot = page.to(tl.int64) * page_size + position % page_size
    value = tl.load(tokens + slot, mask=stored & (page >= 0), other=-1)
    return tl.where(position == last, newest, value)


@triton.jit(
    do_not_specialize=["pages"],
    do_not_specialize_on_alignment=["tokens", "page_tables", "newest", "positions", "longest_matches"],
)
def _longest_match(
    tokens,
    page_tables,
    pages,
    page_size,
    newest,
    positions,
    longest_matches,  # [rows, blocks] int64: length * 2^32 + position; 0: none
    shortest: tl.constexpr,
    longest: tl.constexpr,
    block: tl.constexpr,
):
    wait()
    row = tl.program_id(0)
    last = tl.load(positions + row)
    first = tl.program_id(1) * block + 1
    found = tl.full([], 0, tl.int64)
    if first <= last:
        table, own = page_tables + row.to(tl.int64) * pages, tl.load(newest + row)
        position = first + tl.arange(0, block)
        matching = position <= last
        length = tl.zeros([block], tl.int64)
        for index in tl.static_range(longest):
            end = _token(tokens, table, pages, page_size, own, last, last - index)
            before = _token(tokens, table, pages, page_size, own, last, position - 1 - index)
            matching = matching & (before == end) & (end >= 0)
            length += matching.to(tl.int64)
        found = tl.max(tl.where(length >= shortest, (length << 32) + position, 0), 0)
    tl.store(longest_matches + row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), found)


@triton.jit(
    do_not_specialize=["pages", "blocks", "width", "window"],
    do_not_specialize_on_alignment=[
        "tokens",
        "page_tables",
        "newest",
        "positions",
        "max_lengths",
        "longest_matches",
        "kept",
        "copies",
        "drafts",
    ],
)
def _copy_tokens(
    tokens,
    page_tables,
    pages,
    page_size,
    newest,
    positions,
    max_lengths,
    longest_matches,
    blocks,
    kept,
    copies,
    drafts,
    width,
    window,
    longest: tl.constexpr,
    most: tl.constexpr,
    padded_blocks: tl.constexpr,
    padded_window: tl.constexpr,
    padded_most: tl.constexpr,
    padded_width: tl.constexpr,
):
    wait()
    row = tl.program_id(0)
    last, own = tl.load(positions + row), tl.load(newest + row)
    length = last + 1
    table = page_tables + row.to(tl.int64) * pages
    copy = copies + row * 3
    source, drafted_after, resume = tl.load(copy), tl.load(copy + 1), tl.load(copy + 2)

    # The tokens of the last draft that the text contains now.
    index = tl.arange(0, padded_width)
    period = tl.maximum(drafted_after - source, 1)
    drafted = _token(tokens, table, pages, page_size, own, last, source + index % period)
    present = _token(tokens, table, pages, page_size, own, last, drafted_after + index)
    same = (source >= 0) & (index < width) & (drafted_after + index < length) & (drafted == present)
    accepted = tl.min(tl.where(same, padded_width, index), 0)
    resume = tl.where(accepted > 0, source + accepted + 1, resume)

    block = tl.arange(0, padded_blocks)
    matches = tl.load(longest_matches + row.to(tl.int64) * blocks + block, mask=block < blocks, other=0)
    longest_match = tl.max(matches, 0)
    size, latest = (longest_match >> 32).to(tl.int32), longest_match.to(tl.int32)

    # The first occurrence at or soon after the position where the last accepted copy continues.
    near = resume + tl.arange(0, padded_window)
    matching = (resume >= 0) & (near < resume + window) & (near < length) & (size > 0)
    for count in tl.static_range(longest):
        end = _token(tokens, table, pages, page_size, own, last, last - count)
        before = _token(tokens, table, pages, page_size, own, last, near - 1 - count)
        matching = matching & ((count >= size) | ((before == end) & (end >= 0)))
    resumed = tl.min(tl.where(matching, near, NONE), 0)
    position = tl.where(resumed < NONE, resumed, latest)

    back = tl.arange(0, padded_most)
    end = _token(tokens, table, pages, page_size, own, last, last - back)
    before = _token(tokens, table, pages, page_size, own, last, position - 1 - back)
    equal = (back < most) & (before == end) & (end >= 0)
    matched = tl.minimum(tl.min(tl.where(equal, padded_most, back), 0), most)

    limit = tl.minimum(tl.load(kept + matched), tl.load(max_lengths + row) - length - 1)
    copied = _token(tokens, table, pages, page_size, own, last, position + index % tl.maximum(length - position, 1))
    draft = tl.where((size > 0) & (index < limit), copied, -1)
    tl.store(drafts + row.to(tl.int64) * width + index, draft, mask=index < width)
    tl.store(copy, tl.where(size > 0, position, -1))
    tl.store(copy + 1, tl.where(size > 0, length, -1))
    tl.store(copy + 2, resume)
