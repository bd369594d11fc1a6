"""Plan multi-step runs: the drafter, the number of draft tokens and of steps; and learn from their results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from statistics import median
from typing import Any, cast

from ..device import Fence
from ..device.graphs import padded
from ..request import Request, Row, RowResult
from ..speculation.drafters.lookup import LookupDrafter, LookupSteps
from ..speculation.manager import SpeculationManager
from ..types import DecodeStep, Draft, FinishReason
from .progress import UnverifiedDrafts
from .state import DecodeState, HostSteps, MultiStepDrafter, StepDrafter

WIDTHS = (1, 2, 3, 7, 15, 31)  # tokens drafted in a run, beside a method's maximum: each has CUDA graphs of its own
MIN_STEPS = 2  # decode steps of a run, at least
MAX_SECONDS = 0.25  # of a run, at most: new requests wait until its end
HOST_RATE = 0.2  # weight of a new measurement of the host's time
TEXT_DECAY = 0.97  # of the statistics of text lengths, a run
MAX_READ = 1024  # tokens of a prompt that the host reads beside steps without drafts, at most: they take it about 1 ms
MIN_STOPPED = 0.01  # texts that ended by themselves, at least: none may have for long


def run_widths(most: int) -> list[int]:
    """Return the widths that runs of a method with at most `most` draft tokens may have."""
    return [0, *(width for width in WIDTHS if width < most), most]


class RunPlanner:
    def __init__(self, spec_manager: SpeculationManager, is_idle: bool = False) -> None:
        """is_idle: the host has nothing to compute while the device runs queued steps."""
        self.spec_manager, self.plan, self.controller = spec_manager, spec_manager.plan, spec_manager.controller
        self.is_idle = is_idle

    def ready(self, name: str, requests: Sequence[Request]) -> bool:
        """Return whether no drafter has to catch up with its requests."""
        return not name or (self.spec_manager.can_multi_step(name) and self.drafter(name).ready(requests))

    def aux_layers(self, name: str) -> tuple[int, ...]:
        return self.spec_manager.drafter(name).needs.aux_layers if name else ()

    def bind(self, name: str, state: DecodeState) -> StepDrafter | HostSteps | None:
        return self.drafter(name).bind(state) if name else None

    def width(self, name: str, requests: Sequence[Request], others: int = 0, decode_steps: int = 1) -> int:
        """Return how many tokens all requests draft in each step of the next run. others: requests beside these."""
        if not name:
            return 0
        needs, batch_size = self.spec_manager.methods[name].needs, len(requests)
        most = self.plan.width(batch_size) if self.plan.widths else needs.width
        longest = self.plan.max_context
        limits = [
            0 if longest is not None and request.length >= longest else min(request.width, most) for request in requests
        ]
        if not all(map(self.spec_manager.adapts, requests)):
            return max(limits)
        readable = self.readable(name, requests)
        return self.controller.plan_uniform(requests, limits, run_widths(max(limits)), others, decode_steps, readable)

    def readable(self, name: str, requests: Sequence[Request]) -> set[Request]:
        """Return the requests of which steps without drafts tell what drafts would be worth."""
        if not (self.is_idle and isinstance(self.spec_manager.drafter(name), LookupDrafter)):
            return set()
        return {request for request in requests if len(request.prompt) <= MAX_READ}

    def unverified(self, name: str, requests: Sequence[Request]) -> UnverifiedDrafts | None:
        """Return what learns from a run without drafts, if the method is a lookup."""
        readable = self.readable(name, requests)
        if not readable:
            return None
        drafter = cast(LookupDrafter[Any], self.spec_manager.drafter(name))
        width = drafter.needs.width
        return UnverifiedDrafts(LookupSteps(drafter, width), readable, drafter.states, width, self.learn_step)

    def drops(self, name: str, requests: Sequence[Request], others: int, decode_steps: int) -> bool:
        """Return whether requests that draft nothing in the next run continue without their drafter.

        It follows their texts meanwhile, which may cost too much. Beside requests without a drafter it cannot.
        """
        if not self.learns(name) or self.can_miss_runs(name) or not all(map(self.spec_manager.adapts, requests)):
            return False
        batch_size = len(requests) + others
        if not self.controller.latency.covers(batch_size):
            return False
        return others > 0 or all(self.controller.should_drop(request, batch_size, decode_steps) for request in requests)

    def can_miss_runs(self, name: str) -> bool:
        """Return whether the drafter may miss runs without drafts: a lookup reads the texts later."""
        return bool(name) and not self.spec_manager.methods[name].needs.costs_time

    def finish_plain(
        self, rows: Sequence[Row], results: list[RowResult], fences: Sequence[Fence], drops: bool
    ) -> list[RowResult]:
        """Learn from a run without the drafters of its requests; return its results. drops: the drafters are dropped.

        fences: as in `observe_latency`, or only the first one if the run was not timed.
        """
        if not self.plan.adaptive:
            return results
        if len(fences) > 1:
            self.controller.latency.observe(len(rows), 0, median(_spans(fences)[::2]))
        for row, result in zip(rows, results, strict=True):
            if row.request.width:
                self.controller.skip(row.request, _plain_steps(row.request, result) - 1)
        if not drops:
            return results
        return [replace(result, dropped=row.request.width > 0) for row, result in zip(rows, results, strict=True)]

    def learns(self, name: str) -> bool:
        """Return whether latency and acceptance of this method are used."""
        return bool(name) and self.plan.adaptive

    def begin(self, name: str, timed: Mapping[tuple[int, int], Sequence[Fence]], most: int) -> None:
        """Begin with measured runs, by their rows and width, for all batch sizes up to `most`.

        Without drafts first: such steps tell how fast the machine is. Small batches first: larger ones begin like them.
        Twice: a prediction counts as one measurement.
        """
        for batch_size, (rows, width), _ in product(range(1, most + 1), sorted(timed), range(2)):
            if rows == padded(batch_size):
                self.observe_latency(name, batch_size, width, timed[rows, width], with_drafts=batch_size == rows)

    def observe_latency(
        self, name: str, batch_size: int, width: int, fences: Sequence[Fence], with_drafts: bool = True
    ) -> None:
        """Measure a run. fences: at the start, then after each pass of the target and after each draft."""
        self.controller.multi_step.add(name)
        spans = _spans(fences)
        self.controller.latency.observe(batch_size, batch_size * width, median(spans[::2]))
        if with_drafts:
            self.controller.draft_latency(name).observe(width, median(spans[1::2]) / self.controller.latency.slowdown)

    def learn_step(self, request: Request, step: DecodeStep, width: int) -> None:
        """Learn how many of `width` draft tokens were accepted: a step takes as long if a lookup found fewer."""
        draft = step.draft or Draft([])  # it has no confidence: on the device it could not be cut by it
        self.controller.learn(request, draft, draft.path(step.tokens[:-1]), width)

    def learn(
        self, name: str, rows: Sequence[Row], results: list[RowResult], width: int, fences: Sequence[Fence]
    ) -> list[RowResult]:
        """Learn the latency of a run; return the results, with the drafters dropped that do not pay.

        `learn_step` has learned from its drafts.
        fences: as in `observe_latency`, or only the first one if the run was not timed.
        """
        if not self.learns(name):
            return results
        planned = self.controller.latency.covers(len(rows))  # else the run drafted nothing because it was not measured
        if len(fences) > 1:
            self.observe_latency(name, len(rows), width, fences)
        if width or not planned:
            return results
        learned = []
        for row, result in zip(rows, results, strict=True):
            self.controller.skip(row.request, _plain_steps(row.request, result) - 1)
            learned.append(replace(result, dropped=self.controller.should_drop(row.request, len(rows))))
        return learned

    def drafter(self, name: str) -> MultiStepDrafter:
        """Return the drafter of a method whose `needs.multi_step` is set."""
        return cast(MultiStepDrafter, self.spec_manager.drafter(name))


def _spans(fences: Sequence[Fence]) -> list[float]:
    """Return the seconds between each two fences."""
    return [later.since(earlier) for earlier, later in pairwise(fences)]


def _plain_steps(request: Request, result: RowResult) -> int:
    """Return the steps of a run without drafts up to the one in which the request ended."""
    if request.continues_after(result.tokens):
        return len(result.tokens)
    first = len(request.output) + 1
    for number, token in enumerate(result.tokens):
        if request.ending(first + number, token):
            return number + 1
    return len(result.tokens)


class RunLength:
    """The number of decode steps of a run, from the latency of the host and the length of the texts so far."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.decode_steps = most  # of the next run
        self._busy = 0.0  # seconds that the device had worked in runs before
        self._host = 0.0  # seconds that the host adds to a run
        self._text_seconds, self._stopped = 1.0, 1.0  # of all texts, and how many ended by themselves; both decay

    def observe(self, seconds: float, busy: float, step_seconds: float, requests: Sequence[Request]) -> None:
        """Learn from a step that took `seconds`.

        busy: seconds that the device has worked in runs so far. step_seconds: of a decode step in the last run.
        """
        device, self._busy = busy - self._busy, busy
        if not device:
            return
        self._host += HOST_RATE * (seconds - device - self._host)
        stopped = sum(request.finish_reason is FinishReason.STOP for request in requests)
        self._text_seconds = TEXT_DECAY * self._text_seconds + device * len(requests)
        self._stopped = max(TEXT_DECAY * self._stopped, MIN_STOPPED) + stopped
        self.decode_steps = best_length(self.most, step_seconds, self._host, self._text_seconds / self._stopped)


def best_length(most: int, step_seconds: float, host: float, text: float) -> int:
    """Return the number of steps that wastes the least time.

    Between runs the host works for `host` seconds. A text ends after `text` seconds, on average in the middle of a
    run, whose later steps are wasted for it.
    """
    if not step_seconds:
        return most
    seconds = min(math.sqrt(2 * host * text), MAX_SECONDS)
    return max(min(int(seconds / step_seconds), most), min(MIN_STEPS, most))
