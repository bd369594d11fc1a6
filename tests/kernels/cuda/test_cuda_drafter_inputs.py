"""Drafter inputs on CUDA agree with the reference, fill their outputs, and ignore padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from carried import Carried
from outrider.kernels import BlockInputs, DraftInputs, NextTokens, reference
from outrider.kernels.cases import CASES, inputs
from outrider.kernels.cases.case import Case, difference
from outrider.kernels.cuda import drafter_inputs
from outrider.kernels.cuda.device import DEVICE
from poison import GARBAGE

OPS: Any = Carried(drafter_inputs, DEVICE)
NAMES = ("next_tokens", "draft_inputs", "block_inputs", "next_slots")
VOCABULARY = 50
PAGE_SIZE, LIMIT = 4, 70
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def integers(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def some(random: Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32, generator=random)


def starts_of(lengths: list[int]) -> Tensor:
    return integers([0, *lengths]).cumsum(0).to(torch.int32)  # [B + 1]


def same(found: Any, meant: Any) -> bool:
    return all(
        torch.equal(getattr(found, name), each) and getattr(found, name).dtype is each.dtype
        for name, each in vars(meant).items()
    )


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.op in NAMES], ids=lambda case: f"{case.op}: {case.name}"
)
def test_cases(case: Case) -> None:
    found, meant = case.build(OPS, 1), case.build(reference, 1)
    for items in (None, [case.items - 1, 0]):
        for part, expected in zip(found(items), meant(items), strict=True):
            assert difference(part, expected) == 0.0


# Tokens of each row: few, and more than a program reads at once.
LENGTHS = [[1], [3, 1, 6], [128, 2, 300, 5]]
MANY = [1, 2] * 70  # rows, as well


def following(random: Generator, lengths: list[int], padding: int) -> tuple[tuple[Any, ...], NextTokens]:
    """Arguments of settle with `padding` more rows that have no tokens, and what it gives for the real ones."""
    rows, width = len(lengths), min(max(lengths), 7) - 1
    drafted = integers([int(some(random, 0, min(length, width + 1), 1)) for length in lengths])
    chosen = some(random, 0, VOCABULARY, rows, width + 1)
    for row, most in enumerate(drafted.tolist()):
        chosen[row, int(some(random, 0, most + 2, 1)) :] = -1 if row % 2 else VOCABULARY
    backup, discard = some(random, 0, VOCABULARY, rows), some(random, 0, 4, rows) == 0
    meant = reference.next_tokens(chosen, drafted, starts_of(lengths), backup, discard.to(torch.uint8), VOCABULARY)
    junk = torch.full((padding,), GARBAGE, dtype=torch.int32)
    arguments = (
        torch.cat([chosen, some(random, 0, VOCABULARY, padding, width + 1)]),
        torch.cat([drafted, junk]),
        starts_of(lengths + [0] * padding),
        torch.cat([backup, junk]),
        torch.cat([discard, torch.zeros(padding, dtype=torch.bool)]).to(torch.uint8),
        VOCABULARY,
    )
    return arguments, meant


@pytest.mark.parametrize("lengths", [*LENGTHS, [4] * 20], ids=str)
@pytest.mark.parametrize("padding", [0, 3])
def test_next_tokens(lengths: list[int], padding: int) -> None:
    arguments, meant = following(inputs.generator(len(lengths)), lengths, padding)
    found = OPS.next_tokens(*arguments)
    rows = len(lengths)
    assert same(NextTokens(*(part[:rows] for part in vars(found).values())), meant)
    assert found.tokens[rows:].tolist() == [VOCABULARY - 1] * padding
    assert found.counts[rows:].tolist() == found.rejected[rows:].tolist() == [0] * padding
    assert found.ends[rows:].tolist() == [sum(lengths) - 1] * padding


def test_rows_that_are_all_padding_end_at_a_token() -> None:
    nothing = torch.zeros(2, dtype=torch.int32)
    found = OPS.next_tokens(
        nothing[:, None], nothing, torch.zeros(3, dtype=torch.int32), nothing - 5, nothing.byte(), 9
    )
    assert [part.tolist() for part in vars(found).values()] == [[0, 0]] * 4


def step(random: Generator, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens [T], positions [T], starts, the ends and the newest token of each row."""
    starts = starts_of(lengths)
    origins = some(random, 0, 60, len(lengths))
    positions = torch.cat([torch.arange(length) + int(first) for length, first in zip(lengths, origins, strict=True)])
    kept = integers([int(some(random, 0, length, 1)) for length in lengths])
    newest = some(random, 0, VOCABULARY, len(lengths))
    return some(random, 0, VOCABULARY, sum(lengths)), positions.int(), starts, starts[:-1] + kept, newest


