"""The training loop on toy heads: optimizers, schedule, metrics, and resuming after an interruption."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.errors import UserError
from outrider.train.data.pack import Pack
from outrider.train.heads.base import DraftHead, StepResult
from outrider.train.io import checkpoints
from outrider.train.loop import Cadence, Limits, Schedule, TrainLoop
from outrider.train.optimizer import Muon, Optimizer, Recipe, is_map, orthogonal
from outrider.train.progress import MetricSums, ProgressEvent, TrainLog, curve, fetch_metrics
from outrider.train.target import TargetOutputs

VOCABULARY, WIDTH, DEPTHS = 11, 6, 3


class Toy(DraftHead):
    """Predict the next tokens from a state, with noise as in heads that sample positions."""

    def __init__(self, method: str, aux_layers: tuple[int, ...], seed: int, noise: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.method, self.aux_layers, self.noise = method, aux_layers, noise
        self.mix = nn.Linear(WIDTH * len(aux_layers), WIDTH)
        self.heads = nn.Parameter(torch.randn(DEPTHS, VOCABULARY, WIDTH) * 0.1)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.spoilt: set[int] = set()  # calls whose loss is no number
        self.calls = 0

    @property
    def draft_ids(self) -> None:
        return None

    def forward(self, outputs: TargetOutputs) -> StepResult:
        states = torch.cat([outputs.aux_states[aux_layer] for aux_layer in self.aux_layers], -1)
        mixed = self.mix(states) * self.frozen
        mixed = mixed + torch.randn_like(mixed) * self.noise
        logits = torch.einsum("ble,kve->kblv", mixed, self.heads)[:, :, : -DEPTHS - 1]  # [K, B, L - K - 1, V]
        length = logits.shape[2]
        wanted = torch.stack([outputs.logits[:, k : k + length] for k in range(DEPTHS)])
        probs = wanted.softmax(-1)
        loss = functional.kl_div(logits.log_softmax(-1), probs, reduction="batchmean")
        self.calls += self.training
        if self.training and self.calls in self.spoilt:
            loss = loss * math.nan
        counted = torch.full((DEPTHS,), float(logits[0, ..., 0].numel()))
        correct = (logits.argmax(-1) == wanted.argmax(-1)).sum((1, 2)).float()
        overlap = torch.minimum(probs, logits.softmax(-1)).sum((1, 2, 3))
        return StepResult(loss, counted, correct, overlap.detach())

    def checkpoint_config(self) -> dict[str, object]:
        return {}


class TargetModel:
    """Return fixed states for each token, of the given aux layers only."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.table = torch.randn(3, VOCABULARY, WIDTH, generator=generator)
        self.head = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.asked: list[tuple[int, ...]] = []

    def forward(self, pack: Pack, aux_layers: Sequence[int]) -> TargetOutputs:
        assert not torch.is_grad_enabled()
        self.asked.append(tuple(aux_layers))
        states = {aux_layer: self.table[aux_layer][pack.tokens] for aux_layer in aux_layers}
        last = self.table[2][pack.tokens]
        return TargetOutputs(pack, states, last, 3 * last @ self.head.T)


def pack_of(step: int) -> Pack:
    tokens = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(step))
    positions = torch.arange(12).expand(2, 12)
    documents = torch.zeros(2, 12, dtype=torch.int64)
    documents[1, 9:] = -1
    return Pack(tokens, positions, documents, positions > 2)


HELD_OUT = [pack_of(-1), pack_of(-2)]
CADENCE = Cadence(log_every=4, evaluate_every=10, save_every=math.inf)


def draft_heads() -> dict[str, DraftHead]:
    return {"one": Toy("one", (0, 1), 1), "two": Toy("two", (1, 2), 2)}


def loop(steps: int = 30, cadence: Cadence = CADENCE, optimizer: Any = "adamw", **given: Any) -> TrainLoop:
    chosen = given.pop("draft_heads", None) or draft_heads()
    recipes = {name: Recipe(1e-2, optimizer) for name in chosen}
    return TrainLoop(TargetModel(), chosen, recipes, Limits(steps), seed=5, cadence=cadence, **given)


