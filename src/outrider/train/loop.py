"""The loop: one lesson of the target a step, and every student learns from it.

The host waits for the device only where figures are logged. What a step does depends on the seed, its number and the
parameters alone, so a run that was cut goes on to the same bits (on the CPU; on a GPU as far as its kernels allow).
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
from .heads.base import Report, Student
from .metrics import Figures, Sums, fetch
from .optimizer import Optimiser, Recipe
from .target import Lesson

EARLY = (3, 6, 12)  # steps that are logged beside the regular ones, so that the pace is known soon
SETTLED = 3  # steps after which the first has compiled and found its memory
GUESSED = 2500  # steps of a run whose pace is not known yet: its rate rises as slowly


class Teaches(Protocol):
    def teach(self, pack: Pack, taps: Sequence[int]) -> Lesson: ...


@dataclass(frozen=True)
class Limits:
    """Where a run ends: at the first of them."""

    steps: int | None = None
    seconds: float | None = None  # of training, those before an interruption included


@dataclass(frozen=True)
class Cadence:
    log_every: int = 20  # steps
    evaluate_every: int = 500  # steps
    save_every: float = 120.0  # seconds


@dataclass(frozen=True)
class Moment:
    """What is told while a run goes on."""

    kind: Literal["train", "held out"]
    step: int
    steps: int | None  # that are planned; None: not known yet
    seconds: float
    tokens: int  # seen so far, each as often as it came
    pace: float  # tokens a second since the last time
    rates: Mapping[str, float]  # by student
    figures: Mapping[str, Figures]


class Schedule:
    """How many steps a run has. Where time ends it, they follow from the pace, which is measured all along."""

    def __init__(self, limits: Limits, steps: int | None = None) -> None:
        self.limits = limits
        self.steps = steps if limits.steps is None else limits.steps
        self._settled: tuple[int, float] | None = None  # a step, and when it was done

    def learn(self, step: int, seconds: float) -> None:
        if self.limits.seconds is None:
            return
        if self._settled is None:
            self._settled = (step, seconds) if step >= SETTLED else None
            return
        first, since = self._settled
        if step > first:
            left = max(self.limits.seconds - seconds, 0.0) * (step - first) / max(seconds - since, 1e-9)
            estimate = step + max(int(left), 1)
            self.steps = estimate if self.limits.steps is None else min(estimate, self.limits.steps)

    def ended(self, step: int, seconds: float) -> bool:
        done = self.limits.steps is not None and step >= self.limits.steps
        return done or (self.limits.seconds is not None and seconds >= self.limits.seconds)

    def factor(self, recipe: Recipe, step: int) -> float:
        return recipe.factor(step, self.steps or GUESSED)


class Loop:
    def __init__(
        self,
        teacher: Teaches,
        students: Mapping[str, Student],
        recipes: Mapping[str, Recipe],
        limits: Limits,
        seed: int = 0,
        cadence: Cadence | None = None,
    ) -> None:
        self.teacher, self.students, self.seed = teacher, students, seed
        self.cadence = cadence or Cadence()
        self.optimisers = {name: Optimiser(student, recipes[name]) for name, student in students.items()}
        self.taps = tuple(sorted({tap for student in students.values() for tap in student.taps}))
        self.schedule = Schedule(limits)
        self.sums = {name: Sums() for name in students}
        self.step = self.tokens = 0
        self._fresh: list[Tensor] = []  # tokens of the steps since they were last counted
        self._before = 0.0  # seconds of earlier sessions
        self._begun = time.perf_counter()
        self._last = (0.0, 0)  # seconds and tokens when it was last logged

    @property
    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._begun

    def run(
        self,
        packs: Iterable[Pack],
        held_out: Sequence[Pack],
        watch: Callable[[Moment], None],
        keep: Callable[[dict[str, Any]], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Whether it came to its end; else `stop` said so. `packs` begin with that of `self.step`."""
        self._begun, kept = time.perf_counter(), time.perf_counter()
        self._last = (self.seconds, self.tokens)
        source = iter(packs)
        while not self.schedule.ended(self.step, self.seconds):
            self.take(next(source))
            if self.step % self.cadence.log_every == 0 or self.step in EARLY:
                watch(self.moment())
                self.schedule.learn(self.step, self.seconds)
            if held_out and self.step % self.cadence.evaluate_every == 0:
                watch(self.evaluate(held_out))
            asked = stop()
            if asked or time.perf_counter() - kept >= self.cadence.save_every:
                self._log(watch)
                keep(self.state())
                kept = time.perf_counter()
            if asked:
                return False
        self._log(watch)
        if held_out:
            watch(self.evaluate(held_out))
        keep(self.state())
        return True

    def take(self, pack: Pack) -> None:
        """One step of all students."""
        seed_for(self.seed, self.step)
        lesson = self.teach(pack)
        for name, student in self.students.items():
            optimiser = self.optimisers[name]
            with half(lesson.last.device):
                report: Report = student(lesson)
            report.loss.backward()  # type: ignore[no-untyped-call]
            norm, finite = optimiser.step(self.schedule.factor(optimiser.recipe, self.step))
            self.sums[name].add(report, norm, finite)
        self._fresh.append((lesson.pack.documents >= 0).sum())
        self.step += 1

    @torch.no_grad()
    def teach(self, pack: Pack) -> Lesson:
        return self.teacher.teach(pack, self.taps)

    @torch.no_grad()
    def evaluate(self, held_out: Sequence[Pack]) -> Moment:
        """The same packs with the same noise each time, so that figures of two moments can be compared."""
        sums = {name: Sums() for name in self.students}
        for number, pack in enumerate(held_out):
            seed_for(self.seed, -1 - number)
            lesson = self.teach(pack)
            nothing = torch.zeros((), device=lesson.last.device)
            for name, student in self.students.items():
                student.eval()
                with half(lesson.last.device):
                    report: Report = student(lesson)
                student.train()
                sums[name].add(report, nothing, report.loss.isfinite())
        return self._moment("held out", fetch(sums), 0.0)

    def moment(self) -> Moment:
        """The figures since the last time. The host waits for the device here."""
        figures = fetch(self.sums)
        if self._fresh:
            self.tokens += int(torch.stack(self._fresh).sum())
            self._fresh.clear()
        since, before = self._last
        self._last = (self.seconds, self.tokens)
        return self._moment("train", figures, (self.tokens - before) / max(self.seconds - since, 1e-9))

    def _log(self, watch: Callable[[Moment], None]) -> None:
        """So that nothing that was summed is lost with this process."""
        if self._fresh:
            watch(self.moment())

    def _moment(self, kind: Literal["train", "held out"], figures: Mapping[str, Figures], pace: float) -> Moment:
        rates = {
            name: one.recipe.learning_rate * self.schedule.factor(one.recipe, max(self.step - 1, 0))
            for name, one in self.optimisers.items()
        }
        return Moment(kind, self.step, self.schedule.steps, self.seconds, self.tokens, pace, rates, figures)

    def state(self) -> dict[str, Any]:
        """All that a later session needs to go on; nothing in it is waiting to be counted."""
        return {
            "step": self.step,
            "steps": self.schedule.steps,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "students": {name: trained(student) for name, student in self.students.items()},
            "words": {name: student.drafted for name, student in self.students.items()},
            "optimisers": {name: optimiser.state() for name, optimiser in self.optimisers.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.step, self.tokens, self._before = state["step"], state["tokens"], state["seconds"]
        self.schedule = Schedule(self.schedule.limits, state["steps"])
        for name, student in self.students.items():
            missing = student.load_state_dict(state["students"][name], strict=False).missing_keys
            assert not set(missing) & trained(student).keys(), f"the state of `{name}` lacks {missing}"
            self.optimisers[name].load(state["optimisers"][name])


def trained(student: Student) -> dict[str, Tensor]:
    """What training changes: frozen parts are the target's, and come from there again."""
    frozen = {name for name, parameter in student.named_parameters() if not parameter.requires_grad}
    return {name: value for name, value in student.state_dict().items() if name not in frozen}


def half(place: torch.device) -> AbstractContextManager[Any]:
    """Products in bf16 where the device is fast at it."""
    return torch.autocast("cuda", torch.bfloat16) if place.type == "cuda" else nullcontext()


def seed_for(seed: int, step: int) -> None:
    """Noise of its own for each step, whatever was drawn before it."""
    torch.manual_seed((seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) % 2**63)
