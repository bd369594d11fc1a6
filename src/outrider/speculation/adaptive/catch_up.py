"""What a resting drafter is not shown, and what of it is kept for the time when it wakes: the latest tokens' states."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...request import Request
from ..interface import DraftContext


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


class CatchUpBuffers:
    """The latest positions that each suspended drafter has not processed."""

    def __init__(self, page_size: int) -> None:
        self.window = page_size + 2  # positions that a drafter processes when it is resumed; it never sees older ones
        self._missed: dict[Request, Missed] = {}

    def __contains__(self, request: Request) -> bool:
        return request in self._missed

    def add(self, context: DraftContext, hidden: Tensor | None) -> None:
        """Keep the positions of this step for a drafter that does not process them now."""
        missed = self._missed.setdefault(context.request, Missed(self.window))
        if missed.stop == context.computed:
            return  # this step was added before
        first, count = context.first_row, context.computed - context.start
        missed.add(context.start, context.computed, None if hidden is None else hidden[first : first + count])

    def recall(self, contexts: list[DraftContext], hidden: Tensor | None) -> tuple[list[DraftContext], Tensor | None]:
        """The contexts of those that woke, as if all that was kept had run in this step; its states come after those of
        the step. hidden: [T, F].
        """
        if not any(context.request in self._missed for context in contexts):
            return contexts, hidden
        parts = [] if hidden is None else [hidden]
        rows = 0 if hidden is None else len(hidden)
        found = []
        for context in contexts:
            missed, first = self._missed.get(context.request), context.first_row
            if missed is None:
                found.append(context)
                continue
            if parts:
                first = rows
                parts.append(missed.states())
                rows += len(parts[-1])
            found.append(replace(context, start=missed.start, first_row=first))
        return found, torch.cat(parts) if parts else None

    def forget(self, request: Request) -> None:
        self._missed.pop(request, None)
