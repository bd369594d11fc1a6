"""Catch-up: the positions that a suspended drafter has not processed, and the hidden states that it needs for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...request import Request
from ..interface import DraftContext


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
        buffer.add(context.start, context.computed, None if hidden is None else hidden[first : first + count].clone())

    def recall(self, contexts: list[DraftContext], hidden: Tensor | None) -> tuple[list[DraftContext], Tensor | None]:
        """Return contexts and hidden states [T, F] as if the positions kept had run in this step.

        The states that were kept are appended to those of the step. If none were kept, `contexts` itself is returned.
        """
        if not self._buffers or not any(context.request in self._buffers for context in contexts):
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
