"""Follow a multi-step run from the host: read finished steps while later ones run, and stop when texts have ended.

Drafts are accepted at different rates, so that texts of the same length end in different steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ..device import Device, Fence
from ..request import Row

# Device time that is queued ahead of the host: another thread may keep the interpreter for its switch interval.
QUEUED_SECONDS = 0.005
MIN_QUEUED = 2  # steps that are queued, at least: one runs while the host reads the one before it
ENDED_ROWS = 16  # a run stops after this many of its texts have ended: the next run has fewer rows


def queued_steps(step_seconds: float) -> int:
    """Return how many steps to queue ahead of the host. step_seconds: of one step; 0: not known."""
    return max(math.ceil(QUEUED_SECONDS / step_seconds), MIN_QUEUED) if step_seconds else MIN_QUEUED


class RowProgress:
    """The tokens of one row, as far as the host has read them."""

    def __init__(self, row: Row) -> None:
        request = row.request
        limit = min(request.max_length - len(request.prompt), request.params.max_tokens)
        self.remaining = limit - len(request.output)  # tokens that the text may still get
        self.stops = request.end_tokens.union(request.params.stop_token_ids)

    def read(self, tokens: Sequence[int]) -> None:
        self.remaining -= len(tokens)
        if not self.stops.isdisjoint(tokens):
            self.remaining = 0


class RunOutputs:
    """The outputs of all steps of a run on the host, as in RunBuffers.output."""

    def __init__(self, device: Device, rows: Sequence[Row], steps: int, output: Tensor, queued: int) -> None:
        """queued: steps that may run before the host has read their outputs."""
        self.device, self.queued = device, queued
        self.rows = [RowProgress(row) for row in rows]
        self.most = output.shape[1] // 2  # tokens that a row gets in one step: W + 1
        self.host = device.host_zeros((steps, *output.shape), output.dtype)
        self.fences: list[Fence] = []  # after each step that was started
        self.steps: list[list[list[int]]] = []  # those that were read

    def put(self, output: Tensor) -> None:
        """Copy the output of the step that was just started."""
        self.host[len(self.fences)].copy_(output, non_blocking=True)
        self.fences.append(self.device.fence())

    def needs_step(self) -> bool:
        """Return whether some text needs another step, even if all draft tokens of the queued ones are accepted.

        Waits for queued steps if there are too many, or if one of them may end the last text. No step follows if
        enough texts have ended for a run of fewer rows.
        """
        while True:
            if sum(row.remaining <= 0 for row in self.rows) >= ENDED_ROWS:
                return False
            running = len(self.fences) - len(self.steps)
            if running < self.queued and any(row.remaining > running * self.most for row in self.rows):
                return True
            if not running:
                return False
            self._read_step()

    def read(self) -> list[list[list[int]]]:
        """Wait for all steps, and return their outputs."""
        while len(self.steps) < len(self.fences):
            self._read_step()
        return self.steps

    def _read_step(self) -> None:
        index = len(self.steps)
        self.fences[index].wait()
        output: list[list[int]] = self.host[index].tolist()
        self.steps.append(output)
        for row, (count, *values) in zip(self.rows, output, strict=False):  # rows that pad come last
            if row.remaining > 0:
                row.read(values[:count])
