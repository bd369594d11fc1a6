"""Drafter inputs: known vectors, agreement of the backends on random inputs, refusal of malformed inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels import Kernels, cpu, reference

MASK = 999


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def as_lists(result: Any) -> dict[str, list[int]]:
    return {field.name: getattr(result, field.name).tolist() for field in fields(result)}


NEXT_TOKENS: dict[str, tuple[dict[str, Any], dict[str, list[int]]]] = {
    "next token, none, discarded": (
        {
            "chosen": ints([0, 1, -1, -1, -1], [0, 1, 2, 3, 4], [-1] * 5, [0, 1, 2, -1, -1]),
            "drafted": ints(4, 4, 4, 4),
            "query_starts": ints(0, 5, 10, 15, 20),
            "backup": ints(10, 20, 30, 40),
            "discard": flags(0, 0, 0, 1),
            "vocabulary": 100,
        },
        {"tokens": [1, 4, 30, 40], "counts": [2, 5, 0, 0], "rejected": [3, 0, 0, 0], "ends": [1, 9, 14, 19]},
    ),
    "padded rows": (
        {
            "chosen": ints([5, 6, -1], [7, 8, 9], [3, -1, -1]),
            "drafted": ints(2, 2, 2),
            "query_starts": ints(0, 3, 6, 9),
            "backup": ints(0, 0, 0),
            "discard": flags(0, 0, 0),
            "vocabulary": 100,
        },
        {"tokens": [6, 9, 3], "counts": [2, 3, 1], "rejected": [1, 0, 2], "ends": [1, 5, 6]},
    ),
    "chunks of prompts beside drafts": (
        {
            "chosen": ints([-1, -1], [4, -1], [4, 5], [6, -1]),
            "drafted": ints(0, 0, 1, 1),
            "query_starts": ints(0, 7, 12, 14, 16),
            "backup": ints(50, 51, -7, 51),  # one that is not needed is not looked at
            "discard": flags(0, 0, 0, 0),
            "vocabulary": 100,
        },
        {"tokens": [50, 4, 5, 6], "counts": [0, 1, 2, 1], "rejected": [0, 0, 0, 1], "ends": [6, 11, 13, 14]},
    ),
    "ids outside the vocabulary end a row": (
        {
            "chosen": ints([99, 100, 1], [2, -5, 3], [1 << 30, 1, 2]),
            "drafted": ints(2, 2, 2),
            "query_starts": ints(0, 3, 6, 9),
            "backup": ints(0, 0, 77),
            "discard": flags(0, 0, 0),
            "vocabulary": 100,
        },
        {"tokens": [99, 2, 77], "counts": [1, 1, 0], "rejected": [2, 2, 0], "ends": [0, 3, 8]},
    ),
    "no rows": (
        {
            "chosen": torch.empty(0, 3, dtype=torch.int32),
            "drafted": ints(),
            "query_starts": ints(0),
            "backup": ints(),
            "discard": flags(),
            "vocabulary": 100,
        },
        {"tokens": [], "counts": [], "rejected": [], "ends": []},
    ),
}


def step(
    tokens: list[int],
    positions: list[int],
    query_starts: list[int],
    ends: list[int],
    newest: list[int],
    extra: int,
    shift: bool,
) -> dict[str, Any]:
    lists = {"tokens": tokens, "positions": positions, "query_starts": query_starts, "ends": ends, "newest": newest}
    numbers = {name: ints(*values) for name, values in lists.items()}
    return {**numbers, "extra": extra, "shift": shift, "mask": MASK if extra > 1 else -1}


READ: dict[str, tuple[dict[str, Any], dict[str, list[int]]]] = {
    "EAGLE shifts tokens, not positions": (
        step(
            [10, 11, 12, 20, 21, 30, 31, 32, 33],
            [0, 1, 2, 0, 1, 0, 1, 2, 3],
            [0, 3, 5, 9],
            ends=[2, 4, 8],
            newest=[100, 200, 300],
            extra=1,
            shift=True,
        ),
        {
            "tokens": [11, 12, 100, 21, 200, 31, 32, 33, 300],
            "positions": [0, 1, 2, 0, 1, 0, 1, 2, 3],
            "query_starts": [0, 3, 5, 9],
            "samples": [2, 4, 8],
            "sources": [0, 1, 2, 3, 4, 5, 6, 7, 8],
            "rejected": [0] * 9,
        },
    ),
    "EAGLE after a rejection": (
        step([10, 11, 12, 20, 21], [7, 8, 9, 40, 41], [0, 3, 5], ends=[0, 4], newest=[100, 200], extra=1, shift=True),
        {
            "tokens": [100, 0, 0, 21, 200],
            "positions": [7, 0, 0, 40, 41],
            "query_starts": [0, 3, 5],
            "samples": [0, 4],
            "sources": [0, 1, 2, 3, 4],
            "rejected": [0, 1, 1, 0, 0],
        },
    ),
    "draft model": (
        step([10, 11, 12, 20, 21], [0, 1, 2, 0, 1], [0, 3, 5], ends=[1, 4], newest=[100, 200], extra=1, shift=False),
        {
            "tokens": [10, 11, 100, 0, 20, 21, 200],
            "positions": [0, 1, 2, 0, 0, 1, 2],
            "query_starts": [0, 4, 7],
            "samples": [2, 6],
            "sources": [0, 1, -1, 4, 5],
            "rejected": [0, 0, 0, 1, 0, 0, 0],
        },
    ),
    "P-EAGLE, three in parallel": (
        step(
            [10, 11, 12, 13, 20, 21, 22, 23],
            [5, 6, 7, 8, 10, 11, 12, 13],
            [0, 4, 8],
            ends=[2, 7],
            newest=[100, 200],
            extra=3,
            shift=True,
        ),
        {
            "tokens": [11, 12, 100, MASK, MASK, 0, 21, 22, 23, 200, MASK, MASK],
            "positions": [5, 6, 7, 8, 9, 0, 10, 11, 12, 13, 14, 15],
            "query_starts": [0, 6, 12],
            "samples": [2, 3, 4, 9, 10, 11],
            "sources": [0, 1, 2, 3, 6, 7, 8, 9],
            "rejected": [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0],
        },
    ),
    "PARD, two in parallel": (
        step([10, 11, 20], [3, 4, 0], [0, 2, 3], ends=[0, 2], newest=[100, 200], extra=2, shift=False),
        {
            "tokens": [10, 100, MASK, 0, 20, 200, MASK],
            "positions": [3, 4, 5, 0, 0, 1, 2],
            "query_starts": [0, 4, 7],
            "samples": [1, 2, 5, 6],
            "sources": [0, -1, 4],
            "rejected": [0, 0, 0, 1, 0, 0, 0],
        },
    ),
    "no rows": (
        step([], [], [0], ends=[], newest=[], extra=3, shift=False),
        {"tokens": [], "positions": [], "query_starts": [0], "samples": [], "sources": [], "rejected": []},
    ),
}


@pytest.mark.parametrize("name", NEXT_TOKENS)
def test_next_tokens(ops: Kernels, name: str) -> None:
    given_, meant = NEXT_TOKENS[name]
    following = ops.next_tokens(**given_)
    assert as_lists(following) == meant
    assert {getattr(following, field.name).dtype for field in fields(following)} == {torch.int32}


@pytest.mark.parametrize("name", READ)
def test_draft_inputs(ops: Kernels, name: str) -> None:
    given_, meant = READ[name]
    found = ops.draft_inputs(**given_)
    assert as_lists(found) == meant
    assert found.rejected.dtype is torch.uint8
    assert all(getattr(found, field.name).dtype is torch.int32 for field in fields(found) if field.name != "rejected")


STEPPED: dict[str, tuple[list[int], list[list[int]], int, int, list[int], list[int]]] = {
    # positions, page tables, page size, limit; next positions, slots
    "up to the limit": ([50, 98, 99, 100], [[*range(9, 2, -1)]] * 4, 16, 100, [51, 99, 0, 0], [6 * 16 + 3, 51, -1, -1]),
    "across a page": ([15, 16, 31], [[4, 2, 7]] * 3, 16, 100, [16, 17, 32], [32, 33, 112]),
    "past the table": ([30, 31, 1000], [[4, 2]] * 3, 16, 5000, [31, 0, 0], [47, -1, -1]),
    "page missing": ([15, 16], [[4, -1], [-1, 3]], 16, 100, [0, 17], [-1, 49]),
    "before the text": ([-1, -2, -40], [[4, 2]] * 3, 16, 100, [0, 0, 0], [64, -1, -1]),
    "largest integer": ([2**31 - 1], [[4, 2]], 16, 2**31 - 1, [0], [-1]),
    "no table": ([3, 4], [[], []], 16, 100, [0, 0], [-1, -1]),
    "no rows": ([], [], 16, 100, [], []),
}


@pytest.mark.parametrize("name", STEPPED)
def test_next_slots(ops: Kernels, name: str) -> None:
    positions, tables, page_size, limit, following, slots = STEPPED[name]
    before = ints(*positions)
    table = torch.tensor(tables, dtype=torch.int32).reshape(len(tables), -1 if tables and tables[0] else 0)
    found = ops.next_slots(before, table, page_size, limit)
    assert (found[0].tolist(), found[1].tolist()) == (following, slots)
    assert found[0].dtype is found[1].dtype is torch.int32
    found[0].fill_(-9)
    assert before.tolist() == positions and found[1].tolist() == slots  # memory of their own


def settle_with(**changes: Any) -> Callable[[Kernels], object]:
    return lambda ops: ops.next_tokens(**{**NEXT_TOKENS["padded rows"][0], **changes})


def read_with(**changes: Any) -> Callable[[Kernels], object]:
    return lambda ops: ops.draft_inputs(**{**READ["P-EAGLE, three in parallel"][0], **changes})


MALFORMED: dict[str, tuple[Callable[[Kernels], object], str]] = {
    "too many chosen": (settle_with(drafted=ints(2, 1, 2)), "row 1 chose 3 tokens after drafting 1"),
    "less than none drafted": (settle_with(drafted=ints(2, 2, -1)), "row 2 cannot have drafted -1 tokens"),
    "more rejected than there are": (settle_with(drafted=ints(2, 2, 3)), "row 2 rejects 3 tokens but has only 3"),
    "a row without tokens": (settle_with(query_starts=ints(0, 3, 3, 9)), "`query_starts` gives row 1 no tokens"),
    "rows that run backwards": (settle_with(query_starts=ints(0, 3, 1, 9)), "`query_starts` gives row 1 no tokens"),
    "a late start": (settle_with(query_starts=ints(1, 3, 6, 9)), "`query_starts` begins at 1, not at 0"),
    "a backup that is no token": (
        settle_with(discard=flags(0, 1, 0), backup=ints(0, 100, 0)),
        "the backup token 100 of row 1 lies outside the vocabulary of 100",
    ),
    "a negative backup": (
        settle_with(discard=flags(0, 0, 1), backup=ints(0, 0, -1)),
        "the backup token -1 of row 2 lies outside the vocabulary of 100",
    ),
    "starts that say more than T": (
        read_with(query_starts=ints(0, 4, 9)),
        "`query_starts` ends at 9, but there are 8 tokens",
    ),
    "starts that say less than T": (
        read_with(query_starts=ints(0, 4, 7), ends=ints(2, 6)),
        "`query_starts` ends at 7, but there are 8 tokens",
    ),
    "a row to read without tokens": (read_with(query_starts=ints(0, 8, 8)), "`query_starts` gives row 1 no tokens"),
    "an end in the next row": (read_with(ends=ints(4, 7)), "the end 4 of row 0 lies outside its tokens 0 .. 3"),
    "an end in the row before": (read_with(ends=ints(2, 3)), "the end 3 of row 1 lies outside its tokens 4 .. 7"),
    "a newest token that is none": (read_with(newest=ints(100, -1)), "the newest token -1 of row 1 is no token"),
    "a mask that is none": (read_with(mask=-1), "the mask token -1 is no token"),
    "nothing to read": (read_with(extra=0), "`extra` is 0: a drafter reads at least the newest token"),
    "pages of nothing": (
        lambda ops: ops.next_slots(ints(1), ints([1]), 0, 100),
        "`page_size` is 0: a page has at least one slot",
    ),
    "a slot beyond 32 bits": (
        lambda ops: ops.next_slots(ints(0, 1), ints([1], [1 << 28]), 16, 100),
        "page 268435456 of row 1 has slots beyond 32 bits",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_inputs_are_refused_by_name(ops: Kernels, name: str) -> None:
    call, sentence = MALFORMED[name]
    with pytest.raises(ValueError) as caught:
        call(ops)
    assert str(caught.value) == sentence


def test_wrong_shapes_are_refused() -> None:
    for call in (
        settle_with(drafted=ints(2, 2)),
        settle_with(discard=ints(0, 0, 0)),
        read_with(positions=ints(0)),
        read_with(newest=ints(1, 2, 3)),
        lambda ops: ops.next_slots(ints(1, 2), ints([1]), 16, 100),
    ):
        with pytest.raises(ValueError, match="a kernel expects"):
            call(cpu)


def outcome(call: Callable[[Kernels], Any], ops: Kernels) -> Any:
    """The result as numbers, or the sentence that refuses it."""
    try:
        found = call(ops)
    except ValueError as error:
        return str(error)
    return [part.tolist() for part in found] if isinstance(found, tuple) else as_lists(found)


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """Ragged rows, now and then with a number that is out of place."""
    lengths = draw(st.lists(st.integers(1, 6), max_size=5))
    rows, width = len(lengths), draw(st.integers(0, 4))
    starts = [sum(lengths[:row]) for row in range(rows + 1)]
    if draw(st.integers(0, 9)) == 0:
        starts[draw(st.integers(0, rows))] = draw(st.integers(-2, 12))
    return {"lengths": lengths, "rows": rows, "width": width, "starts": starts}


@given(st.data(), steps())
def test_backends_agree_on_next_tokens(data: st.DataObject, rows_of: dict[str, Any]) -> None:
    rows, width = rows_of["rows"], rows_of["width"]
    vocabulary, spoiled = 6, data.draw(st.integers(0, 9)) == 0
    drafted = [data.draw(st.integers(0, min(length - 1, width))) for length in rows_of["lengths"]]
    chosen = torch.tensor(
        data.draw(st.lists(st.integers(-1, vocabulary), min_size=rows * (width + 1), max_size=rows * (width + 1))),
        dtype=torch.int32,
    ).reshape(rows, width + 1)  # [B, width + 1]
    for row, count in enumerate(drafted):
        kept = data.draw(st.integers(0, count + 1))
        chosen[row, :kept].clamp_(0, vocabulary - 1)
        chosen[row, kept : kept + 1] = data.draw(st.sampled_from([-1, vocabulary, -(1 << 31)]))
    inputs = {
        "chosen": chosen,
        "drafted": ints(*drafted) + (data.draw(st.integers(-1, 1)) if spoiled else 0),
        "query_starts": ints(*rows_of["starts"]),
        "backup": ints(*data.draw(st.lists(st.integers(0, vocabulary - 1 + spoiled), min_size=rows, max_size=rows))),
        "discard": flags(*data.draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows))),
        "vocabulary": vocabulary,
    }
    meant = outcome(lambda ops: ops.next_tokens(**inputs), reference)
    assert outcome(lambda ops: ops.next_tokens(**inputs), cpu) == meant


@given(st.data(), steps(), st.integers(0, 4), st.booleans())
def test_backends_agree_on_draft_inputs(data: st.DataObject, rows_of: dict[str, Any], extra: int, shift: bool) -> None:
    rows, lengths = rows_of["rows"], rows_of["lengths"]
    sound = [sum(lengths[:row]) for row in range(rows)]
    ends = [start + data.draw(st.integers(0, length - 1)) for start, length in zip(sound, lengths, strict=True)]
    count = sum(lengths)
    inputs = {
        "tokens": ints(*range(10, 10 + count)),
        "positions": ints(*data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))),
        "query_starts": ints(*rows_of["starts"]),
        "ends": ints(*ends),
        "newest": ints(*data.draw(st.lists(st.integers(100, 200), min_size=rows, max_size=rows))),
        "extra": extra,
        "shift": shift,
        "mask": MASK,
    }
    meant = outcome(lambda ops: ops.draft_inputs(**inputs), reference)
    assert outcome(lambda ops: ops.draft_inputs(**inputs), cpu) == meant


@given(st.data(), st.integers(0, 4), st.integers(0, 3), st.integers(0, 5), st.integers(-1, 30))
def test_backends_agree_on_next_slots(data: st.DataObject, rows: int, width: int, page_size: int, limit: int) -> None:
    pages = st.lists(st.integers(-1, 9), min_size=width, max_size=width)
    tables = torch.tensor([data.draw(pages) for _ in range(rows)], dtype=torch.int32).reshape(rows, width)
    positions = ints(*data.draw(st.lists(st.integers(-3, 25), min_size=rows, max_size=rows)))
    count = data.draw(st.integers(-1, 4))
    meant = outcome(lambda ops: ops.next_slots(positions, tables, page_size, limit, count), reference)
    assert outcome(lambda ops: ops.next_slots(positions, tables, page_size, limit, count), cpu) == meant


@given(st.data(), st.integers(1, 4), st.integers(0, 6))
def test_several_slots_equal_repeated_single_slots(data: st.DataObject, page_size: int, count: int) -> None:
    tables, limit = ints([3, 1, -1, 5], [0, 2, 4, 6]), 14
    positions = ints(*data.draw(st.lists(st.integers(-3, 15), min_size=2, max_size=2)))
    steps = [reference.next_slots(positions + step, tables, page_size, limit) for step in range(count)]
    for ops in (reference, cpu):
        found = ops.next_slots(positions, tables, page_size, limit, count)
        for at, part in enumerate(found):
            assert part.reshape(2, count).T.tolist() == [step[at].tolist() for step in steps]


@given(st.data(), st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(1, 4), st.booleans())
def test_draft_inputs_after_next_tokens_cover_the_step(
    data: st.DataObject, lengths: list[int], extra: int, shift: bool
) -> None:
    """What settle leaves, draft_inputs reads: the kept text and nothing else, and shapes that do not tell."""
    rows, width = len(lengths), max(lengths) - 1
    chosen = torch.full((rows, width + 1), -1, dtype=torch.int32)  # [B, width + 1]
    for row, length in enumerate(lengths):
        chosen[row, : data.draw(st.integers(0, length))] = 5
    starts = ints(0, *torch.tensor(lengths).cumsum(0).tolist())
    drafted, zeros = ints(*[length - 1 for length in lengths]), torch.zeros(rows, dtype=torch.uint8)
    following = cpu.next_tokens(chosen, drafted, starts, ints(*range(rows)), zeros, 10)
    tokens = ints(*range(100, 100 + sum(lengths)))
    positions = torch.cat([ints(*range(length)) for length in lengths])
    found = cpu.draft_inputs(tokens, positions, starts, following.ends, following.tokens, extra, shift, MASK)
    assert found.query_starts.tolist() == [int(starts[row]) + row * (extra - shift) for row in range(rows + 1)]
    assert int(found.rejected.sum()) == int(following.rejected.sum())
    for row in range(rows):
        own = slice(int(found.query_starts[row]), int(found.query_starts[row + 1]))
        read = found.tokens[own][found.rejected[own] == 0].tolist()
        kept = tokens[int(starts[row]) + shift : int(following.ends[row]) + 1].tolist()
        assert read == [*kept, int(following.tokens[row]), *[MASK] * (extra - 1)]
