"""Progress of a training run: metrics, which are summed on the device, progress events, the log, and text lines."""

from __future__ import annotations

import itertools
import json
import operator
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from .heads.base import StepResult
from .io.disk import write_whole

NUM_SCALARS = 4  # sums without a depth: loss, norm, steps, skipped steps
LINE_SECONDS = 10.0  # between two lines


@dataclass(frozen=True)
class HeadMetrics:
    """Means since the last event; rates are by depth, given that all tokens before were accepted. A file format."""

    loss: float
    acceptance: tuple[float, ...]  # fraction of drafted tokens that are the target's argmax
    overlap: tuple[float, ...]  # sum of min(p, q): the acceptance rate of sampled drafts
    length: float  # mean accepted length that follows, including the target's own token
    gradient: float  # norm of the gradients
    skipped: int  # steps whose gradients were not finite


class MetricSums:
    """Sums of one head, on the device."""

    def __init__(self) -> None:
        self.total: Tensor | None = None  # [4 + 3 * S]

    def add(self, result: StepResult, norm: Tensor, finite: Tensor) -> None:
        scalars = torch.stack(
            [result.loss.detach().float(), norm.float(), torch.ones_like(norm), torch.zeros_like(norm)]
        )
        sums = torch.cat([scalars, result.counted, result.correct, result.overlap]).detach()
        skipped = torch.zeros_like(sums)
        skipped[NUM_SCALARS - 1] = 1.0
        sums = torch.where(finite, sums, skipped)
        self.total = sums if self.total is None else self.total + sums

    def clear(self) -> None:
        self.total = None


def fetch_metrics(sums: Mapping[str, MetricSums]) -> dict[str, HeadMetrics]:
    """Fetch the metrics of all heads in one transfer, the only wait for the device, and reset the sums."""
    totals = {name: head.total for name, head in sums.items() if head.total is not None}
    if not totals:
        return {}
    values = torch.cat(list(totals.values())).tolist()
    metrics, start = {}, 0
    for name, total in totals.items():
        metrics[name] = from_sums(values[start : start + len(total)])
        start += len(total)
        sums[name].clear()
    return metrics


def from_sums(values: Sequence[float]) -> HeadMetrics:
    loss, norm, steps, skipped = values[:NUM_SCALARS]
    depths = (len(values) - NUM_SCALARS) // 3
    counted, correct, overlap = (values[NUM_SCALARS + k * depths : NUM_SCALARS + (k + 1) * depths] for k in range(3))
    acceptance = tuple(ratio(part, count) for part, count in zip(correct, counted, strict=True))
    return HeadMetrics(
        loss=ratio(loss, steps),
        acceptance=acceptance,
        overlap=tuple(ratio(part, count) for part, count in zip(overlap, counted, strict=True)),
        length=1.0 + sum(itertools.accumulate(acceptance, operator.mul)),
        gradient=ratio(norm, steps),
        skipped=round(skipped),
    )


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# ---- events ----


@dataclass(frozen=True)
class ProgressEvent:
    """Metrics of a run at one step, in training or on held-out documents."""

    kind: Literal["train", "held out"]
    step: int
    steps: int | None  # planned; None: not known yet
    seconds: float
    tokens: int  # seen so far, with repetitions
    tokens_per_second: float  # since the last event
    rates: Mapping[str, float]  # learning rates by head
    metrics: Mapping[str, HeadMetrics]

    def as_json(self) -> dict[str, Any]:
        """Return the event under the keys of log.jsonl and of `outrider train --json`."""
        names = {"tokens_per_second": "pace", "metrics": "figures"}
        return {names.get(name, name): value for name, value in asdict(self).items()}


class ProgressReporter(Protocol):
    """Receives the progress of a run."""

    def stage(self, text: str) -> None:
        """A long stage of the run starts."""
        ...

    def answers(self, documents: int, tokens: int, wanted: int) -> None: ...

    def event(self, event: ProgressEvent) -> None: ...

    def note(self, text: str) -> None:
        """A sentence for the user."""
        ...


# ---- log ----


class TrainLog:
    """log.jsonl: one object per line. Lines after the step of the saved state are dropped: the run repeats them."""

    def __init__(self, file: Path, step: int) -> None:
        self.file = file
        content = "".join(json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step)
        if file.exists() and file.read_text() != content:
            write_whole(file, content.encode())

    def add(self, line: Mapping[str, Any]) -> None:
        with self.file.open("a") as out:
            out.write(json.dumps(rounded(line)) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines; a damaged line, such as a truncated last one, is skipped."""
        lines = []
        for text in self.file.read_text().splitlines() if self.file.exists() else []:
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
        return lines


def curve(lines: Sequence[Mapping[str, Any]], points: int = 40) -> list[dict[str, Any]]:
    """Return at most `points` lines, evenly spaced, including the first and the last."""
    if len(lines) <= points:
        return [dict(line) for line in lines]
    return [dict(lines[round(k * (len(lines) - 1) / (points - 1))]) for k in range(points)]


def rounded(value: Any) -> Any:
    """Round all floats to five significant digits, as they are written to the log."""
    if isinstance(value, Mapping):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ---- text lines ----


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
