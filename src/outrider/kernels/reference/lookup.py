"""Drafts that are copied from earlier in the text, in plain Python."""

from __future__ import annotations

import torch
from torch import Tensor

from ..structures import NgramLookup, TokenHistory


def ngram_drafts(
    history: TokenHistory,
    lookup: NgramLookup,
    newest: Tensor,
    positions: Tensor,
    max_lengths: Tensor,
    copies: Tensor,
    width: int,
) -> Tensor:
    drafts = torch.full((len(positions), width), -1, dtype=torch.int32)
    for row, last in enumerate(positions.tolist()):
        text = [*_stored(history, row, last), int(newest[row])]
        source, length, resume = copies[row].tolist()
        if accepted := _accepted(text, source, length, width):
            resume = source + accepted + 1  # the text has one more token, which continues the copy or replaces its next
        match = _match(text, lookup, resume)
        if match is None:
            copies[row] = torch.tensor([-1, -1, resume])
            continue
        position, size = match
        copies[row] = torch.tensor([position, len(text), resume])
        count = min(int(lookup.kept[size]), int(max_lengths[row]) - len(text) - 1)
        for index in range(max(min(count, width), 0)):
            drafts[row, index] = text[position + index % (len(text) - position)]
    return drafts


def _stored(history: TokenHistory, row: int, count: int) -> list[int]:
    """Return the first tokens of the text of a row; -1 without a page, as in rows that pad."""
    size, table = history.page_size, history.page_tables[row].tolist()
    pages = [table[position // size] if position // size < len(table) else -1 for position in range(count)]
    return [
        -1 if page < 0 else int(history.tokens[page * size + position % size]) for position, page in enumerate(pages)
    ]


def _accepted(text: list[int], source: int, length: int, width: int) -> int:
    """Return how many tokens of the last draft, made after `length` tokens, the text contains."""
    if source < 0:
        return 0
    draft = [text[source + index % (length - source)] for index in range(width)]
    pairs = list(zip(draft, text[length:], strict=False))
    return next((index for index, (drafted, token) in enumerate(pairs) if drafted != token), len(pairs))


def _match(text: list[int], lookup: NgramLookup, resume: int) -> tuple[int, int] | None:
    """Return the position to copy from, and how many tokens before it match the end of the text."""
    lengths = [_match_length(text, position, len(lookup.kept) - 1) for position in range(len(text))]
    size = min(max(lengths), lookup.longest)
    if size < lookup.shortest:
        return None
    found = [position for position, length in enumerate(lengths) if length >= size]
    near = [position for position in found if 0 <= resume <= position < resume + lookup.window]
    position = near[0] if near else found[-1]
    return position, lengths[position]


def _match_length(text: list[int], position: int, most: int) -> int:
    """Return how many tokens before `position` equal the last ones of the text."""
    count = 0
    while count < min(position, most) and text[position - count - 1] == text[-count - 1]:
        count += 1
    return count
