"""block_inputs: known vectors, agreement of the backends on random inputs, refusal of malformed inputs.

The cases that are easy to get wrong: a rejected token gets a slot, a block runs over the limit or the page table.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels import Kernels, cpu, reference
from outrider.kernels.cpu import _native

MASK = 999


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def as_lists(result: Any) -> dict[str, list[int]]:
    return {field.name: getattr(result, field.name).tolist() for field in fields(result)}


def step(
    positions: list[int],
    query_starts: list[int],
    ends: list[int],
    newest: list[int],
    page_tables: list[list[int]],
    page_size: int = 4,
    width: int = 3,
    limit: int = 100,
) -> dict[str, Any]:
    tables = torch.tensor(page_tables, dtype=torch.int32).reshape(len(ends), -1 if any(page_tables) else 0)
    lists = {"positions": positions, "query_starts": query_starts, "ends": ends, "newest": newest}
    numbers = {name: ints(*values) for name, values in lists.items()}
    mask = MASK if width else -1  # what is not needed is not looked at
    return {**numbers, "page_tables": tables, "page_size": page_size, "width": width, "mask": mask, "limit": limit}


BUILT: dict[str, tuple[dict[str, Any], dict[str, list[int]]]] = {
    "a prompt and a decoded token": (
        step([0, 1, 2, 9], [0, 3, 4], ends=[2, 3], newest=[70, 80], page_tables=[[5, 2, 7, 0], [1, 3, 8, 6]]),
        {
            "context_slots": [20, 21, 22, 33],
            "tokens": [70, MASK, MASK, MASK, 80, MASK, MASK, MASK],
            "positions": [3, 4, 5, 6, 10, 11, 12, 13],
            "slots": [23, 8, 9, 10, 34, 35, 24, 25],
            "query_starts": [0, 4, 8],
        },
    ),
    "rejected tokens have no slot": (
        step([4, 5, 6, 7, 0, 1, 2], [0, 4, 7], ends=[0, 5], newest=[70, 80], page_tables=[[5, 2, 7], [1, 3, 8]]),
        {
            "context_slots": [8, -1, -1, -1, 4, 5, -1],
            "tokens": [70, MASK, MASK, MASK, 80, MASK, MASK, MASK],
            "positions": [5, 6, 7, 8, 2, 3, 4, 5],
            "slots": [9, 10, 11, 28, 6, 7, 12, 13],
            "query_starts": [0, 4, 8],
        },
    ),
    "up to the limit": (
        step([5, 6, 7, 8, 9], [0, 2, 5], ends=[1, 4], newest=[70, 80], page_tables=[[5, 2, 7]] * 2, limit=9),
        {
            "context_slots": [9, 10, 11, 28, -1],
            "tokens": [70, MASK, MASK, MASK, 80, MASK, MASK, MASK],
            "positions": [7, 8, 0, 0, 0, 0, 0, 0],
            "slots": [11, 28, -1, -1, -1, -1, -1, -1],
            "query_starts": [0, 4, 8],
        },
    ),
    "past the table": (
        step([5, 9], [0, 1, 2], ends=[0, 1], newest=[70, 80], page_tables=[[5, 2]] * 2),
        {
            "context_slots": [9, -1],
            "tokens": [70, MASK, MASK, MASK, 80, MASK, MASK, MASK],
            "positions": [6, 7, 0, 0, 0, 0, 0, 0],
            "slots": [10, 11, -1, -1, -1, -1, -1, -1],
            "query_starts": [0, 4, 8],
        },
    ),
    "pages that are missing": (
        step([2, 6], [0, 1, 2], ends=[0, 1], newest=[70, 80], page_tables=[[5, -1, 3], [1, -1, 0]]),
        {
            "context_slots": [22, -1],
            "tokens": [70, MASK, MASK, MASK, 80, MASK, MASK, MASK],
            "positions": [3, 0, 0, 0, 0, 8, 9, 10],
            "slots": [23, -1, -1, -1, -1, 0, 1, 2],
            "query_starts": [0, 4, 8],
        },
    ),
    "no masks": (
        step([0, 1], [0, 2], ends=[1], newest=[70], page_tables=[[5]], width=0),
        {"context_slots": [20, 21], "tokens": [70], "positions": [2], "slots": [22], "query_starts": [0, 1]},
    ),
    "largest integer": (
        step([2**31 - 1], [0, 1], ends=[0], newest=[70], page_tables=[[5]], width=1, limit=2**31 - 1),
        {"context_slots": [-1], "tokens": [70, MASK], "positions": [0, 0], "slots": [-1, -1], "query_starts": [0, 2]},
    ),
    "no table": (
        step([0], [0, 1], ends=[0], newest=[70], page_tables=[[]], width=1),
        {"context_slots": [-1], "tokens": [70, MASK], "positions": [0, 0], "slots": [-1, -1], "query_starts": [0, 2]},
    ),
    "no rows": (
        step([], [0], ends=[], newest=[], page_tables=[]),
        {"context_slots": [], "tokens": [], "positions": [], "slots": [], "query_starts": [0]},
    ),
}


@pytest.mark.parametrize("name", BUILT)
def test_block_inputs(ops: Kernels, name: str) -> None:
    given_, meant = BUILT[name]
    before = {key: value.clone() for key, value in given_.items() if isinstance(value, Tensor)}
    found = ops.block_inputs(**given_)
    assert as_lists(found) == meant
    assert all(getattr(found, field.name).dtype is torch.int32 for field in fields(found))
    assert all(torch.equal(given_[key], value) for key, value in before.items())


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "fewer than no masks": ({"width": -1}, "`width` is -1: a block has 0 masks or more"),
    "a mask that is none": ({"mask": -1}, "the mask token -1 is no token"),
    "pages of nothing": ({"page_size": 0}, "`page_size` is 0: a page has at least one slot"),
    "a late start": ({"query_starts": ints(1, 4, 7)}, "`query_starts` begins at 1, not at 0"),
    "a row without tokens": ({"query_starts": ints(0, 7, 7)}, "`query_starts` gives row 1 no tokens"),
    "starts that say more than T": (
        {"query_starts": ints(0, 4, 8)},
        "`query_starts` ends at 8, but there are 7 tokens",
    ),
    "an end in the next row": ({"ends": ints(4, 5)}, "the end 4 of row 0 lies outside its tokens 0 .. 3"),
    "an end in the row before": ({"ends": ints(0, 3)}, "the end 3 of row 1 lies outside its tokens 4 .. 6"),
    "a newest token that is none": ({"newest": ints(70, -1)}, "the newest token -1 of row 1 is no token"),
    "a slot beyond 32 bits": (
        {"page_tables": ints([5, 2, 7], [1 << 29, 3, 8])},
        "page 536870912 of row 1 has slots beyond 32 bits",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_inputs_are_refused_by_name(ops: Kernels, name: str) -> None:
    changes, sentence = MALFORMED[name]
    with pytest.raises(ValueError) as caught:
        ops.block_inputs(**{**BUILT["rejected tokens have no slot"][0], **changes})
    assert str(caught.value) == sentence


def test_wrong_shapes_are_refused() -> None:
    sound = BUILT["rejected tokens have no slot"][0]
    for changes in (
        {"ends": ints(0)},
        {"newest": ints(1, 2, 3)},
        {"query_starts": ints(0, 7)},
        {"page_tables": ints([1, 2])},
        {"positions": sound["positions"].long()},
    ):
        with pytest.raises(ValueError, match="a kernel expects"):
            cpu.block_inputs(**{**sound, **changes})


def outcome(ops: Kernels, inputs: dict[str, Any]) -> Any:
    """The result as numbers, or the sentence that refuses it."""
    try:
        return as_lists(ops.block_inputs(**inputs))
    except ValueError as error:
        return str(error)


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, Any]:
    """Ragged rows anywhere about the limit and the table, now and then with a number that is out of place."""
    lengths = draw(st.lists(st.integers(1, 6), max_size=5))
    rows, pages = len(lengths), draw(st.integers(0, 4))
    starts = [sum(lengths[:row]) for row in range(rows + 1)]
    ends = [draw(st.integers(starts[row], starts[row + 1] - 1)) for row in range(rows)]
    firsts = [draw(st.integers(-2, 20)) for _ in range(rows)]
    if draw(st.integers(0, 9)) == 0:
        starts[draw(st.integers(0, rows))] = draw(st.integers(-2, 12))
    if rows and draw(st.integers(0, 9)) == 0:
        ends[draw(st.integers(0, rows - 1))] = draw(st.integers(-2, 20))
    page = st.sampled_from([-1, 0, 1, 2, 9, 1 << 30]) if draw(st.integers(0, 9)) == 0 else st.integers(-1, 9)
    tables = [[draw(page) for _ in range(pages)] for _ in range(rows)]
    return {
        "positions": ints(*[first + at for first, length in zip(firsts, lengths, strict=True) for at in range(length)]),
        "query_starts": ints(*starts),
        "ends": ints(*ends),
        "newest": ints(*draw(st.lists(st.integers(0, 200), min_size=rows, max_size=rows))),
        "page_tables": torch.tensor(tables, dtype=torch.int32).reshape(rows, pages),
        "page_size": draw(st.integers(1, 5)),
        "width": draw(st.integers(0, 6)),
        "mask": MASK,
        "limit": draw(st.integers(-1, 24)),
    }


@given(blocks())
def test_backends_agree_on_block_inputs(inputs: dict[str, Any]) -> None:
    assert outcome(cpu, inputs) == outcome(reference, inputs)


@given(blocks())
def test_slots_are_unique_and_inside_the_tables(inputs: dict[str, Any]) -> None:
    """Context and block of a row never share a slot, and each slot is that of its position."""
    tables, size = inputs["page_tables"], inputs["page_size"]
    inputs["page_tables"] = torch.arange(tables.numel(), dtype=torch.int32).reshape(tables.shape)
    found = outcome(cpu, inputs)
    if isinstance(found, str):
        return
    written = [slot for slot in found["context_slots"] + found["slots"] if slot != -1]
    assert len(written) == len(set(written))
    per_row = inputs["width"] + 1
    for index, (position, slot) in enumerate(zip(found["positions"], found["slots"], strict=True)):
        end = int(inputs["positions"][inputs["ends"][index // per_row]])
        if slot == -1:
            assert position == 0
        else:
            assert position == end + 1 + index % per_row < inputs["limit"]
            assert slot == int(inputs["page_tables"][index // per_row, position // size]) * size + position % size


@given(blocks())
def test_outputs_are_filled_without_overrun(inputs: dict[str, Any]) -> None:
    """The native call, with room of its own size between two fences."""
    meant = outcome(reference, inputs)
    if isinstance(meant, str):
        return
    fence, unset = [-77] * 16, -55
    buffers = {name: ints(*fence, *[unset] * len(values), *fence) for name, values in meant.items()}
    rows, table_width = inputs["page_tables"].shape
    _native.block_inputs(
        *[inputs[name].data_ptr() for name in ("positions", "query_starts", "ends", "newest")],
        rows,
        inputs["positions"].shape[0],
        inputs["page_tables"].data_ptr(),
        table_width,
        *[inputs[name] for name in ("page_size", "limit", "width", "mask")],
        *[buffer[len(fence) :].data_ptr() for buffer in buffers.values()],
    )
    assert {name: buffer.tolist() for name, buffer in buffers.items()} == {
        name: [*fence, *values, *fence] for name, values in meant.items()
    }
