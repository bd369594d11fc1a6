"""Trees of drawn tokens: with the target's own noise, or in a shape that no token chose."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_target import Stage, continuation
from forest import BRANCHES, LEVELS, WIDTH, after, context, leaves, play, propose
from test_autoregressive import Same
from torch import Tensor

import tiny
import tiny_heads
from outrider import LLM, SamplingParams
from outrider.kernels import Kernels, load
from outrider.speculation import DraftContext
from outrider.speculation.drafters.autoregressive import Autoregressive, TreeDecoder
from outrider.speculation.drafters.tree_builder import fixed_shape


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return load(request.param)


@pytest.mark.parametrize("options", [{}, {"sampled": True}, {"sampled": True, "coupled": False}])
def test_a_tree_of_one_branch_is_the_chain(ops: Kernels, options: dict[str, Any]) -> None:
    chain, tree = play(ops, shape=(5, 1, 5), **options), play(ops, shape=(5, 1, 5), **options)
    drafter: Any = tree.proposer
    drafter.trees = TreeDecoder(drafter.network, tree.target, drafter.passes, 5, 1, 5)
    for stage in (chain, tree):
        stage.surprises = {13}
    heats = ((1, 0.0), (2, 0.8))
    pair = [[each.request(tiny.prompt(7, seed), seed, temperature=t) for seed, t in heats] for each in (chain, tree)]
    for _ in range(4):
        assert chain.decode(*pair[0], width=5) == tree.decode(*pair[1], width=5)
        one, other = chain.draft_batch, tree.draft_batch
        assert one is not None and other is not None
        assert other.parents == [[-1, 0, 1, 2, 3]] * 2
        if options == {"sampled": True, "coupled": False}:
            assert one.logits is not None and other.logits is not None and torch.equal(one.logits, other.logits)
            assert one.confidence is None and other.confidence is None
        else:
            assert one.confidence is not None and other.confidence is not None
            for mine, theirs in zip(one.confidence, other.confidence, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-6)


def test_trees_with_the_targets_noise_begin_with_the_targets_own_text(ops: Kernels) -> None:
    stage = play(ops, sampled=True)
    shapes = ((1, 0), (2, 2), (3, 1))
    requests = [stage.request(tiny.prompt(6, seed), seed, temperature=1.3, top_k=top_k) for seed, top_k in shapes]
    for _ in range(3):
        stage.decode(*requests, width=WIDTH)
        draft_batch = stage.draft_batch
        assert draft_batch is not None and draft_batch.logits is None and draft_batch.parents is not None
        for row, (request, most) in enumerate(zip(requests, (3, 2, 1), strict=True)):
            text, trunk = request.prompt + request.output, stage.drafts[request]
            assert trunk == continuation(stage.model, request, text, LEVELS)
            parents = list(draft_batch.parents[row])
            assert max(map(parents.count, parents)) == most
            assert len({leaf.path for leaf in leaves(draft_batch, row)}) == len(parents)
            if most == 1:
                assert parents == [-1, 0, 1, 2]


@pytest.mark.parametrize("replacement", [False, True])
def test_drawn_trees_have_a_shape_that_no_token_chose(ops: Kernels, replacement: bool) -> None:
    stage = play(ops, sampled=True, coupled=False, replacement=replacement)
    shape = fixed_shape(WIDTH, BRANCHES, LEVELS)
    repeats = 0
    for seed in range(4):
        hot, cold = stage.request(tiny.prompt(6, seed), seed, temperature=0.3), stage.request(tiny.prompt(9, seed), 50)
        draft_batch = propose(
            stage, context(stage, hot, WIDTH), context(stage, cold, 5, 2.0)
        )  # a floor would look at tokens
        assert draft_batch.confidence is None and draft_batch.logits is not None and draft_batch.parents is not None
        assert draft_batch.logits.shape == (2, WIDTH, tiny.VOCABULARY)
        for row, (request, width) in enumerate(((hot, WIDTH), (cold, 5))):
            request.output.append(9)
            oracle = after(request, stage.model)
            assert draft_batch.drafts()[row].parents == [parent for parent, _ in shape[:width]]
            paths: list[tuple[int, ...]] = []
            for index, (token, (parent, rank)) in enumerate(zip(draft_batch.drafts()[row].tokens, shape, strict=False)):
                before = paths[parent] if parent >= 0 else ()
                paths.append((*before, token))
                logits = oracle(before)
                assert torch.equal(draft_batch.logits[row, index], logits)
                if row == 1:  # at temperature 0 the top-k, all different
                    assert token == logits.argsort(descending=True)[rank]
            repeats += len(paths) - len(set(paths))
            assert row == 0 or len(set(paths)) == width
    assert (repeats > 0) == replacement


@pytest.mark.parametrize("replacement", [False, True])
def test_drawn_siblings_follow_the_drafters_law(replacement: bool) -> None:
    """The first child is a draw from q; the second one from q, or from what the first left of it."""
    stage = play(load("cpu"), shape=(2, 2, 1), sampled=True, coupled=False, replacement=replacement)
    request = stage.request(tiny.prompt(6), 0, temperature=0.4)
    one = context(stage, request, 2)
    counts = torch.zeros(2, tiny.VOCABULARY, dtype=torch.float64)
    both, samples = 0, 2000
    for first in range(0, samples, 100):
        requests = [stage.request(request.prompt, first + at, temperature=0.4) for at in range(100)]
        for each in requests:
            each.pages = request.pages
        draft_batch = propose(stage, *[DraftContext(each, 0, one.computed, [9], 2, 0) for each in requests])
        for elder, younger in (draft.tokens for draft in draft_batch.drafts()):
            counts[0, elder] += 1
            counts[1, younger] += 1
            both += elder == younger
    request.output.append(9)
    q = torch.softmax(after(request)([]).double() / 0.4, -1)
    # Without replacement: P(second = y) = sum over x of q(x) q(y) / (1 - q(x)), x other than y.
    ratios = q / (1 - q)
    expected_probs = (q, q if replacement else q * (ratios.sum() - ratios))
    for seen, probs in zip(counts / samples, expected_probs, strict=True):
        assert 0.5 * (seen - probs).abs().sum() < 0.5 * math.sqrt(tiny.VOCABULARY / samples)
    expected = float((q * q).sum()) if replacement else 0.0
    assert abs(both / samples - expected) <= 5 * math.sqrt(expected * (1 - expected) / samples)


@pytest.mark.parametrize("options", [{}, {"sampled": True}, {"sampled": True, "coupled": False}])
def test_fewer_tokens_than_branches_leave_their_nodes_out(ops: Kernels, options: dict[str, Any]) -> None:
    class Mute(Same):
        """It knows two tokens."""

        def logits(self, states: Tensor) -> Tensor:
            return torch.full_like(super().logits(states), -torch.inf).index_fill(1, torch.tensor([5, 8]), 0.0)

    stage = Stage(ops, **options)
    stage.begin(Autoregressive(Mute(stage), stage.target, 12, branches=4, max_depth=2))
    request = stage.request(tiny.prompt(6), 1, temperature=1.0)
    draft_batch = propose(stage, context(stage, request, 12))
    assert draft_batch.parents is not None
    tokens, parents = draft_batch.drafts()[0].tokens, draft_batch.drafts()[0].parents
    assert set(tokens) == {5, 8} and parents.count(-1) == 2
    assert len(set(zip(parents, tokens, strict=True))) == len(tokens) > 3
    assert draft_batch.logits is None or draft_batch.logits.shape[:2] == (1, len(tokens))


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_an_engine_cannot_tell_a_chain_from_a_tree_of_one_branch(
    tiny_llm: Callable[..., LLM], tmp_path: Path, method: str
) -> None:
    given = ",".join(f"{key}={value}" for key, value in tiny_heads.make(method, tmp_path).items())
    params = [SamplingParams(max_tokens=16, temperature=heat, seed=3, ignore_eos=True) for heat in (0.0, 0.9)]
    seen = []
    for forced in (False, True):
        llm = tiny_llm(speculate=f"{method}:width=4,adaptive=no,draft=probabilistic,branches=1,{given}")
        spec_manager = llm.engine.spec_manager
        drafter: Any = spec_manager.methods[method]
        assert drafter.trees is None
        if forced:
            drafter.trees = TreeDecoder(drafter.network, spec_manager.target, drafter.passes, 4, 1, 4)
        outputs = llm.generate([tiny.prompt(9), tiny.prompt(12, 1)], params)
        seen.append([(one.completions[0].token_ids, one.stats.speculation) for one in outputs if one.stats])
    assert seen[0] == seen[1]
    assert sum(spec_stats.accepted for _, spec_stats in seen[0]) > 0
