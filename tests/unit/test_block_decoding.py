"""Trees over a block of masks: the best that its formulas allow, or a settled shape, within pages and context."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_target import Stage
from forest import Leaf, assert_tree, leaves
from test_block_heads import TEXT, Formulas, begin, features
from torch import Tensor

import tiny
import tiny_blocks
from outrider.errors import UserError
from outrider.kernels import Kernels, load
from outrider.request import Request
from outrider.speculation import DraftBatch, DraftContext, find
from outrider.speculation.drafters.tree_builder import best_first, fixed_shape
from tiny_blocks import Plan

WIDTH, BRANCHES, LEVELS = 12, 2, 5
PLANS = {
    "dflash": Plan(),
    "dflash from the anchor": Plan(from_anchor=True, draft_vocabulary=None),
    "dspark": Plan(method="dspark"),
    "gated": Plan(method="dspark", markov="gated", confidence=False),
    "rnn in its place": Plan(method="dspark", markov="rnn", from_anchor=False),
    "no bias": Plan(method="dspark", rank=0, confidence_markov=False),
}


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return load(request.param)


def after(formulas: Formulas, request: Request, levels: int) -> Callable[[tuple[int, ...]], Tensor]:
    """Drafted tokens -> logits [V] of what comes after them, by a block of this size."""
    text, plan = request.prompt + request.output, formulas.plan
    unsaid = 0 if plan.anchored else 1
    states = formulas.states(features(plan.aux_layers, tuple(text[:-1])), text[-1], levels + unsaid)

    def logits(path: tuple[int, ...]) -> Tensor:
        memory, bias = torch.zeros(plan.rank), torch.zeros(0)
        if unsaid:
            memory = formulas.step(states[0], text[-1], memory)[1]
        for state, before in zip(states[unsaid:], (text[-1], *path), strict=False):
            bias, memory = formulas.step(state, before, memory)
        spread = torch.full((tiny.VOCABULARY,), -torch.inf)
        spread[slice(None) if plan.ids is None else plan.ids] = formulas.head @ states[unsaid + len(path)] + bias
        return spread

    return logits


def best(formulas: Formulas, request: Request, width: int, levels: int = LEVELS) -> list[Leaf]:
    """Search all paths through the most probable tokens of each node."""
    levels = min(width, levels)
    logits = after(formulas, request, levels)

    def below(path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], float]]:
        if len(path) < levels:
            shares = torch.softmax(logits(path).double(), -1)
            for token in shares.argsort(descending=True)[:BRANCHES].tolist():
                yield (*path, token), float(shares[token])

    grown = best_first(below(()), below, width)
    found: list[Leaf] = []
    for path, parent, share in zip(*grown, strict=True):
        found.append(Leaf(path, math.log(share) + (found[parent].log_prob if parent >= 0 else 0.0)))
    return found


@pytest.mark.parametrize("name", PLANS)
def test_trees_are_the_best_of_all_that_could_be(name: str, tmp_path: Path, ops: Kernels) -> None:
    stage = Stage(ops, pages=80)
    formulas = begin(stage, PLANS[name], tmp_path, width=WIDTH, branches=BRANCHES, max_depth=LEVELS)
    first, second = stage.request(TEXT), stage.request(tiny.prompt(11, seed=4), seed=1)
    stage.step((first, 14, WIDTH), (second, 11, 4))
    for _ in range(3):
        assert_tree(stage.draft_batch, 0, best(formulas, first, WIDTH))
        assert_tree(stage.draft_batch, 1, best(formulas, second, 4))
        work = [(each, each.length - each.computed, width) for each, width in ((first, WIDTH), (second, 4))]
        stage.step(*work)


def test_what_does_not_pay_is_left_out_and_levels_cost_nothing(tmp_path: Path, ops: Kernels) -> None:
    stage = Stage(ops)
    formulas = begin(stage, PLANS["dspark"], tmp_path, width=WIDTH, branches=BRANCHES, max_depth=LEVELS)
    propose = stage.proposer.propose

    def priced(contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        probs = [math.exp(leaf.log_prob) for leaf in leaves(propose(contexts, last, hidden), 0)]
        floor = (probs[7] + probs[8]) / 2
        return propose(
            [replace(context, min_acceptance=floor, min_continuation=1.0) for context in contexts], last, hidden
        )

    stage.proposer.propose = priced  # type: ignore[method-assign]
    request = stage.request(TEXT)
    stage.step((request, 14, WIDTH))
    expected = best(formulas, request, WIDTH)[:8]
    assert max(len(leaf.path) for leaf in expected) > 1
    assert_tree(stage.draft_batch, 0, expected)


@pytest.mark.parametrize("name", ["dflash", "dspark", "rnn in its place"])
@pytest.mark.parametrize("replacement", [False, True])
def test_drawn_trees_have_a_shape_that_no_token_chose(
    name: str, tmp_path: Path, ops: Kernels, replacement: bool
) -> None:
    stage = Stage(ops, sampled=True, coupled=False, replacement=replacement)
    formulas = begin(stage, PLANS[name], tmp_path, width=WIDTH, branches=BRANCHES, max_depth=LEVELS)
    request = stage.request(TEXT, seed=5, temperature=0.5)
    stage.step((request, 14, WIDTH))
    draft_batch, shape = stage.draft_batch, fixed_shape(WIDTH, BRANCHES, LEVELS)
    assert draft_batch is not None and draft_batch.logits is not None and draft_batch.confidence is None
    (draft,) = draft_batch.drafts()
    assert draft.parents == [parent for parent, _ in shape]
    logits, paths = after(formulas, request, LEVELS), list[tuple[int, ...]]()
    for index, (token, (parent, _)) in enumerate(zip(draft.tokens, shape, strict=True)):
        before = paths[parent] if parent >= 0 else ()
        assert torch.allclose(draft_batch.logits[0, index], logits(before), atol=1e-4)
        paths.append((*before, token))
    assert replacement or len(set(paths)) == WIDTH


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_trees_are_no_deeper_than_pages_and_context(name: str, tmp_path: Path, ops: Kernels) -> None:
    stage = Stage(ops, pages=60)
    formulas = begin(stage, PLANS[name], tmp_path, width=WIDTH, branches=BRANCHES)
    unsaid = 0 if formulas.plan.anchored else 1
    request, other = stage.request(TEXT), stage.request(tiny.prompt(5), seed=1)
    stage.step((request, 14, WIDTH), (other, 5, WIDTH), lookahead=0)  # 2 positions are left, and 3
    assert_tree(stage.draft_batch, 0, best(formulas, request, WIDTH, 2 - unsaid))
    assert_tree(stage.draft_batch, 1, best(formulas, other, WIDTH, 3 - unsaid))
    full = stage.request(TEXT[:12], seed=2)
    stage.step((full, 12, WIDTH), lookahead=0)
    assert leaves(stage.draft_batch, 0) == []
    long = stage.request(tiny.prompt(125), seed=3)  # 128 positions are all that there are
    stage.step((long, 125, WIDTH))
    assert_tree(stage.draft_batch, 0, best(formulas, long, WIDTH, 3 - unsaid))


def test_needs(tmp_path: Path, ops: Kernels) -> None:
    for method, drafts, ahead in (("dflash", 7, 8), ("dspark", 8, 8)):
        for given, width, further in (
            ({"width": 15, "branches": 3}, 15, ahead),
            ({"width": 15, "branches": 3, "max_depth": 4}, 15, ahead - drafts + 4),
            ({"branches": 2}, drafts, ahead),
            ({"width": 3, "max_depth": 2}, 2, ahead - drafts + 2),
        ):
            stage = Stage(ops)
            begin(stage, Plan(method=method), tmp_path, **given)
            needs = stage.proposer.needs
            assert (needs.width, needs.lookahead) == (width, further)
            assert needs.trees == ("branches" in given) and needs.multi_step != needs.trees


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"width": 9},
            "`width` is 9, .* blocks of 8, .* 8 tokens: pass at most 8, or `branches` for a tree",
        ),
        ({"width": 20, "branches": 2, "max_depth": 9}, "`max_depth` is 9, .* pass at most 8$"),
        ({"branches": 9}, "`branches` is 9 and `width` is 8"),
        ({"branches": 0}, "`branches` is 0"),
        ({"max_depth": 0}, "`max_depth` is 0"),
    ],
)
def test_impossible_trees_are_refused_by_name(tmp_path: Path, options: dict[str, int], message: str) -> None:
    module = find("dspark")
    given = tiny_blocks.write(Plan(method="dspark"), tmp_path)["model"]
    with pytest.raises(UserError, match=message):
        module.build(module.Options(model=given, **options), Stage(load("cpu")).target)
