"""Progress of a training run as text lines, for a log or a script."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from .loop import ProgressEvent
from .metrics import HeadMetrics

LINE_SECONDS = 10.0  # between two lines


def to_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class TextProgress:
    """A ProgressReporter that writes lines. on_event: gets every event in place of a line."""

    def __init__(
        self, write: Callable[[str], None] = to_stderr, on_event: Callable[[ProgressEvent], None] | None = None
    ) -> None:
        self.write, self.on_event = write, on_event
        self._written = time.perf_counter()

    def stage(self, text: str) -> None:
        self.write(text)

    def note(self, text: str) -> None:
        self.write(f"note: {text}")

    def answers(self, documents: int, tokens: int, wanted: int) -> None:
        if self._due():
            self.write(f"{documents} answers, {tokens} of {wanted} tokens")

    def event(self, event: ProgressEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)
        elif event.metrics and (event.kind == "held out" or self._due()):
            self.write(event_text(event))

    def _due(self) -> bool:
        now = time.perf_counter()
        due = now - self._written >= LINE_SECONDS
        self._written = now if due else self._written
        return due


Lines = TextProgress  # deprecated alias


def event_text(event: ProgressEvent) -> str:
    of = f" of {event.steps}" if event.steps else ""
    speed = f", {event.tokens_per_second:.0f} tokens/s" if event.tokens_per_second else ""
    heads = "; ".join(head_text(name, metrics) for name, metrics in event.metrics.items())
    return f"step {event.step}{of}, {event.seconds:.0f} s{speed}, {event.kind}: {heads}"


def head_text(name: str, metrics: HeadMetrics) -> str:
    skipped = f", {metrics.skipped} steps skipped" if metrics.skipped else ""
    return f"{name} loss {metrics.loss:.3f}, accepts {percentages(metrics.acceptance)} ({metrics.length:.2f}){skipped}"


def percentages(rates: tuple[float, ...]) -> str:
    return " ".join(f"{rate:.0%}" for rate in rates)
