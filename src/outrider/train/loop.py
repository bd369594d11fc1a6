"""The training loop: in each step one forward pass of the target, from which every draft head learns.

The host waits for the device only when metrics are logged. A step depends only on the seed, its number and the
parameters, so an interrupted run resumes bit-identically (on the CPU; on a GPU as far as its kernels allow).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from .data.pack import Pack
from .heads.base import DraftHead, StepResult
from .optimizer import Optimizer, Recipe
from .progress import HeadMetrics, MetricSums, ProgressEvent, fetch_metrics
from .target import TargetOutputs

EARLY = (3, 6, 12)  # steps that are logged beside the regular ones, so that the speed is known soon
WARM_UP_STEPS = 3  # steps before speed is measured: the first ones compile kernels and allocate memory
ASSUMED_STEPS = 2500  # length of a run whose speed is not known yet; sets the slope of its learning-rate warm-up


class TargetForward(Protocol):
    def forward(self, pack: Pack, aux_layers: Sequence[int]) -> TargetOutputs: ...


@dataclass(frozen=True)
class Limits:
    """The end of a run: the first limit that is reached."""

    steps: int | None = None
    seconds: float | None = None  # of training, including the sessions before an interruption


@dataclass(frozen=True)
class Cadence:
    log_every: int = 20  # steps
    evaluate_every: int = 500  # steps
    save_every: float = 120.0  # seconds


class Schedule:
    """The number of steps of a run. If seconds limit the run, it is estimated from the measured speed."""

    def __init__(self, limits: Limits, steps: int | None = None) -> None:
        self.limits = limits
        self.steps = steps if limits.steps is None else limits.steps
        self._first: tuple[int, float] | None = None  # a step after the warm-up, and the seconds when it was done

    def update(self, step: int, seconds: float) -> None:
        """Estimate the number of steps again."""
        if self.limits.seconds is None:
            return
        if self._first is None:
            self._first = (step, seconds) if step >= WARM_UP_STEPS else None
            return
        first, since = self._first
        if step > first:
            left = max(self.limits.seconds - seconds, 0.0) * (step - first) / max(seconds - since, 1e-9)
            estimate = step + max(int(left), 1)
            self.steps = estimate if self.limits.steps is None else min(estimate, self.limits.steps)

    def ended(self, step: int, seconds: float) -> bool:
        done = self.limits.steps is not None and step >= self.limits.steps
        return done or (self.limits.seconds is not None and seconds >= self.limits.seconds)

    def factor(self, recipe: Recipe, step: int) -> float:
        return recipe.factor(step, self.steps or ASSUMED_STEPS)


class TrainLoop:
    def __init__(
        self,
        target_model: TargetForward,
        draft_heads: Mapping[str, DraftHead],
        recipes: Mapping[str, Recipe],
        limits: Limits,
        seed: int = 0,
        cadence: Cadence | None = None,
    ) -> None:
        self.target_model, self.draft_heads, self.seed = target_model, draft_heads, seed
        self.cadence = cadence or Cadence()
        self.optimizers = {name: Optimizer(head, recipes[name]) for name, head in draft_heads.items()}
        self.aux_layers = tuple(sorted({layer for head in draft_heads.values() for layer in head.aux_layers}))
        self.schedule = Schedule(limits)
        self.sums = {name: MetricSums() for name in draft_heads}
        self.step = self.tokens = 0
        self._uncounted: list[Tensor] = []  # token counts of the steps since the last event, on the device
        self._earlier_seconds = 0.0  # of earlier sessions
        self._started = time.perf_counter()
        self._last = (0.0, 0)  # seconds and tokens at the last event

    @property
    def seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._started

    def run(
        self,
        packs: Iterable[Pack],
        held_out: Sequence[Pack],
        report: Callable[[ProgressEvent], None],
        save: Callable[[dict[str, Any]], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train until a limit is reached (True) or `stop` returns true (False). `packs` start with that of `step`."""
        self._started, saved = time.perf_counter(), time.perf_counter()
        self._last = (self.seconds, self.tokens)
        source = iter(packs)
        while not self.schedule.ended(self.step, self.seconds):
            self.train_step(next(source))
            if self.step % self.cadence.log_every == 0 or self.step in EARLY:
                report(self.event())
                self.schedule.update(self.step, self.seconds)
            if held_out and self.step % self.cadence.evaluate_every == 0:
                report(self.evaluate(held_out))
            stopped = stop()
            if stopped or time.perf_counter() - saved >= self.cadence.save_every:
                self._report_rest(report)
                save(self.state())
                saved = time.perf_counter()
            if stopped:
                return False
        self._report_rest(report)
        if held_out:
            report(self.evaluate(held_out))
        save(self.state())
        return True

    def train_step(self, pack: Pack) -> None:
        """Run one step of all heads."""
        seed_for(self.seed, self.step)
        target_outputs = self._target_outputs(pack)
        for name, head in self.draft_heads.items():
            optimizer = self.optimizers[name]
            with autocast(target_outputs.last_state.device):
                result: StepResult = head(target_outputs)
            result.loss.backward()  # type: ignore[no-untyped-call]
            norm, finite = optimizer.step(self.schedule.factor(optimizer.recipe, self.step))
            self.sums[name].add(result, norm, finite)
        self._uncounted.append((target_outputs.pack.documents >= 0).sum())
        self.step += 1

    @torch.no_grad()
    def _target_outputs(self, pack: Pack) -> TargetOutputs:
        return self.target_model.forward(pack, self.aux_layers)

    @torch.no_grad()
    def evaluate(self, held_out: Sequence[Pack]) -> ProgressEvent:
        """Measure all heads on the same packs with the same noise each time, so that events can be compared."""
        sums = {name: MetricSums() for name in self.draft_heads}
        for number, pack in enumerate(held_out):
            seed_for(self.seed, -1 - number)
            target_outputs = self._target_outputs(pack)
            no_gradient = torch.zeros((), device=target_outputs.last_state.device)
            for name, head in self.draft_heads.items():
                head.eval()
                with autocast(target_outputs.last_state.device):
                    result: StepResult = head(target_outputs)
                head.train()
                sums[name].add(result, no_gradient, result.loss.isfinite())
        return self._event("held out", fetch_metrics(sums), 0.0)

    def event(self) -> ProgressEvent:
        """Return the metrics since the last event. The host waits for the device here."""
        metrics = fetch_metrics(self.sums)
        if self._uncounted:
            self.tokens += int(torch.stack(self._uncounted).sum())
            self._uncounted.clear()
        since, before = self._last
        self._last = (self.seconds, self.tokens)
        return self._event("train", metrics, (self.tokens - before) / max(self.seconds - since, 1e-9))

    def _report_rest(self, report: Callable[[ProgressEvent], None]) -> None:
        """Report steps since the last event, so that none is missing from the log if the process ends."""
        if self._uncounted:
            report(self.event())

    def _event(
        self, kind: Literal["train", "held out"], metrics: Mapping[str, HeadMetrics], tokens_per_second: float
    ) -> ProgressEvent:
        rates = {
            name: optimizer.recipe.learning_rate * self.schedule.factor(optimizer.recipe, max(self.step - 1, 0))
            for name, optimizer in self.optimizers.items()
        }
        steps = self.schedule.steps
        return ProgressEvent(kind, self.step, steps, self.seconds, self.tokens, tokens_per_second, rates, metrics)

    def state(self) -> dict[str, Any]:
        """Return the state to resume from, as saved in state.pt. The keys are a file format."""
        return {
            "step": self.step,
            "steps": self.schedule.steps,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "students": {name: trained(head) for name, head in self.draft_heads.items()},
            "words": {name: head.draft_ids for name, head in self.draft_heads.items()},
            "optimisers": {name: optimizer.state() for name, optimizer in self.optimizers.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.step, self.tokens, self._earlier_seconds = state["step"], state["tokens"], state["seconds"]
        self.schedule = Schedule(self.schedule.limits, state["steps"])
        for name, head in self.draft_heads.items():
            missing = head.load_state_dict(state["students"][name], strict=False).missing_keys
            assert not set(missing) & trained(head).keys(), f"the state of `{name}` lacks {missing}"
            self.optimizers[name].load(state["optimisers"][name])


def trained(draft_head: DraftHead) -> dict[str, Tensor]:
    """Return the tensors that training changes. Frozen ones are the target's and are taken from it again."""
    frozen = {name for name, parameter in draft_head.named_parameters() if not parameter.requires_grad}
    return {name: value for name, value in draft_head.state_dict().items() if name not in frozen}


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Run matmuls in bf16 on CUDA."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def seed_for(seed: int, step: int) -> None:
    """Seed torch for one step, so that its noise does not depend on the steps before it."""
    torch.manual_seed((seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) % 2**63)
