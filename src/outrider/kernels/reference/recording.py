"""Recordings of the reference backend: a replay runs the function again."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor


class _EndedError(Exception):
    """The replay ends after this depth."""


class Recorder:
    def __init__(self, depths: int = 0, least: float = 0.0) -> None:
        self.depths, self.least = depths, least
        self.reached, self.path = 0, 1.0

    def end_depth(self, logprob: Tensor) -> None:
        """Mark the end of a drafted depth. logprob [1] f32: log-probability of its token."""
        self.reached += 1
        self.path *= math.exp(min(float(logprob), 0.0))
        if self.reached == self.depths or self.path < self.least:
            raise _EndedError


class Replay:
    def __init__(self, run: Callable[[Recorder], None]) -> None:
        self._run = run

    def __call__(self, depths: int = 0, least: float = 0.0) -> int:
        recorder = Recorder(depths, least)
        with suppress(_EndedError):
            self._run(recorder)
        return recorder.reached

    def load(self, target: Tensor, source: Tensor, first: int) -> None:
        target.copy_(source[first : first + len(target)])


def record(run: Callable[[Recorder], None]) -> Replay | None:
    run(Recorder())
    return Replay(run)
