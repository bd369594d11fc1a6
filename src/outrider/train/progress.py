"""A run of training in words, a line now and then: what a log or a script shows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from .loop import Moment
from .metrics import Figures

EVERY = 10.0  # seconds between lines


def to_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Lines:
    """A Watcher without a screen. whole: takes every moment, where someone wants them all."""

    def __init__(self, write: Callable[[str], None] = to_stderr, whole: Callable[[Moment], None] | None = None) -> None:
        self.write, self.whole = write, whole
        self._told = time.perf_counter()

    def stage(self, text: str) -> None:
        self.write(text)

    def note(self, text: str) -> None:
        self.write(f"note: {text}")

    def answers(self, documents: int, tokens: int, wanted: int) -> None:
        if self._due():
            self.write(f"{documents} answers, {tokens} of {wanted} tokens")

    def moment(self, moment: Moment) -> None:
        if self.whole is not None:
            self.whole(moment)
        elif moment.figures and (moment.kind == "held out" or self._due()):
            self.write(line(moment))

    def _due(self) -> bool:
        now = time.perf_counter()
        due = now - self._told >= EVERY
        self._told = now if due else self._told
        return due


def line(moment: Moment) -> str:
    of = f" of {moment.steps}" if moment.steps else ""
    pace = f", {moment.pace:.0f} tokens/s" if moment.pace else ""
    heads = "; ".join(told(name, figures) for name, figures in moment.figures.items())
    return f"step {moment.step}{of}, {moment.seconds:.0f} s{pace}, {moment.kind}: {heads}"


def told(name: str, figures: Figures) -> str:
    skipped = f", {figures.skipped} steps skipped" if figures.skipped else ""
    return f"{name} loss {figures.loss:.3f}, accepts {places(figures.acceptance)} ({figures.length:.2f}){skipped}"


def places(shares: tuple[float, ...]) -> str:
    return " ".join(f"{share:.0%}" for share in shares)