def run(made: TrainLoop, **given: Any) -> tuple[list[ProgressEvent], list[dict[str, Any]], bool]:
    events: list[ProgressEvent] = []
    kept: list[dict[str, Any]] = []
    packs = (pack_of(step) for step in itertools.count(made.step))
    ended = made.run(packs, HELD_OUT, events.append, kept.append, **given)
    return events, kept, ended


def values(made: TrainLoop) -> list[Tensor]:
    return [value.clone() for draft_head in made.draft_heads.values() for value in draft_head.state_dict().values()]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_several_heads_train_in_one_loop(optimizer: str) -> None:
    made = loop(60, optimizer=optimizer)
    events, kept, ended = run(made)
    assert ended and made.step == 60 and len(kept) == 1
    held = [moment for moment in events if moment.kind == "held out"]
    assert [moment.step for moment in held] == [*range(10, 61, 10), 60]
    for name in ("one", "two"):
        first, last = held[0].metrics[name], held[-1].metrics[name]
        assert last.loss < first.loss * 0.9
        assert last.acceptance[0] > first.acceptance[0] + 0.05
        assert last.length > first.length
        assert len(last.acceptance) == len(last.overlap) == DEPTHS


def test_the_target_runs_once_a_step_with_all_aux_layers() -> None:
    made = loop(4, Cadence(log_every=100, evaluate_every=100))
    run(made)
    assert made.target_model.asked == [(0, 1, 2)] * (4 + len(HELD_OUT))  # type: ignore[attr-defined]


def test_heads_do_not_affect_each_other() -> None:
    """Without noise, a head trains to the same bits alone and beside another."""
    quiet = {"two": Toy("two", (1, 2), 2, noise=0.0), "one": Toy("one", (0, 1), 1, noise=0.0)}
    alone, both = loop(12, draft_heads={"one": Toy("one", (0, 1), 1, noise=0.0)}), loop(12, draft_heads=quiet)
    run(alone)
    run(both)
    assert same(
        list(alone.draft_heads["one"].state_dict().values()), list(both.draft_heads["one"].state_dict().values())
    )


def test_matrices_have_a_rate_of_their_own() -> None:
    """Of Muon's step, which has one size whatever the gradient; all else moves as ever."""

    def moved(recipe: Recipe) -> list[Tensor]:
        module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        generator = torch.Generator().manual_seed(0)
        for parameter in module.parameters():
            parameter.data.zero_()
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        Optimizer(module, recipe).step(1.0)
        return [parameter.detach() for parameter in module.parameters()]

    matrix, *rest = moved(Recipe(1e-2, "muon"))
    faster, *same = moved(Recipe(1e-2, "muon", matrix_rate=3e-2))
    torch.testing.assert_close(faster, 3 * matrix)
    torch.testing.assert_close(same, rest)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, optimizer: str) -> None:
    whole = loop(optimizer=optimizer)
    begun = values(whole)
    events, _, _ = run(whole)
    cut = random.Random(optimizer).randrange(1, 29)
    first = loop(optimizer=optimizer)
    early, kept, ended = run(first, stop=lambda: first.step == cut)
    assert not ended and first.step == cut and len(kept) == 1
    checkpoints.save(tmp_path, kept[0])
    second = loop(optimizer=optimizer)
    state = checkpoints.load(tmp_path, torch.device("cpu"))
    assert state is not None
    second.load(state)
    late, _, ended = run(second)
    assert ended and same(values(whole), values(second)) and not same(values(whole), begun)
    assert early[-1].step == cut and late[-1].tokens == events[-1].tokens == 30 * 21
    assert late[-1].seconds > early[-1].seconds
    assert late[-1].metrics == events[-1].metrics


