"""States of recurrent layers: a token changes a state by the same operations, whatever step it came in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels import Batch, Kernels, LayerStates, cpu, reference
from outrider.kernels.cases import inputs
from outrider.kernels.cases.recurrent import Sizes, copy_states, random_states, weights

SLOTS, LINES, LENGTH = 3, 12, 40
BOTH = pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
RULES = pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "Mamba-2"])


@dataclass
class Text:
    """One request over a layer: rows of hidden states by position, and wrong ones for drafts."""

    ops: Kernels
    delta: bool
    slot: int = 0
    layer: Any = field(init=False)
    states: LayerStates = field(init=False)

    def __post_init__(self) -> None:
        random = inputs.generator(3)
        of = weights(random, "f32", Sizes(), self.delta)
        self.layer, self.states = self.ops.recurrent_layer(of), random_states(random, of, SLOTS, LINES)
        self.rows = inputs.normal(random, LENGTH, of.output.shape[0])
        self.wrong = inputs.normal(random, LENGTH, of.output.shape[0])

    def step(
        self, start: int, x: Tensor, read: int, parents: list[int] | None = None, target: int | None = None
    ) -> Tensor:
        """Run rows x [T, E] after `start` tokens; return them with what the layer adds."""
        ids = [start + index for index in range(len(x))]
        to = self.slot if target is None else target
        batch = Batch(
            *(torch.tensor(each, dtype=torch.int32) for each in (ids, ids, ids, [0, len(x)], [[0]])),
            parents=None if parents is None else torch.tensor(parents, dtype=torch.int32),
            states=torch.tensor([[self.slot, to, read]], dtype=torch.int32),
        )
        out = x.clone()
        self.ops.recurrent(out, self.layer, batch, self.states)
        self.slot = to
        return out


def whole(ops: Kernels, delta: bool) -> Tensor:
    text = Text(ops, delta)
    return text.step(0, text.rows, LENGTH - 1)


@BOTH
@RULES
@pytest.mark.parametrize("size", [1, 2, 7])
def test_chunks_change_no_bit(ops: Kernels, delta: bool, size: int) -> None:
    text, expected = Text(ops, delta), whole(ops, delta)
    for start in range(0, LENGTH, size):
        part = text.rows[start : start + size]
        assert torch.equal(text.step(start, part, len(part) - 1), expected[start : start + size])


@BOTH
@RULES
def test_rejected_tokens_of_a_chain_leave_no_trace(ops: Kernels, delta: bool) -> None:
    text, expected, start = Text(ops, delta), whole(ops, delta), 9
    assert torch.equal(text.step(0, text.rows[:9], 8), expected[:9])
    for accepted in (0, 3, 5, 1, 2, 0, 5, 4):  # of five drafted tokens
        end = start + 1 + accepted
        x = torch.cat([text.rows[start:end], text.wrong[end : end + 5 - accepted]])
        assert torch.equal(text.step(start, x, 0)[: 1 + accepted], expected[start:end])
        start = end


@BOTH
@RULES
def test_rejected_tokens_of_a_tree_leave_no_trace(ops: Kernels, delta: bool) -> None:
    """The newest token has two children, the second of them has two more, and so on: odd nodes are wrong."""
    text, expected, start = Text(ops, delta), whole(ops, delta), 4
    text.step(0, text.rows[:4], 3)
    parents = [-1, 0, 0, 2, 2, 4, 4]
    true = [0, 2, 4, 6]
    for accepted in (3, 0, 2, 1, 3):
        x = torch.stack([text.wrong[0]] * 7)
        x[true] = text.rows[start : start + 4]
        out = text.step(start, x, 0, parents)
        path = true[: accepted + 1]
        assert torch.equal(out[path], expected[start : start + len(path)])
        lines = [text.slot * LINES + (start + offset) % LINES for offset in path]
        targets = [text.slot * LINES + (start + index) % LINES for index in range(len(path))]
        ids = (torch.tensor(each, dtype=torch.int32) for each in (lines, targets))
        ops.copy_inputs([text.states], *ids)
        start += len(path)


@BOTH
@RULES
def test_a_step_can_be_repeated(ops: Kernels, delta: bool) -> None:
    """In place if it reads no token of its own, else to another slot."""
    text, expected = Text(ops, delta), whole(ops, delta)
    text.step(0, text.rows[:6], 5)
    for _ in range(2):
        assert torch.equal(text.step(6, text.rows[6:10], 0), expected[6:10])
    for _ in range(2):
        text.slot = 0
        assert torch.equal(text.step(9, text.rows[9:20], 10, target=1), expected[9:20])
    assert torch.equal(text.step(20, text.rows[20:], 19), expected[20:])


@BOTH
def test_other_slots_stay_unchanged(ops: Kernels) -> None:
    text = Text(ops, True)
    before = copy_states(text.states)
    text.step(0, text.rows[:8], 7, target=2)
    for name in ("states", "inputs", "lengths"):
        left, right = getattr(before, name), getattr(text.states, name)
        assert torch.equal(left[:2], right[:2])
        assert not torch.equal(left[2], right[2])


@BOTH
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"states": None}, "has no `states`"),
        ({"states": [[0, SLOTS, 0]]}, "outside the storage"),
        ({"states": [[-1, 0, 0]]}, "outside the storage"),
        ({"states": [[0, 0, 5]]}, "cannot be kept"),
        ({"positions": [3, 4, 5, 6]}, "cannot continue at 3"),
        ({"positions": [30, 31, 32, 33]}, "cannot continue at 30"),
        ({"parents": [-1, 0, 0, 0], "states": [[0, 0, 2]]}, "whose state is not kept"),
        ({"parents": [-1, 0, 2, 1]}, "whose state is not kept"),
    ],
)
def test_rows_that_no_state_can_serve_are_refused(ops: Kernels, change: dict[str, Any], reason: str) -> None:
    text = Text(ops, True)
    text.step(0, text.rows[:6], 5)
    ids = [torch.tensor(each, dtype=torch.int32) for each in ([5] * 4, [5, 6, 7, 8], [5] * 4, [0, 4], [[0]])]
    batch = Batch(*ids, states=torch.tensor([[0, 0, 0]], dtype=torch.int32))
    changes = {
        name: None if value is None else torch.tensor(value, dtype=torch.int32) for name, value in change.items()
    }
    before, x = copy_states(text.states), text.rows[:4].clone()
    with pytest.raises(ValueError, match=reason):
        ops.recurrent(x, text.layer, replace(batch, **changes), text.states)
    assert torch.equal(x, text.rows[:4])
    assert torch.equal(before.states, text.states.states)
    assert torch.equal(before.lengths, text.states.lengths)
