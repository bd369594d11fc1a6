"""Trees that a network grows: the best nodes of all that could be, in their order, whatever the pages hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_target import SIZE, Stage, entries, from_scratch
from forest import BRANCHES, LEVELS, WIDTH, Oracle, after, assert_tree, context, forest, leaves, play, propose
from test_autoregressive import Same
from torch import Tensor

import tiny
import tiny_heads
from outrider.cache.pages import Pages
from outrider.errors import UserError
from outrider.kernels import Batch, Kernels, load
from outrider.models.heads import EagleHead
from outrider.speculation import DraftContext, TreeOptions, find
from outrider.speculation.checkpoints import open_head
from outrider.speculation.drafters.autoregressive import Autoregressive


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return load(request.param)


def test_needs(ops: Kernels) -> None:
    needs = play(ops, context=50).proposer.needs
    assert needs.trees and needs.costs_time and needs.has_probs and needs.has_kv
    assert (needs.width, needs.lookahead, needs.context) == (WIDTH, WIDTH, 50)
    stage = play(ops, shape=(8, 1, 3))
    assert not stage.proposer.needs.trees and stage.proposer.needs.width == 3
    assert len(stage.step((stage.request(tiny.prompt(5)), 5, 8))[0]) == 3


@pytest.mark.parametrize("shape", [(9, 3, 4), (60, 4, 5), (5, 5, 5), (7, 2, 7), (3, 3, 1), (2, 2, 3), (12, 2, 2)])
def test_trees_are_the_best_of_all_that_was_seen(ops: Kernels, shape: tuple[int, int, int]) -> None:
    width, branches, levels = shape
    stage = play(ops, shape=shape)
    network: Any = stage.proposer.network  # type: ignore[attr-defined]
    request = stage.request(tiny.prompt(11))
    for _ in range(2):
        stage.decode(request, width=width)
        assert_tree(stage.draft_batch, 0, forest(after(request), width, branches, levels))
        text = request.prompt + request.output
        assert torch.equal(entries(network.pages, request.pages, 0, len(text)), from_scratch(network.model, text))


def test_kept_tokens_are_read_again_and_the_next_tree_is_right(ops: Kernels) -> None:
    stage = play(ops)
    stage.surprises = {14, 17}
    request = stage.request(tiny.prompt(9))
    lengths = []
    for _ in range(5):
        before = request.length
        stage.decode(request, width=WIDTH)
        lengths.append(request.length - before)
        assert_tree(stage.draft_batch, 0, forest(after(request), WIDTH))
    assert max(lengths) > 2 and min(lengths[1:]) < 3


def test_rows_have_widths_and_floors_of_their_own_and_none_inside_a_prompt(ops: Kernels) -> None:
    stage = play(ops)
    widths, floors = (9, 1, 0, 4, 6, 9), (0.0, 0.0, 0.0, 0.0, 0.05, 2.0)
    requests = [stage.request(tiny.prompt(length, length), length) for length in (5, 9, 6, 13, 8, 7)]
    contexts = [context(stage, each, *rest) for each, *rest in zip(requests, widths, floors, strict=True)]
    early = stage.request(tiny.prompt(20, 3), 3)
    stage.reach(early, 8)
    mixed = [*contexts[:3], DraftContext(early, 0, 6, [], 0, 0), *contexts[3:]]
    last = torch.tensor([9, 9, 9, early.prompt[6], 9, 9, 9], dtype=torch.int32)
    draft = stage.proposer.propose(mixed, last, None)
    assert leaves(draft, 3) == []
    alone = [propose(stage, each) for each in contexts]
    for row, each, single in zip((0, 1, 2, 4, 5, 6), contexts, alone, strict=True):
        each.request.output.append(9)
        assert_tree(draft, row, forest(after(each.request), each.num_draft_tokens, floor=each.min_acceptance))
        assert leaves(single, 0) == leaves(draft, row)
    assert [len(leaves(draft, row)) for row in (0, 1, 2, 4, 6)] == [9, 1, 0, 4, 0]
    assert 0 < len(leaves(draft, 5)) < 6


def test_a_chain_ends_before_the_token_that_does_not_pay(ops: Kernels) -> None:
    stage = play(ops, shape=(6, 1, 6))
    request, other = stage.request(tiny.prompt(8)), stage.request(tiny.prompt(5, 1), 1)
    free = propose(stage, context(stage, request, 6), context(stage, other, 6))
    assert free.confidence is not None and free.lengths == [6, 6]
    path, text = free.rows(free.tokens)[0], [*request.prompt, 9]
    logits, _ = tiny.run(stage.model, text + path, chunk=100)
    shares = torch.softmax(logits[len(text) - 1 : -1].double(), -1)[range(6), path].tolist()
    assert free.confidence[0] == pytest.approx(shares, abs=1e-5)
    whole = [math.prod(shares[: at + 1]) for at in range(6)]
    floor = (whole[2] + whole[3]) / 2
    stage.proposer.release([request, other])
    network: Any = stage.proposer.network  # type: ignore[attr-defined]
    network.ran = []
    cut = propose(stage, context(stage, request, 6, floor), context(stage, other, 2))
    assert cut.rows(cut.tokens) == [path[:3], free.rows(free.tokens)[1][:2]]
    assert cut.confidence is not None and [len(row) for row in cut.confidence] == [3, 2]
    assert [len(ran) for ran in network.ran[1:]] == [2, 1, 1]  # the fourth is drawn, and not read
    stage.proposer.accept([request], [3])
    text += path[:3]
    assert stage.proposer.kv[request].known == len(text)  # type: ignore[attr-defined]
    assert torch.equal(entries(network.pages, request.pages, 0, len(text)), from_scratch(network.model, text))


def test_mask_tokens_end_where_they_do_not_pay(ops: Kernels) -> None:
    stage = Stage(ops)
    stage.begin(Autoregressive(Same(stage, mask=99), stage.target, 4))
    request = stage.request(tiny.prompt(8))
    free = propose(stage, context(stage, request, 4))
    assert free.confidence is not None
    shares = list(free.confidence[0])
    stage.proposer.release([request])
    floor = (shares[0] * shares[1] + shares[0]) / 2
    cut = propose(stage, context(stage, request, 4, floor))
    assert cut.rows(cut.tokens) == [free.rows(free.tokens)[0][:1]]


def test_trees_stay_inside_the_pages(ops: Kernels) -> None:
    stage = play(ops)
    free_counts = set()
    for length in range(8, 13):
        request = stage.request(tiny.prompt(length, length), length)
        stage.step((request, length, WIDTH), lookahead=1)
        free_slots = len(request.pages) * SIZE - length - 1  # nodes that may stand in the pages at once
        free_counts.add(free_slots)
        found = [leaf.path for leaf in leaves(stage.draft_batch, 0)]
        inner = {path[:-1] for path in found} - {()}
        assert len({path[:end] for path in inner for end in range(1, len(path) + 1)}) <= free_slots
        if free_slots < 2:
            assert len(found) == BRANCHES * (free_slots + 1)
        possible = {leaf.path for leaf in forest(after(request), 200, levels=1 if free_slots == 0 else LEVELS)}
        assert set(found) <= possible
    assert free_counts == {0, 1, 2, 3}


def test_trees_are_no_deeper_than_the_context(ops: Kernels) -> None:
    stage = play(ops, context=14)
    stage.surprises = set(range(100))
    request = stage.request(tiny.prompt(9))
    depths = []
    for _ in range(6):
        stage.decode(request, width=WIDTH)
        levels = min(14 - request.length + 1, LEVELS)
        assert_tree(stage.draft_batch, 0, forest(after(request), WIDTH, levels=levels))
        depths.append(levels)
    assert depths == [4, 4, 3, 2, 1, 0]


PLANS: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle"},
    "eagle3": {"layers": 2, "norm_output": True},
    "window": {"window": 3, "draft_vocabulary": None},
}


class Alone:
    """A head that reads each path from the beginning, in pages of its own, as a chain."""

    def __init__(self, stage: Stage, folder: str, method: str) -> None:
        self.stage = stage
        head = open_head(folder, stage.model.config, method)
        layers = head.shape.layers
        self.pages = Pages(layers.layers, layers.kv_heads, SIZE, layers.head_dim, "float32")
        self.pages.allocate(32)
        self.head = EagleHead(head, stage.model, self.pages, 128)

    def oracle(self, text: list[int], aux_layers: tuple[int, ...]) -> Oracle:
        _, aux_hidden = tiny.run(self.stage.model, text, chunk=200, aux_layers=aux_layers)
        truth = self.head.project_features(torch.cat(aux_hidden, 1)[:-1].contiguous())  # [T - 1, H]

        def logits(path: Sequence[int]) -> Tensor:
            state = self._run(text[1:], 1, truth)
            for at, token in enumerate(path):
                state = self._run([token], len(text) + at, self.head.feedback_features(state))
            return self.head.logits(state)[0]

        return logits

    def _run(self, tokens: list[int], start: int, features: Tensor) -> Tensor:
        batch: Batch = tiny.batch([(tokens, start, list(range(32)))], SIZE)
        return self.head.run(batch, features)[-1:]


@pytest.mark.parametrize("name", PLANS)
def test_heads_build_trees_over_their_own_drafts(ops: Kernels, name: str, tmp_path: Path) -> None:
    variant = {"method": "eagle3", **PLANS[name]}
    method = variant.pop("method")
    given = tiny_heads.make(method, tmp_path, **variant)
    stage, module = Stage(ops, pages=80), find(method)
    options = module.Options(model=given["model"], width=WIDTH, branches=BRANCHES, max_depth=LEVELS)
    stage.begin(module.build(options, stage.target))
    alone = Alone(stage, given["model"], method)
    requests = [stage.request(tiny.prompt(length, length), length) for length in (6, 11)]
    for _ in range(3):
        stage.decode(*requests, width=WIDTH)
        for row, request in enumerate(requests):
            oracle = alone.oracle(request.prompt + request.output, stage.proposer.needs.aux_layers)
            assert_tree(stage.draft_batch, row, forest(oracle, WIDTH))


def test_parallel_drafters_refuse_to_branch() -> None:
    stage = Stage(load("cpu"))
    with pytest.raises(UserError, match=r"`branches` is 2, but .* in one pass"):
        Autoregressive(Same(stage, mask=99), stage.target, 4, branches=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branches": 0}, "`branches` is 0: it must be at least 1"),
        ({"max_depth": 0}, "`max_depth` is 0: it must be at least 1"),
        ({"branches": 5, "width": 4}, "`branches` is 5 and `width` is 4"),
    ],
)
@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_impossible_trees_are_refused_by_name(method: str, options: dict[str, int], message: str) -> None:
    module = find(method)
    assert issubclass(module.Options, TreeOptions)
    with pytest.raises(UserError, match=message):
        module.build(module.Options(model="nowhere", **options), None)
