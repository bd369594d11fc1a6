"""Recordings of the reference backend: a replay runs the function again."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor


class _EndedError(Exception):
    """The replay ends after this depth."""


class Recorder:
    def __init__(self, depths: int = 0, least: float = 0.0, shared_noise: bool = False) -> None:
        self.depths, self.least, self.shared_noise = depths, least, shared_noise
        self.reached, self.path = 0, 1.0

    def end_depth(self, estimate: Tensor, is_logprob: bool = True) -> None:
        """Mark the end of a depth. estimate [1] f32: log-probability, or acceptance probability, of its token."""
        self.reached += 1
        probability = math.exp(min(float(estimate), 0.0)) if is_logprob else float(estimate)
        self.path *= 1 - (1 - probability) / 2 if is_logprob and self.shared_noise else probability
        if self.reached == self.depths or self.path < self.least:
            raise _EndedError


class Replay:
    def __init__(self, run: Callable[[Recorder], None]) -> None:
        self._run = run

    def __call__(self, depths: int = 0, least: float = 0.0, shared_noise: bool = False) -> int:
        recorder = Recorder(depths, least, shared_noise)
        with suppress(_EndedError):
            self._run(recorder)
        return recorder.reached

    def load(self, target: Tensor, source: Tensor, first: int) -> None:
        target.copy_(source[first : first + len(target)])


def record(run: Callable[[Recorder], None]) -> Replay | None:
    run(Recorder())
    return Replay(run)
