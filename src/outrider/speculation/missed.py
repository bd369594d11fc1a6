"""What a resting drafter is not shown, and what of it is kept for the time when it wakes: the latest tokens' states."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..request import Request
from . import DraftContext
from .control import Control


class Missed:
    """Of one request: positions [start, stop), and their states where the drafter reads such."""

    __slots__ = ("_parts", "most", "start", "stop")

    def __init__(self, most: int) -> None:
        self.most = most  # positions
        self.start = self.stop = 0
        self._parts: list[Tensor] = []  # [positions, F] each

    def add(self, start: int, stop: int, states: Tensor | None) -> None:
        """A step ran [start, stop). states [stop - start, F]; None: the drafter reads none."""
        if start != self.stop:
            self.start = start
            self._parts.clear()
        self.stop = stop
        if states is None:
            self.start = max(self.start, stop - self.most)
            return
        if stop - start > self.most:  # no more of a long prompt is held on to than is wanted
            states = states[-self.most :].clone()
            self._parts.clear()
            self.start = stop - self.most
        self._parts.append(states)
        while stop - self.start - len(self._parts[0]) >= self.most:
            self.start += len(self._parts.pop(0))

    def states(self) -> Tensor:
        """[stop - start, F]."""
        return torch.cat(self._parts)


class Absences:
    """Who rests, by the control's word, and what each has missed."""

    def __init__(self, control: Control, page_size: int) -> None:
        self.control = control
        self.most = page_size + 2  # tokens that a drafter is shown when it wakes: the older ones it never sees
        self._missed: dict[Request, Missed] = {}

    def __contains__(self, request: Request) -> bool:
        """Whether it missed something."""
        return request in self._missed

    def sleeps_on(self, request: Request) -> bool:
        """Whether nobody will ask for the states of this step: it rests for longer than is looked back."""
        rest = self.control.resting.get(request)
        return rest is not None and rest.left > self.most

    def sleep_on(self, request: Request) -> None:
        """A step of which nothing is kept."""
        self.control.resting[request].left -= 1

    def rests(self, turn: DraftContext, hidden: Tensor | None, batch_size: int) -> bool:
        """Whether the drafter is left alone; what it misses is kept as far as it may be wanted."""
        request = turn.request
        rest = self.control.resting.get(request)
        if rest is None and (turn.fresh or not self.control.hopeless(request.method)):
            return False
        if rest is not None:
            rest.left -= 1
            if not rest.left:
                self.control.wake(request, batch_size)
        self.miss(turn, hidden)
        return rest is None or rest.left > 0

    def miss(self, turn: DraftContext, hidden: Tensor | None) -> None:
        missed = self._missed.setdefault(turn.request, Missed(self.most))
        if missed.stop == turn.computed:
            return  # of this step
        first, count = turn.first, turn.computed - turn.start
        missed.add(turn.start, turn.computed, None if hidden is None else hidden[first : first + count])

    def recall(self, turns: list[DraftContext], hidden: Tensor | None) -> tuple[list[DraftContext], Tensor | None]:
        """The turns of those that woke, as if all that was kept had run in this step; its states come after those of
        the step. hidden: [T, F].
        """
        if not any(turn.request in self._missed for turn in turns):
            return turns, hidden
        parts = [] if hidden is None else [hidden]
        rows = 0 if hidden is None else len(hidden)
        found = []
        for turn in turns:
            missed, first = self._missed.get(turn.request), turn.first
            if missed is None:
                found.append(turn)
                continue
            if parts:
                first = rows
                parts.append(missed.states())
                rows += len(parts[-1])
            found.append(replace(turn, start=missed.start, first=first))
        return found, torch.cat(parts) if parts else None

    def forget(self, request: Request) -> None:
        self._missed.pop(request, None)
