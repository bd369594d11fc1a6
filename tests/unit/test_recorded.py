"""Drafts by replay are those of the loop in Python, step for step: tokens, confidence and the entries behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_target import Stage, entries
from test_autoregressive import Same

import tiny
import tiny_blocks
import tiny_heads
from outrider.cache.pages import Pages
from outrider.device import HOST
from outrider.kernels import Kernels, load
from outrider.recordings import Recorded, Recordings
from outrider.request import Request
from outrider.speculation import DraftContext, Proposer, find
from outrider.speculation.drafters.autoregressive import Autoregressive
from outrider.speculation.drafters.block import BlockDrafter

STEPS = 12
SURPRISES = {13, 14, 17, 19, 22, 30}
Make = Callable[[Stage, Path], Proposer]


def head(method: str, write: Callable[[Path], str]) -> Make:
    def make(stage: Stage, folder: Path) -> Proposer:
        module = find(method)
        return module.build(module.Options(model=write(folder), width=3), stage.target)

    return make


def block(plan: tiny_blocks.Plan) -> Make:
    return head(plan.method, lambda folder: tiny_blocks.write(plan, folder)["model"])


DRAFTERS: dict[str, Make] = {
    "draft model": lambda stage, _: Autoregressive(Same(stage), stage.target, 3),
    "eagle": head("eagle", lambda folder: tiny_heads.make("eagle", folder)["model"]),
    "eagle3": head("eagle3", lambda folder: tiny_heads.make("eagle3", folder)["model"]),
    "dflash": block(tiny_blocks.Plan()),
    "dflash from the anchor": block(tiny_blocks.Plan(from_anchor=True, draft_vocabulary=None)),
    "dspark": block(tiny_blocks.Plan(method="dspark")),
    "rnn": block(tiny_blocks.Plan(method="dspark", markov="rnn", from_anchor=False)),
}


@pytest.fixture(params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return load(request.param)


class Bounded(Stage):
    """A stage whose drafts end where the acceptance probability of their path falls below `least`."""

    least = 0.0

    def begin(self, proposer: Proposer) -> None:
        super().begin(proposer)
        propose = proposer.propose

        def bounded(contexts: list[DraftContext], last: object, hidden: object) -> object:
            limits = [replace(context, min_acceptance=self.least, min_continuation=self.least) for context in contexts]
            return propose(limits, last, hidden)  # type: ignore[arg-type]

        self.proposer.propose = bounded  # type: ignore[method-assign, assignment]


def played(ops: Kernels, make: Make, folder: Path, least: float, temperature: float) -> tuple[Bounded, Request]:
    stage = Bounded(ops, sampled=True)
    stage.least = least
    stage.begin(make(stage, folder))
    stage.surprises = SURPRISES
    return stage, stage.request(tiny.prompt(9), seed=3, temperature=temperature, top_k=20)


def test_kernels_and_torch_operations_that_a_replay_would_miss_are_not_recorded() -> None:
    ops, logits, tokens = load("cpu"), torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32)
    assert ops.record(lambda _: ops.rms_norm(logits, logits[0], 1e-5)) is not None
    assert ops.record(lambda _: ops.top_logprobs(logits, tokens, 1)) is None
    assert ops.record(lambda _: logits.cosh()) is None


INTEGER_OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: a + b[:, None],
    "subtract": lambda a, b: a - b[:, None],
    "and": lambda a, b: (a >= 0) & (a <= b[:, None]),
    "floor_divide": lambda a, _: a // 3,
    "remainder": lambda a, _: (a + 1) % 3,
    "compare": lambda a, b: torch.where(a > 1, b[:, None], -1),
    "equal": lambda a, _: a == 2,
    "at least": lambda a, b: a >= b[:, None],
    "clamp": lambda a, _: a.clamp(min=-1).clamp(max=2),
    "masked_fill": lambda a, b: a.masked_fill(b[:, None] == 0, 7),
    "convert": lambda a, _: a.t().long(),
}


@pytest.mark.parametrize("name", INTEGER_OPERATIONS)
def test_a_replay_computes_integers_as_torch_does(name: str) -> None:
    ops, run, found = load("cpu"), INTEGER_OPERATIONS[name], []
    left, right = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    replay = ops.record(lambda _: found.append(run(left, right)))
    assert replay is not None
    left.copy_(torch.tensor([[-7, -3, -1, 0, 1], [2, 3, 4, 5, 6]]))
    right.copy_(torch.tensor([0, 3]))
    replay()
    assert found[0].dtype is run(left, right).dtype and torch.equal(found[0], run(left, right))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("least", [0.0, 1e-4, 0.5])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_replay_drafts_what_the_loop_drafts(
    name: str, least: float, temperature: float, ops: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    replayed, request = played(ops, DRAFTERS[name], tmp_path / "a", least, temperature)
    looped, other = played(ops, DRAFTERS[name], tmp_path / "b", least, temperature)
    monkeypatch.setattr(looped.proposer._recordings, "find", lambda *_: None)  # type: ignore[attr-defined]
    replays = []
    run = Recordings.run
    monkeypatch.setattr(Recordings, "run", lambda *arguments: replays.append(run(*arguments)) or replays[-1])
    for _ in range(STEPS):
        assert replayed.decode(request, width=3) == looped.decode(other, width=3)
        found, meant = replayed.draft_batch, looped.draft_batch
        assert found is not None and meant is not None
        assert found.lengths == meant.lengths and found.reached == meant.reached
        assert found.confidence is not None and meant.confidence is not None
        assert found.confidence[0] == pytest.approx(meant.confidence[0], rel=1e-5)
        for ours, theirs in zip(replayed.target.storages, looped.target.storages, strict=True):
            count = request.length
            assert torch.equal(entries(ours, request.pages, 1, count - 1), entries(theirs, other.pages, 1, count - 1))
    assert len([reached for reached in replays if reached >= 0]) >= STEPS // 2


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_first_call_of_a_drafter_is_recorded(name: str, ops: Kernels, tmp_path: Path) -> None:
    stage = Stage(ops)
    stage.begin(DRAFTERS[name](stage, tmp_path))
    request = stage.request(tiny.prompt(1))
    request.pages = [0]
    context = DraftContext(request, 0, 1, [5], 3, 0)  # as in the profile run of an adaptive engine
    hidden = torch.zeros(1, len(stage.proposer.needs.aux_layers) * stage.target.model.config.width)
    stage.proposer.propose([context], torch.tensor([5], dtype=torch.int32), hidden)
    assert stage.proposer._recordings.num_recorded == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", DRAFTERS)
def test_calls_say_whether_they_were_recorded_and_where_drafting_stopped(
    name: str, ops: Kernels, tmp_path: Path
) -> None:
    """The latency of a draft is learned from replays alone; a block takes the same time wherever its draft ends."""
    stage, request = played(ops, DRAFTERS[name], tmp_path, least=1.1, temperature=0.0)
    recordings, recorded, depths = stage.proposer._recordings, [], set()  # type: ignore[attr-defined]
    for _ in range(STEPS):
        before = recordings.num_made
        stage.decode(request, width=3)
        assert stage.draft_batch is not None
        recorded.append((stage.draft_batch.recorded, recordings.num_made > before))
        depths.add(stage.draft_batch.reached)
    assert {said for said, _ in recorded} == {True, False} and all(said == made for said, made in recorded)
    assert depths == ({None} if isinstance(stage.proposer, BlockDrafter) else {1})


@pytest.mark.parametrize("plan", [tiny_blocks.Plan(), tiny_blocks.Plan(method="dspark", draft_vocabulary=None)])
@pytest.mark.parametrize("least", [0.0, 0.05])
def test_a_tree_by_replay_is_that_of_the_loop(
    plan: tiny_blocks.Plan, least: float, ops: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(stage: Stage, folder: Path) -> Proposer:
        module = find(plan.method)
        options = module.Options(model=tiny_blocks.write(plan, folder)["model"], width=9, branches=3)
        return module.build(options, stage.target)

    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    replayed, request = played(ops, make, tmp_path / "a", least, 0.0)
    looped, other = played(ops, make, tmp_path / "b", least, 0.0)
    monkeypatch.setattr(looped.proposer, "_replay_tree", lambda *_: False)
    for _ in range(STEPS):
        assert replayed.decode(request, width=9) == looped.decode(other, width=9)
        found, meant = replayed.draft_batch, looped.draft_batch
        assert found is not None and meant is not None
        assert (found.tokens, found.parents, found.lengths) == (meant.tokens, meant.parents, meant.lengths)
        assert found.confidence is not None and meant.confidence is not None
        assert found.confidence[0] == pytest.approx(meant.confidence[0], rel=1e-5)
    assert replayed.proposer._recordings.num_recorded > looped.proposer._recordings.num_recorded  # type: ignore[attr-defined]


def test_a_function_that_is_recorded_runs_once() -> None:
    pages = Pages(1, 1, 16, 8, "float32")
    recordings, total, one = Recordings(load("cpu"), pages), torch.zeros(1, 4), torch.ones(1, 4)

    def add(_: object) -> None:
        total.add_(one)

    def build() -> Recorded:
        return Recorded(add, HOST.buffer(1, torch.int32))

    assert recordings.find("shape", build) is None
    for times in (1, 2, 3):
        found = recordings.find("shape", build)
        assert found is not None and recordings.run(found) == 0
        assert total.tolist() == [[times] * 4]
    assert recordings.num_recorded == 1