def test_without_optimizer_state_the_bits_differ() -> None:
    """The law above can fail."""
    whole, first, second = loop(), loop(), loop()
    run(whole)
    _, kept, _ = run(first, stop=lambda: first.step == 9)
    fresh = {name: one.state() for name, one in second.optimizers.items()}
    second.load({**kept[0], "optimisers": fresh})
    run(second)
    assert not same(values(whole), values(second))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_without_finite_gradients_changes_nothing(optimizer: str) -> None:
    made = loop(6, Cadence(log_every=100), optimizer=optimizer)
    spoilt = made.draft_heads["one"]
    assert isinstance(spoilt, Toy)
    spoilt.spoilt = {3}
    for step in range(6):
        before = [value.clone() for value in spoilt.state_dict().values()]
        states = states_of(made.optimizers["one"])
        made.train_step(pack_of(step))
        assert same(before, list(spoilt.state_dict().values())) is (step == 2)
        assert same(states, states_of(made.optimizers["one"])) is (step == 2)
    figures = made.event().metrics
    assert (figures["one"].skipped, figures["two"].skipped) == (1, 0)
    assert math.isfinite(figures["one"].loss) and math.isfinite(figures["one"].gradient)
    assert all(value.isfinite().all() for value in values(made))


def states_of(optimizer: Optimizer) -> list[Tensor]:
    found = [] if optimizer.muon is None else list(optimizer.muon.momenta)
    if optimizer.adamw is not None:
        found += [
            optimizer.adamw.state.get(one, {}).get(key, torch.zeros(()))
            for one in optimizer.parameters
            for key in ("exp_avg", "exp_avg_sq", "step")
        ]
    return [one.clone() for one in found]


def test_gradients_are_clipped_together() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = Optimizer(module, Recipe(clip=0.5))
    seen: list[Tensor] = []
    assert optimizer.adamw is not None
    optimizer.adamw.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([one.grad.flatten() for one in module.parameters() if one.grad is not None]))
    )
    module(torch.full((1, 3), 100.0)).pow(2).sum().backward()
    before = torch.cat([one.grad.flatten() for one in module.parameters() if one.grad is not None]).norm()
    norm, finite = optimizer.step(1.0)
    assert finite and norm == pytest.approx(float(before)) and seen[0].norm() == pytest.approx(0.5, rel=1e-4)
    assert all(one.grad is None for one in module.parameters())


