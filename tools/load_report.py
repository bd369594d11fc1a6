"""The report of `load_server.py load`: figures of many concurrent streams, and faults of the server."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Facts = dict[str, Any]  # counters of the server's process at one moment
COUNTS = ("pages", "running", "waiting", "sequences", "tasks", "parents")  # must return to their values before the load
MAX_GROWTH = 0.05  # fraction by which memory may grow in the second half of the run
MAX_SPREAD = 4.0  # p99 of the gap between tokens divided by its median


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@dataclass
class StreamResult:
    """The result of one stream."""

    status: int = 0
    tokens: int = 0
    chunks: list[float] = field(default_factory=list)  # arrival times
    finished: bool = False
    problem: str = ""

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]


def quantiles(streams: Sequence[StreamResult]) -> dict[str, float]:
    """Return quantiles of the gap between tokens, in milliseconds."""
    gaps = sorted(gap for stream in streams for gap in stream.gaps) or [0.0]
    return {f"p{share}": gaps[len(gaps) * share // 100] * 1000 for share in (50, 90, 99)}


def problems(streams: Sequence[StreamResult]) -> dict[str, int]:
    """Count the problems except 429, which is a proper response."""
    failed = [stream for stream in streams if stream.problem and stream.status != 429 and not stream.finished]
    return dict(Counter(stream.problem[:120] for stream in failed))


def growth(samples: Sequence[Facts], after: Facts) -> float:
    """Return the growth of memory in the second half; in the first half pages are touched for the first time."""
    return float(after["resident"] / samples[(len(samples) - 1) // 2]["resident"] - 1)


def faults(streams: Sequence[StreamResult], before: Facts, samples: Sequence[Facts], after: Facts) -> list[str]:
    """Return the faults of the server; empty for a good run."""
    faults = [f"{count} x {problem}" for problem, count in problems(streams).items()]
    faults += [f"{key} left behind" for key in COUNTS if after[key] > before[key]]
    if (grown := growth(samples, after)) > MAX_GROWTH:
        faults.append(f"memory grew by {grown:.1%}")
    gaps = quantiles(streams)
    if gaps["p99"] > MAX_SPREAD * gaps["p50"]:
        faults.append(f"p99 of the gap is more than {MAX_SPREAD:g} times its median")
    if not any(stream.finished for stream in streams):
        faults.append("no stream finished")
    return faults


def report(streams: Sequence[StreamResult], before: Facts, samples: Sequence[Facts], after: Facts) -> int:
    """Print the report, and return the exit code."""
    finished = sum(stream.finished for stream in streams)
    left = sum(not stream.finished and not stream.problem for stream in streams)
    statuses = dict(Counter(stream.status for stream in streams))
    say(f"requests {len(streams)}: finished {finished}, disconnected {left}, statuses {statuses} (0: no response)")
    say(f"problems other than 429: {problems(streams) or 'none'}")
    gaps = quantiles(streams)
    figures = ", ".join(f"{name} {value:.0f}" for name, value in gaps.items())
    say(f"gap between tokens, ms: {figures}; p99 / p50 = {gaps['p99'] / max(gaps['p50'], 1e-9):.2f}")
    say(f"| | {' | '.join(COUNTS)} | resident MiB |")
    say("|---|---|---|---|---|---|---|---|")
    parts = {f"{number}/{len(samples)}": sample for number, sample in enumerate(samples, 1)}
    for name, row in {"before": before, **parts, "after": after}.items():
        say(f"| {name} | {' | '.join(str(row[key]) for key in COUNTS)} | {row['resident'] / 2**20:.0f} |")
    say(f"memory in the second half: {growth(samples, after):+.1%}")
    detected = faults(streams, before, samples, after)
    say(f"verdict: {'; '.join(detected) or 'good'}")
    return 1 if detected else 0
