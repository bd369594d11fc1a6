"""A drafter that raises or returns invalid drafts loses its speculation and changes no text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch

from outrider import SamplingParams
from outrider.device import HOST
from outrider.kernels import load
from outrider.request import Request
from outrider.speculation import DraftBatch, DraftContext, MethodOptions, Needs
from outrider.speculation.manager import validated
from outrider.speculation.verifier import Verifier
from outrider.types import Draft

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


@dataclass(frozen=True)
class Options(MethodOptions):
    width: int = 3


class Rude:
    """A valid drafter, except for the method that a test replaces."""

    needs = Needs(width=3, has_probs=True)

    def __init__(self) -> None:
        self.accepts: dict[Request, int] = {}
        self.steps: dict[Request, int] = {}

    def propose(self, contexts: Sequence[DraftContext], last: torch.Tensor, hidden: torch.Tensor | None) -> DraftBatch:
        for context in contexts:
            self.steps[context.request] = self.steps.get(context.request, 0) + 1
        return self.draft(contexts)

    def draft(self, contexts: Sequence[DraftContext]) -> DraftBatch:
        return DraftBatch([[5, 6, 7][: context.num_draft_tokens] for context in contexts])

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        for request in requests:
            self.accepts[request] = self.accepts.get(request, 0) + 1

    def release(self, requests: Sequence[Request]) -> None:
        return


@pytest.fixture
def rude(monkeypatch: pytest.MonkeyPatch) -> Rude:
    """A drafter that the engine finds as `rude.drafter`."""
    drafter, module = Rude(), ModuleType("rude.drafter")
    module.Options, module.build = Options, lambda options, target: drafter
    monkeypatch.setitem(sys.modules, "rude", ModuleType("rude"))
    monkeypatch.setitem(sys.modules, "rude.drafter", module)
    return drafter


def answers(llm, **changes: object) -> list[object]:
    outputs = llm.generate(PROMPTS, replace(PARAMS, **changes))
    return [(output.completions[0].token_ids, output.completions[0].finish_reason) for output in outputs]


NONSENSE = {
    "too few parents": lambda contexts: DraftBatch([[5, 5, 5]] * len(contexts), parents=[[-1, 0]] * len(contexts)),
    "a parent ahead": lambda contexts: DraftBatch([[5, 5, 5]] * len(contexts), parents=[[-1, 2, 0]] * len(contexts)),
    "a strange id": lambda contexts: DraftBatch([[5, 101, 5]] * len(contexts)),
    "a row too few": lambda contexts: DraftBatch([[5]] * (len(contexts) - 1)),
    "logits for one token": lambda contexts: DraftBatch(
        [[5, 5, 5]] * len(contexts), logits=torch.zeros(len(contexts), 1, 101)
    ),
}


@pytest.mark.parametrize("verify", ["exact", "rejection", "block"])
@pytest.mark.parametrize("nonsense", NONSENSE)
def test_invalid_drafts_change_no_text(tiny_llm, rude: Rude, nonsense: str, verify: str) -> None:
    rude.draft = NONSENSE[nonsense]
    llm = tiny_llm(speculate=f"rude.drafter:verify={verify}" + (",adaptive=no" if verify == "exact" else ""))
    if nonsense == "logits for one token" and verify == "exact":
        rude.draft = NONSENSE["a strange id"]  # exact verification reads no logits
    assert answers(llm) == answers(llm, speculate=False)


def test_a_tree_is_refused_where_only_chains_are_verified() -> None:
    context = DraftContext(
        Request("a", [1], PARAMS, 0), start=0, computed=1, new_tokens=[5], num_draft_tokens=3, first_row=0
    )
    verifier = Verifier(load("reference"), HOST, "block")
    chain, tree = (DraftBatch([[5, 6]], parents=[parents]) for parents in ([-1, 0], [-1, -1]))
    assert validated(chain, [context], 101, verifier) == [Draft([5, 6])]
    with pytest.raises(ValueError, match="verifies only chains"):
        validated(tree, [context], 101, verifier)


def test_a_failure_on_one_request_reports_no_acceptance_twice(tiny_llm, rude: Rude) -> None:
    def fail(contexts: Sequence[DraftContext]) -> DraftBatch:
        if any(context.request.prompt == PROMPTS[0] and len(context.request.output) > 3 for context in contexts):
            raise RuntimeError("not this one")
        return DraftBatch([[5, 6, 7][: context.num_draft_tokens] for context in contexts])

    rude.draft = fail
    llm = tiny_llm(speculate="rude.drafter:adaptive=no")
    assert answers(llm) == answers(llm, speculate=False)
    (other,) = [request for request in rude.accepts if request.prompt == PROMPTS[1]]
    assert rude.accepts[other] == other.spec_stats.steps


def test_a_drafter_that_fails_to_release_loses_no_output(tiny_llm, rude: Rude) -> None:
    def fail(requests: Sequence[Request]) -> None:
        raise RuntimeError("mine")

    rude.release = fail
    llm = tiny_llm(speculate="rude.drafter:adaptive=no")
    assert answers(llm) == answers(llm, speculate=False)