def test_the_rate_rises_and_falls() -> None:
    recipe = Recipe(warm_up=0.1, floor=0.2)
    factors = [recipe.factor(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[9:] == sorted(factors[9:], reverse=True)
    assert factors[54] == pytest.approx(0.6) and factors[99] == pytest.approx(0.2)
    assert recipe.factor(500, 100) == pytest.approx(0.2)
    assert Recipe().factor(0, 1) == 1.0


def test_muon_makes_singular_values_equal_and_leaves_tables_alone() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(2, 8, 20) * torch.logspace(0, -2, 8)[:, None]
    for one in (matrices, matrices.mT):
        found = torch.linalg.svdvals(orthogonal(one))
        assert found.min() > 0.6 and found.max() < 1.2
    assert is_map(torch.zeros(64, 192)) and not is_map(torch.zeros(1000, 64)) and not is_map(torch.zeros(64))
    left, right = (nn.Parameter(torch.zeros(4, 4)) for _ in range(2))
    left.grad = right.grad = torch.eye(4)
    Muon([left, right]).step(1.0, torch.tensor(True))
    assert torch.equal(left, right) and left.diag().max() < 0 and left.triu(1).abs().max() < 1e-3


def test_the_number_of_steps_is_estimated_from_the_time_limit() -> None:
    schedule = Schedule(Limits(seconds=100.0))
    for step, seconds in ((1, 30.0), (3, 32.0), (13, 42.0)):
        assert schedule.steps is None and not schedule.ended(step, seconds)
        schedule.update(step, seconds)
    assert schedule.steps == 13 + 58  # a step a second, the first aside
    schedule.update(33, 52.0)
    assert schedule.steps == 33 + 72  # it went faster since
    assert schedule.ended(90, 100.0)
    assert Schedule(Limits(50, 100.0)).steps == 50
    both = Schedule(Limits(50, 100.0))
    both.update(3, 40.0)
    both.update(4, 50.0)
    assert both.steps == 4 + 5
    assert both.ended(50, 1.0) and both.ended(3, 100.0)


def test_a_run_ends_when_its_time_is_over() -> None:
    made = loop()
    made.schedule = Schedule(Limits(seconds=0.3))
    events, kept, ended = run(made)
    assert ended and kept[0]["seconds"] >= 0.3 and made.step > 3
    assert events[-1].steps is not None
    again = loop()
    again.schedule = Schedule(Limits(seconds=0.3))
    again.load(kept[0])
    run(again)
    assert again.step == made.step  # its time was over already


def test_state_is_saved_at_intervals() -> None:
    _, kept, _ = run(loop(5, Cadence(save_every=0.0)))
    assert [state["step"] for state in kept] == [1, 2, 3, 4, 5, 5]
    assert all("frozen" not in state["students"]["one"] for state in kept)


def test_a_full_disk_keeps_the_saved_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(tmp_path, {"step": 3})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(tmp_path, {"step": 4})
    assert checkpoints.load(tmp_path, torch.device("cpu")) == {"step": 3}
    assert [file.name for file in tmp_path.iterdir()] == [checkpoints.STATE]


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    assert checkpoints.load(tmp_path, torch.device("cpu")) is None
    checkpoints.save(tmp_path, {"step": 3})
    file = tmp_path / checkpoints.STATE
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"state\.pt` is damaged"):
        checkpoints.load(tmp_path, torch.device("cpu"))


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    settings = {"model": "a", "methods": {"eagle3": {"aux_layers": (1, 2)}}, "seed": 0}
    checkpoints.agree(tmp_path, settings)
    checkpoints.agree(tmp_path, settings)
    with pytest.raises(UserError) as refused:
        checkpoints.agree(tmp_path, {"model": "b", "methods": {"eagle3": {"aux_layers": (1, 3)}, "mtp": {}}, "seed": 0})
    for words in (
        "`model` was `a` and is `b`",
        "`methods.eagle3.aux_layers` was `[1, 2]` and is `[1, 3]`",
        "`methods.mtp`",
    ):
        assert words in str(refused.value)
    assert "seed" not in str(refused.value)


def test_a_resumed_log_has_no_duplicate_steps(tmp_path: Path) -> None:
    log = TrainLog(tmp_path / "log.jsonl", 0)
    for step in (4, 8, 12):
        log.add({"step": step})
    (tmp_path / "log.jsonl").write_text((tmp_path / "log.jsonl").read_text() + '{"step": 1')
    assert [line["step"] for line in TrainLog(tmp_path / "log.jsonl", 8).lines()] == [4, 8]
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [4, 8]
    many = curve([{"step": step} for step in range(1000)], 40)
    assert (len(many), many[0]["step"], many[-1]["step"]) == (40, 0, 999)


def test_metrics_are_means_by_depth() -> None:
    sums = {"a": MetricSums(), "b": MetricSums()}
    half, yes = torch.tensor(0.5), torch.tensor(True)
    for loss, counted in ((1.0, [8.0, 4.0]), (3.0, [8.0, 0.0])):
        report = StepResult(
            torch.tensor(loss), torch.tensor(counted), torch.tensor([4.0, 1.0]), torch.tensor([6.0, 2.0])
        )
        sums["a"].add(report, half, yes)
    found = fetch_metrics(sums)
    assert list(found) == ["a"] and fetch_metrics(sums) == {}
    assert found["a"].loss == 2.0 and found["a"].gradient == 0.5
    assert found["a"].acceptance == (0.5, 0.5) and found["a"].overlap == (0.75, 1.0)
    assert found["a"].length == 1 + 0.5 + 0.25


def test_evaluation_uses_the_same_noise_each_time() -> None:
    made = loop(2)
    assert made.evaluate(HELD_OUT).metrics == made.evaluate(HELD_OUT).metrics
    made.train_step(pack_of(0))
    assert made.evaluate(HELD_OUT).metrics != loop(2).evaluate(HELD_OUT).metrics
