"""Drafts that are copied from earlier in the text, row by row over whole tensors."""

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
        text = torch.cat([_stored(history, row, last), newest[row : row + 1]])  # [length]
        copies[row], draft = _draft(text, lookup, copies[row].tolist(), int(max_lengths[row]), width)
        drafts[row, : len(draft)] = draft
    return drafts


def _stored(history: TokenHistory, row: int, count: int) -> Tensor:
    """Return the first tokens of the text of a row; -1 without a page, as in rows that pad."""
    size, table = history.page_size, history.page_tables[row]
    found = history.tokens.view(-1, size)[table.clamp(min=0).long()]  # [P, S]
    found = torch.where(table[:, None] < 0, -1, found).flatten()[:count]
    return torch.nn.functional.pad(found, (0, count - len(found)), value=-1)


def _draft(text: Tensor, lookup: NgramLookup, copy: list[int], max_length: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the row of `copies`, and the draft."""
    source, drafted_after, resume = copy
    length, order = len(text), torch.arange(width)
    if source >= 0:
        new = text[drafted_after : drafted_after + width]
        drafted = text[source + order[: len(new)] % (drafted_after - source)]
        accepted = _leading(new == drafted)
        resume = source + accepted + 1 if accepted else resume
    most = len(lookup.kept) - 1
    after = torch.arange(1, length)  # positions that have a token before them
    matching, size = torch.ones(length - 1, dtype=torch.bool), 0
    for count in range(min(lookup.longest, length - 1)):
        longer = matching & (after > count) & (text[(after - 1 - count).clamp(min=0)] == text[-1 - count])
        if not longer.any():
            break
        matching, size = longer, count + 1
    if size < lookup.shortest:
        return torch.tensor([-1, -1, resume]), order[:0]
    found = after[matching]
    near = found[(found >= resume) & (found < resume + lookup.window)] if resume >= 0 else found[:0]
    position = int(near[0]) if len(near) else int(found[-1])
    limit = min(position, most)
    matched = _leading(text[position - limit : position].flip(0) == text[length - limit :].flip(0))
    count = max(min(int(lookup.kept[matched]), max_length - length - 1, width), 0)
    return torch.tensor([position, length, resume]), text[position + order[:count] % (length - position)]


def _leading(values: Tensor) -> int:
    """Return how many values are true before the first that is not."""
    return int(values.long().cumprod(0).sum())
