"""Who drafts in rounds without the host, how much, and what is learnt from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

from ..device import Fence
from ..request import Request, Row, RowResult
from ..speculation.manager import SpeculationManager
from ..types import DecodeStep
from .state import DecodeState, Part, Unattended

WIDTHS = (1, 3, 7, 15, 31)  # tokens drafted in rounds, beside a method's most: each has records of its own


def widths(most: int) -> list[int]:
    return [0, *(width for width in WIDTHS if width < most), most]


class Pilot:
    def __init__(self, spec_manager: SpeculationManager) -> None:
        self.spec_manager, self.plan, self.controller = spec_manager, spec_manager.plan, spec_manager.controller

    def ready(self, name: str, requests: Sequence[Request]) -> bool:
        """Whether nobody's drafter has something to catch up with."""
        return not name or (self.spec_manager.can_multi_step(name) and self._drafter(name).ready(requests))

    def taps(self, name: str) -> tuple[int, ...]:
        return self.spec_manager.methods[name].needs.aux_layers if name else ()

    def part(self, name: str, seats: DecodeState) -> Part | None:
        return self._drafter(name).part(seats) if name else None

    def width(self, name: str, requests: Sequence[Request]) -> int:
        """Tokens that all requests draft in each of the rounds to come."""
        if not name:
            return 0
        needs, batch_size = self.spec_manager.methods[name].needs, len(requests)
        most = self.plan.width(batch_size) if self.plan.widths else needs.width
        rooms = [min(request.width, most) for request in requests]
        if not (self.plan.adaptive and needs.costs_time):
            return max(rooms)
        best = max(self.controller.plan(requests, rooms))
        return min(widths(max(rooms)), key=lambda width: (abs(width - best), -width))

    def learns(self, name: str) -> bool:
        """Whether times and chances of this method's rounds matter to anyone."""
        return bool(name) and self.plan.adaptive

    def time(self, name: str, batch_size: int, width: int, marks: Sequence[Fence]) -> None:
        """marks: fences at the start, then after each pass of the target and after each draft."""
        self.controller.multi_step.add(name)
        spans = [later.since(earlier) for earlier, later in pairwise(marks)]
        self.controller.latency.observe(batch_size, batch_size * width, median(spans[::2]))
        self.controller.draft_latency(name).observe(width, median(spans[1::2]))

    def land(
        self, name: str, rows: Sequence[Row], results: list[RowResult], width: int, marks: Sequence[Fence]
    ) -> list[RowResult]:
        """Learn from what became of all guesses. marks: as in `time`, or only the first where nothing was timed."""
        if not self.learns(name):
            return results
        if len(marks) > 1:
            self.time(name, len(rows), width, marks)
        landed = []
        for row, result in zip(rows, results, strict=True):
            for part in _lived(row.request, result.decode_steps):
                if part.draft is not None:  # which does not say how sure it is: nobody could cut it
                    self.controller.learn(row.request, part.draft, part.draft.path(part.tokens[:-1]))
            if not width:
                self.controller.skip(row.request, result.passes - 1)
            gone = not width and self.controller.should_drop(row.request, len(rows))
            landed.append(replace(result, dropped=gone))
        return landed

    def _drafter(self, name: str) -> Unattended:
        method: Any = self.spec_manager.methods[name]
        return method  # type: ignore[no-any-return]


def _lived(request: Request, rounds: Sequence[DecodeStep]) -> Iterator[DecodeStep]:
    """The rounds up to the one in which the request ended."""
    count = len(request.output)
    for part in rounds:
        yield part
        if any(request.ending(count + at, token) for at, token in enumerate(part.tokens, 1)):
            return
        count += len(part.tokens)
