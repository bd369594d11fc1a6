"""Inputs of drafters after a step, in plain torch: next_tokens, draft_inputs, block_inputs, next_slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..structures import BlockInputs, DraftInputs, NextTokens

LARGEST = torch.iinfo(torch.int32).max


def next_tokens(
    chosen: Tensor, drafted: Tensor, query_starts: Tensor, backup: Tensor, discard: Tensor, vocabulary: int
) -> NextTokens:
    starts = query_starts.tolist()
    _check_starts(starts)
    results = []
    for row, (first, following) in enumerate(pairwise(starts)):
        valid = [] if discard[row] else _valid(chosen[row].tolist(), vocabulary)
        rejected = _rejected(row, int(drafted[row]), len(valid), following - first)
        token = valid[-1] if valid else int(backup[row])
        if not 0 <= token < vocabulary:
            raise ValueError(f"the backup token {token} of row {row} lies outside the vocabulary of {vocabulary}")
        results.append((token, len(valid), rejected, following - 1 - rejected))
    return NextTokens(*_integers(results).reshape(-1, 4).T.contiguous())


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
    starts = query_starts.tolist()
    _check_draft_inputs(starts, tokens.shape[0], ends.tolist(), newest.tolist(), extra, mask)
    read: list[int] = []  # X long in the end, as are the next two
    out_positions: list[int] = []
    rejected: list[int] = []
    samples: list[int] = []
    sources: list[int] = []
    out_starts = [0]
    for row, (first, following) in enumerate(pairwise(starts)):
        kept = tokens[first + shift : int(ends[row]) + 1].tolist()
        new = [int(newest[row])] + [mask] * (extra - 1)
        padding = following - 1 - int(ends[row])
        here, start, length = len(kept) + len(new), len(read), following - first
        read += kept + new + [0] * padding
        out_positions += [*range(int(positions[first]), int(positions[first]) + here)] + [0] * padding
        rejected += [0] * here + [1] * padding
        samples += range(start + len(kept), start + here)
        sources += [start + offset if shift or offset < len(kept) else -1 for offset in range(length)]
        out_starts.append(len(read))
    return DraftInputs(
        tokens=_integers(read),
        positions=_integers(out_positions),
        query_starts=_integers(out_starts),
        samples=_integers(samples),
        sources=_integers(sources),
        rejected=torch.tensor(rejected, dtype=torch.uint8),
    )


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
    starts, position_list = query_starts.tolist(), positions.tolist()
    _check_draft_inputs(starts, len(position_list), ends.tolist(), newest.tolist(), width + 1, mask)
    _check_page_size(page_size)
    context: list[int] = []  # T slots in the end
    block: list[tuple[int, int]] = []  # B * (W + 1) positions and slots in the end
    for row, (first, following) in enumerate(pairwise(starts)):
        end = int(ends[row])
        kept = [
            _step(row, position, page_tables[row], page_size, limit)[1] for position in position_list[first : end + 1]
        ]
        context += kept + [-1] * (following - 1 - end)
        here = range(position_list[end] + 1, position_list[end] + 2 + width)
        block += [_step(row, position, page_tables[row], page_size, limit) for position in here]
    return BlockInputs(
        context_slots=_integers(context),
        tokens=_integers([token for own in newest.tolist() for token in [own] + [mask] * width]),
        positions=_integers([position for position, _ in block]),
        slots=_integers([slot for _, slot in block]),
        query_starts=_integers([row * (width + 1) for row in range(len(starts))]),
    )


def next_slots(
    positions: Tensor, page_tables: Tensor, page_size: int, limit: int, count: int = 1
) -> tuple[Tensor, Tensor]:
    if count < 0:
        raise ValueError(f"`count` is {count}: a row goes on by 0 positions or more")
    _check_page_size(page_size)
    steps = [
        _step(row, position + step, page_tables[row], page_size, limit)
        for row, position in enumerate(positions.tolist())
        for step in range(1, count + 1)
    ]
    return _integers([position for position, _ in steps]), _integers([slot for _, slot in steps])


def _integers(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _check_starts(starts: list[int]) -> None:
    """Check that each row owns at least one token, and the first row begins at token 0."""
    if starts[0] != 0:
        raise ValueError(f"`query_starts` begins at {starts[0]}, not at 0")
    for row, (first, following) in enumerate(pairwise(starts)):
        if following <= first:
            raise ValueError(f"`query_starts` gives row {row} no tokens")


def _check_page_size(page_size: int) -> None:
    if page_size < 1:
        raise ValueError(f"`page_size` is {page_size}: a page has at least one slot")


def _valid(chosen: list[int], vocabulary: int) -> list[int]:
    """Return the tokens before the first invalid id."""
    end = next((index for index, token in enumerate(chosen) if not 0 <= token < vocabulary), len(chosen))
    return chosen[:end]


def _rejected(row: int, drafted: int, count: int, tokens: int) -> int:
    """Return the number of rejected tokens of a row; a row that sampled nothing rejects nothing."""
    if drafted < 0:
        raise ValueError(f"row {row} cannot have drafted {drafted} tokens")
    if count > drafted + 1:
        raise ValueError(f"row {row} chose {count} tokens after drafting {drafted}")
    rejected = drafted + 1 - count if count else 0
    if rejected >= tokens:
        raise ValueError(f"row {row} rejects {rejected} tokens but has only {tokens}")
    return rejected


def _check_draft_inputs(
    starts: list[int], tokens: int, ends: list[int], newest: list[int], extra: int, mask: int
) -> None:
    if extra < 1:
        raise ValueError(f"`extra` is {extra}: a drafter reads at least the newest token")
    _check_starts(starts)
    if starts[-1] != tokens:
        raise ValueError(f"`query_starts` ends at {starts[-1]}, but there are {tokens} tokens")
    if extra > 1 and mask < 0:
        raise ValueError(f"the mask token {mask} is no token")
    for row, (first, following) in enumerate(pairwise(starts)):
        if not first <= ends[row] < following:
            raise ValueError(f"the end {ends[row]} of row {row} lies outside its tokens {first} .. {following - 1}")
        if newest[row] < 0:
            raise ValueError(f"the newest token {newest[row]} of row {row} is no token")


def _step(row: int, position: int, table: Tensor, page_size: int, limit: int) -> tuple[int, int]:
    """Return a position and its slot; 0 and -1 if it has none."""
    if not 0 <= position < limit or position // page_size >= table.shape[0]:
        return 0, -1
    page = int(table[position // page_size])
    slot = page * page_size + position % page_size
    if slot > LARGEST:
        raise ValueError(f"page {page} of row {row} has slots beyond 32 bits")
    return (0, -1) if page < 0 else (position, slot)
