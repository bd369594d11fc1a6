"""What training gives, summed on the device and fetched now and then."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .heads.base import Report
from .io.disk import write_whole

BESIDE = 4  # sums that have no place: loss, norm, steps, steps that were skipped


@dataclass(frozen=True)
class Figures:
    """Means since the last time. By place of the draft: the share that the target keeps if it kept those before."""

    loss: float
    acceptance: tuple[float, ...]  # guesses that are what the target likes best
    overlap: tuple[float, ...]  # min(p, q), summed: what a sampled draft is kept with
    length: float  # tokens a step that this comes to, the target's own included
    gradient: float  # the norm of the gradients
    skipped: int  # steps whose gradients were not finite


class Sums:
    """One student's."""

    def __init__(self) -> None:
        self.total: Tensor | None = None  # [4 + 3 * S]

    def add(self, report: Report, norm: Tensor, finite: Tensor) -> None:
        beside = torch.stack(
            [report.loss.detach().float(), norm.float(), torch.ones_like(norm), torch.zeros_like(norm)]
        )
        found = torch.cat([beside, report.counted, report.correct, report.overlap]).detach()
        skipped = torch.zeros_like(found)
        skipped[BESIDE - 1] = 1.0
        found = torch.where(finite, found, skipped)
        self.total = found if self.total is None else self.total + found

    def clear(self) -> None:
        self.total = None


def fetch(sums: Mapping[str, Sums]) -> dict[str, Figures]:
    """The figures of all students at once, the only place that waits for the device. The sums begin anew."""
    filled = {name: one.total for name, one in sums.items() if one.total is not None}
    if not filled:
        return {}
    values = torch.cat(list(filled.values())).tolist()
    found, at = {}, 0
    for name, total in filled.items():
        found[name] = read(values[at : at + len(total)])
        at += len(total)
        sums[name].clear()
    return found


def read(values: Sequence[float]) -> Figures:
    loss, norm, steps, skipped = values[:BESIDE]
    places = (len(values) - BESIDE) // 3
    counted, correct, overlap = (values[BESIDE + k * places : BESIDE + (k + 1) * places] for k in range(3))
    acceptance = tuple(ratio(part, whole) for part, whole in zip(correct, counted, strict=True))
    return Figures(
        loss=ratio(loss, steps),
        acceptance=acceptance,
        overlap=tuple(ratio(part, whole) for part, whole in zip(overlap, counted, strict=True)),
        length=1.0 + sum(itertools.accumulate(acceptance, operator.mul)),
        gradient=ratio(norm, steps),
        skipped=round(skipped),
    )


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class Log:
    """log.jsonl: one object a line. What a cut run wrote after it was last saved is dropped: it comes again."""

    def __init__(self, file: Path, step: int) -> None:
        self.file = file
        kept = "".join(json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step)
        if file.exists() and file.read_text() != kept:
            write_whole(file, kept.encode())

    def add(self, line: Mapping[str, Any]) -> None:
        with self.file.open("a") as out:
            out.write(json.dumps(rounded(line)) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """A last line that was cut is no line."""
        found = []
        for text in self.file.read_text().splitlines() if self.file.exists() else []:
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
        return found


def curve(lines: Sequence[Mapping[str, Any]], points: int = 40) -> list[dict[str, Any]]:
    """A few dozen lines, evenly spread, the first and the last among them."""
    if len(lines) <= points:
        return [dict(line) for line in lines]
    return [dict(lines[round(k * (len(lines) - 1) / (points - 1))]) for k in range(points)]


def rounded(value: Any) -> Any:
    """As it is written down: five digits of whatever is measured."""
    if isinstance(value, Mapping):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
