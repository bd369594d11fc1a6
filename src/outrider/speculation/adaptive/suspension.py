"""Suspended drafters: how long a drafter that does not pay is not called, and the states that it needs to catch up."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...request import Request
from ..interface import DraftContext

MIN_STEPS, MAX_STEPS = 16, 64  # steps of a suspension: a text that becomes easy is noticed within some tens of tokens
PROBES = 3  # drafts after a suspension; one draft without an accepted token is common even where drafting pays


class Backoff:
    """The suspensions of one request: each is twice as long as the one before, until drafts pay again."""

    __slots__ = ("drafts", "next", "probes", "remaining")

    def __init__(self, steps: int = MIN_STEPS) -> None:
        self.next = steps  # steps of the next suspension
        self.remaining = 0  # of this one
        self.drafts = 0  # that paid since the last one
        self.probes = 0  # drafts left before it is suspended again

    def suspend(self, factor: float = 1.0) -> None:
        """Begin a suspension. factor: of its steps, so that a large batch does not probe all the time."""
        self.remaining = min(round(self.next * factor), 2 * MAX_STEPS)
        self.next = min(2 * self.next, MAX_STEPS)
        self.drafts, self.probes = 0, PROBES

    def succeed(self) -> None:
        """Count a draft that is expected to pay; after some of them the next suspension is a short one again."""
        self.drafts, self.probes = self.drafts + 1, 0
        if self.drafts >= MIN_STEPS // 2:
            self.next = MIN_STEPS

    def probe(self) -> bool:
        """Return whether a request whose drafts are not expected to pay has another one."""
        self.probes -= 1
        return self.probes >= 0


class CatchUp:
    """The positions [start, stop) of one request that its drafter has not processed, and their hidden states."""

    __slots__ = ("_parts", "start", "stop", "window")

    def __init__(self, window: int) -> None:
        self.window = window  # positions to keep
        self.start = self.stop = 0
        self._parts: list[Tensor] = []  # [positions, F] each

    def add(self, start: int, stop: int, states: Tensor | None) -> None:
        """Append a step over [start, stop). states [stop - start, F]; None: the drafter reads none."""
        if start != self.stop:
            self.start = start
            self._parts.clear()
        self.stop = stop
        if states is None:
            self.start = max(self.start, stop - self.window)
            return
        if stop - start > self.window:  # copy the end of a long prompt, so that the rest can be freed
            states = states[-self.window :].clone()
            self._parts.clear()
            self.start = stop - self.window
        self._parts.append(states)
        while stop - self.start - len(self._parts[0]) >= self.window:
            self.start += len(self._parts.pop(0))

    def states(self) -> Tensor:
        """Return the hidden states: [stop - start, F]."""
        return torch.cat(self._parts)


class CatchUpBuffers:
    """The latest positions that each suspended drafter has not processed."""

    def __init__(self, page_size: int) -> None:
        self.window = page_size + 2  # positions that a drafter processes when it is resumed; it never sees older ones
        self._buffers: dict[Request, CatchUp] = {}

    def __contains__(self, request: Request) -> bool:
        return request in self._buffers

    def add(self, context: DraftContext, hidden: Tensor | None) -> None:
        """Keep the positions of this step for a drafter that does not process them now."""
        buffer = self._buffers.setdefault(context.request, CatchUp(self.window))
        if buffer.stop == context.computed:
            return  # this step was added before
        first, count = context.first_row, context.computed - context.start
        buffer.add(context.start, context.computed, None if hidden is None else hidden[first : first + count])

    def recall(self, contexts: list[DraftContext], hidden: Tensor | None) -> tuple[list[DraftContext], Tensor | None]:
        """Return contexts and hidden states [T, F] as if the positions kept had run in this step.

        The states that were kept are appended to those of the step.
        """
        if not any(context.request in self._buffers for context in contexts):
            return contexts, hidden
        parts = [] if hidden is None else [hidden]
        rows = 0 if hidden is None else len(hidden)
        found = []
        for context in contexts:
            buffer, first = self._buffers.get(context.request), context.first_row
            if buffer is None:
                found.append(context)
                continue
            if parts:
                first = rows
                parts.append(buffer.states())
                rows += len(parts[-1])
            found.append(replace(context, start=buffer.start, first_row=first))
        return found, torch.cat(parts) if parts else None

    def forget(self, request: Request) -> None:
        self._buffers.pop(request, None)