def pad(values: Tensor, count: int, junk: int = GARBAGE) -> Tensor:
    return torch.cat([values, torch.full((count, *values.shape[1:]), junk, dtype=values.dtype)])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("extra", "shift"), [(1, False), (4, False), (1, True), (3, True)])
@pytest.mark.parametrize(("rows", "tail"), [(0, 0), (3, 0), (2, 5)])
def test_draft_inputs(lengths: list[int], extra: int, shift: bool, rows: int, tail: int) -> None:
    check_draft_inputs(lengths, extra, shift, rows, tail)


def test_draft_inputs_of_many_rows() -> None:
    check_draft_inputs(MANY, 2, True, 3, 200)


def check_draft_inputs(lengths: list[int], extra: int, shift: bool, rows: int, tail: int) -> None:
    """`rows` more rows without tokens, and `tail` more tokens without a row."""
    tokens, positions, starts, ends, newest = step(inputs.generator(extra), lengths)
    meant = reference.draft_inputs(tokens, positions, starts, ends, newest, extra, shift, 7)
    found: DraftInputs = OPS.draft_inputs(
        pad(tokens, tail), pad(positions, tail), starts_of(lengths + [0] * rows), pad(ends, rows), pad(newest, rows),
        extra, shift, 7,
    )  # fmt: skip
    end, indices = int(meant.query_starts[-1]), len(tokens) + tail + (len(lengths) + rows) * (extra - shift)
    beyond = indices - end
    assert found.tokens.tolist() == meant.tokens.tolist() + [0] * beyond
    assert found.positions.tolist() == meant.positions.tolist() + [0] * beyond
    assert found.rejected.tolist() == meant.rejected.tolist() + [1] * beyond
    assert found.query_starts.tolist() == meant.query_starts.tolist() + [end] * rows
    assert found.samples.tolist() == meant.samples.tolist() + [0] * (rows * extra)
    assert found.sources.tolist() == meant.sources.tolist() + [-1] * tail


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("width", [0, 130])
@pytest.mark.parametrize(("rows", "tail"), [(0, 0), (2, 5)])
def test_block_inputs(lengths: list[int], width: int, rows: int, tail: int) -> None:
    check_block_inputs(lengths, width, rows, tail)


def test_block_inputs_of_many_rows() -> None:
    check_block_inputs(MANY, 3, 3, 200)


def check_block_inputs(lengths: list[int], width: int, rows: int, tail: int) -> None:
    random = inputs.generator(width)
    _, positions, starts, ends, newest = step(random, lengths)
    tables = some(random, -1, 40, len(lengths), 20)
    meant = reference.block_inputs(positions, starts, ends, newest, tables, PAGE_SIZE, width, 7, LIMIT)
    found: BlockInputs = OPS.block_inputs(
        pad(positions, tail), starts_of(lengths + [0] * rows), pad(ends, rows), pad(newest, rows), pad(tables, rows),
        PAGE_SIZE, width, 7, LIMIT,
    )  # fmt: skip
    beyond = rows * (width + 1)
    assert found.context_slots.tolist() == meant.context_slots.tolist() + [-1] * tail
    assert found.tokens.tolist() == meant.tokens.tolist() + [0] * beyond
    assert found.positions.tolist() == meant.positions.tolist() + [0] * beyond
    assert found.slots.tolist() == meant.slots.tolist() + [-1] * beyond
    assert found.query_starts.tolist() == meant.query_starts.tolist() + [int(meant.query_starts[-1])] * rows


@pytest.mark.parametrize("count", [0, 1, 4, 17])
@pytest.mark.parametrize("rows", [0, 1, 50, 200])
def test_next_slots(count: int, rows: int) -> None:
    random = inputs.generator(rows)
    positions = some(random, -3, 100, rows)
    positions[1::7] = 2**31 - 1  # no position follows
    wide = some(random, -1, 40, rows, 25)
    tables = wide[:, :20]  # columns of a larger table
    limit = LIMIT if count % 2 else 1000  # the table ends at 80
    found = OPS.next_slots(positions, tables, PAGE_SIZE, limit, count)
    for part, meant in zip(found, reference.next_slots(positions, tables, PAGE_SIZE, limit, count), strict=True):
        assert torch.equal(part, meant)
