"""A drafter raises or returns nonsense, at any step: every request says exactly what it says without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from endurance.sabotage import CAUSE, LONG, Fragile, Trap, Trapped, check_nothing_left
from endurance.scenes import MIXED, PROMPTS, alone, visible_output
from outrider import LLM
from outrider.request import Request
from outrider.speculation import DraftBatch, DraftContext, MethodOptions, Needs

VOCABULARY = 101
NAN, INFINITY = float("nan"), float("inf")


@dataclass(frozen=True)
class Options(MethodOptions):
    width: int = 3


class Scripted:
    """Well-behaved up to step `at` of each request; from then on it returns what `nonsense` makes of its drafts."""

    needs = Needs(width=3, has_probs=True, trees=False)

    def __init__(self) -> None:
        self.at = 0
        self.calls = 0  # that returned nonsense
        self.nonsense: Callable[[list[list[int]]], Any] = DraftBatch

    def propose(self, contexts: Sequence[DraftContext], last: torch.Tensor, hidden: torch.Tensor | None) -> Any:
        tokens = [[5, 6, 7][: context.num_draft_tokens] for context in contexts]
        if all(len(context.request.output) + len(context.new_tokens) <= self.at for context in contexts):
            return DraftBatch(tokens)
        self.calls += 1
        return self.nonsense(tokens)

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        return

    def release(self, requests: Sequence[Request]) -> None:
        return


def logits(value: float) -> Callable[[list[list[int]]], DraftBatch]:
    def make(tokens: list[list[int]]) -> DraftBatch:
        scores = torch.zeros(len(tokens), 3, VOCABULARY)  # [B, W, V]
        scores[:, :, 9] = value
        return DraftBatch(tokens, logits=scores)

    return make


def confidence(value: float) -> Callable[[list[list[int]]], DraftBatch]:
    return lambda tokens: DraftBatch(tokens, confidence=[[value] * len(row) for row in tokens])


def failing(tokens: list[list[int]]) -> DraftBatch:
    raise RuntimeError(CAUSE)


def sized(tokens: list[list[int]], token: float, count: int = 3) -> list[list[Any]]:
    return [[token] * count for _ in tokens]


NONSENSE: dict[str, Callable[[list[list[int]]], Any]] = {
    "raises": failing,
    "nothing at all": lambda tokens: None,
    "another type": lambda tokens: [[5]],
    "an id below": lambda tokens: DraftBatch(sized(tokens, -1)),
    "an id above": lambda tokens: DraftBatch(sized(tokens, VOCABULARY)),
    "an id out of this world": lambda tokens: DraftBatch(sized(tokens, 2**40)),
    "an id that is no number": lambda tokens: DraftBatch(sized(tokens, NAN)),
    "an id between two": lambda tokens: DraftBatch(sized(tokens, 5.5)),
    "ids as words": lambda tokens: DraftBatch([["five"] for _ in tokens]),  # type: ignore[list-item]
    "a thousand tokens": lambda tokens: DraftBatch(sized(tokens, 5, 1000)),
    "a row too many": lambda tokens: DraftBatch([*tokens, [5]]),
    "a flat tensor": lambda tokens: DraftBatch(torch.zeros(len(tokens), dtype=torch.int32)),
    "a tensor of fractions": lambda tokens: DraftBatch(torch.full((len(tokens), 3), 0.5)),
    "an empty tensor": lambda tokens: DraftBatch(torch.zeros(0, 3, dtype=torch.int32)),
    "lengths that are too long": lambda tokens: DraftBatch(sized(tokens, 5), lengths=[9] * len(tokens)),
    "lengths below nothing": lambda tokens: DraftBatch(sized(tokens, 5), lengths=[-1] * len(tokens)),
    "lengths of others": lambda tokens: DraftBatch(sized(tokens, 5), lengths=[1] * (len(tokens) + 1)),
    "a parent of itself": lambda tokens: DraftBatch(sized(tokens, 5), parents=[[0, 1, 2]] * len(tokens)),
    "a parent that is no number": lambda tokens: DraftBatch(sized(tokens, 5), parents=[[NAN] * 3] * len(tokens)),  # type: ignore[list-item]
    "parents as a flat tensor": lambda tokens: DraftBatch(sized(tokens, 5), parents=torch.zeros(3)),
    "chances that are no numbers": confidence(NAN),
    "chances beyond certainty": confidence(INFINITY),
    "chances below nothing": confidence(-3.0),
    "chances of others": lambda tokens: DraftBatch(tokens, confidence=[[0.5]] * len(tokens)),
    "scores that are no numbers": logits(NAN),
    "scores beyond all": logits(INFINITY),
    "scores of another vocabulary": lambda tokens: DraftBatch(sized(tokens, 5), logits=torch.zeros(len(tokens), 3, 7)),
    "scores without rows": lambda tokens: DraftBatch(sized(tokens, 5), logits=torch.zeros(3, VOCABULARY)),
    "scores of whole numbers": lambda tokens: DraftBatch(
        sized(tokens, 5), logits=torch.zeros(len(tokens), 3, VOCABULARY, dtype=torch.int32)
    ),
    "no score above nothing": lambda tokens: DraftBatch(
        sized(tokens, 5), logits=torch.full((len(tokens), 3, VOCABULARY), -INFINITY)
    ),
    "origins of others": lambda tokens: DraftBatch(sized(tokens, 5), origins=[[1]] * len(tokens)),
}
# What can be read as a draft after all, if it is cut: beyond exact match, a draft that is verified changes the dice.
READABLE = {name for name in NONSENSE if name.startswith(("chances ", "lengths "))}
READABLE |= {"a thousand tokens", "scores of whole numbers"}
READABLE -= {"chances of others", "lengths of others"}
CASES = [(name, mode) for name in NONSENSE for mode in ("exact", "exact,adaptive=no")]
CASES += [(name, mode) for name in NONSENSE if name not in READABLE for mode in ("rejection", "block")]


@pytest.fixture(scope="module")
def drafting(tiny_folder: Callable[..., Path]) -> Callable[[str], tuple[LLM, Scripted]]:
    """An engine with the scripted drafter, for a way to verify."""
    built: dict[str, tuple[LLM, Scripted]] = {}
    drafter, module = Scripted(), ModuleType("scripted.drafter")
    module.Options, module.build = Options, lambda options, target: drafter  # type: ignore[attr-defined]

    def make(mode: str) -> tuple[LLM, Scripted]:
        if mode not in built:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(sys.modules, "scripted", ModuleType("scripted"))
                patch.setitem(sys.modules, "scripted.drafter", module)
                speculate = f"scripted.drafter:verify={mode}"
                built[mode] = (
                    LLM(str(tiny_folder()), backend="cpu", page_size=4, cache_tokens=512, speculate=speculate),
                    drafter,
                )
        return built[mode]

    return make


@pytest.mark.parametrize(("nonsense", "mode"), CASES)
def test_nonsense(fragile: Callable[..., Fragile], drafting: Callable[..., Any], nonsense: str, mode: str) -> None:
    expected = alone(fragile().llm, MIXED)
    llm, drafter = drafting(mode)
    drafter.nonsense = NONSENSE[nonsense]
    for at in (range(9) if LONG else (0, 3)) if mode.startswith("exact") else [0]:
        drafter.at, drafter.calls = at, 0
        assert [visible_output(output) for output in llm.generate(PROMPTS, MIXED)] == expected
        assert drafter.calls or "adaptive" not in mode
        check_nothing_left(llm)


@pytest.mark.parametrize(("verb", "calls"), [("accept", 5), ("release", 2)])
def test_a_drafter_that_cannot_hear(
    fragile: Callable[..., Fragile],
    drafting: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    calls: int,
) -> None:
    """calls: the least number; requests are released in two steps, those in which some end."""
    expected = alone(fragile().llm, MIXED)
    llm, drafter = drafting("exact,adaptive=no")
    drafter.nonsense = DraftBatch
    for call in range(20 if LONG else 5):
        trap = Trap()
        trap.arm(call, lambda: RuntimeError(CAUSE), times=2)
        with monkeypatch.context() as patch:
            patch.setattr(drafter, verb, Trapped(drafter, trap).__getattr__(verb))
            assert [visible_output(output) for output in llm.generate(PROMPTS, MIXED)] == expected
        assert trap.sprung or call >= calls
        check_nothing_left(llm)
