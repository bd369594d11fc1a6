"""What a crowd of streams heard and left behind: the figures of `load_server.py crowd`, and what is wrong with them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Facts = dict[str, Any]  # what the server's process says of itself at one moment
COUNTS = ("pages", "running", "waiting", "seats", "tasks", "families")
LEVEL = 0.05  # by so much of itself may the memory have grown in the second half of the time
APART = 4.0  # p99 of the gap between tokens may be so many times its median


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@dataclass
class Heard:
    """What one stream gave."""

    status: int = 0
    tokens: int = 0
    chunks: list[float] = field(default_factory=list)  # when each came
    finished: bool = False
    problem: str = ""

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]


def quantiles(heard: Sequence[Heard]) -> dict[str, float]:
    """Of the gap between tokens, in milliseconds."""
    gaps = sorted(gap for each in heard for gap in each.gaps) or [0.0]
    return {f"p{share}": gaps[len(gaps) * share // 100] * 1000 for share in (50, 90, 99)}


def problems(heard: Sequence[Heard]) -> dict[str, int]:
    """All that went wrong but for 429, which is an answer."""
    bad = [each for each in heard if each.problem and each.status != 429 and not each.finished]
    return dict(Counter(each.problem[:120] for each in bad))


def growth(samples: Sequence[Facts], after: Facts) -> float:
    """Of the memory in the second half: in the first one, pages are touched for the first time."""
    return float(after["resident"] / samples[(len(samples) - 1) // 2]["resident"] - 1)


def faults(heard: Sequence[Heard], before: Facts, samples: Sequence[Facts], after: Facts) -> list[str]:
    """What a good server does not do; empty for one."""
    found = [f"{count} x {problem}" for problem, count in problems(heard).items()]
    found += [f"{key} left behind" for key in COUNTS if after[key] > before[key]]
    if (grown := growth(samples, after)) > LEVEL:
        found.append(f"memory grew by {grown:.1%}")
    at = quantiles(heard)
    if at["p99"] > APART * at["p50"]:
        found.append(f"p99 of the gap is more than {APART:g} times its median")
    if not any(each.finished for each in heard):
        found.append("no stream came to its end")
    return found


def report(heard: Sequence[Heard], before: Facts, samples: Sequence[Facts], after: Facts) -> int:
    """Print it all; the code to exit with."""
    finished = sum(each.finished for each in heard)
    left = sum(not each.finished and not each.problem for each in heard)
    statuses = dict(Counter(each.status for each in heard))
    say(f"requests {len(heard)}: finished {finished}, hung up {left}, statuses {statuses} (0: gone before an answer)")
    say(f"problems other than 429: {problems(heard) or 'none'}")
    at = quantiles(heard)
    told = ", ".join(f"{name} {value:.0f}" for name, value in at.items())
    say(f"gap between tokens, ms: {told}; p99 / p50 = {at['p99'] / max(at['p50'], 1e-9):.2f}")
    say(f"| | {' | '.join(COUNTS)} | resident MiB |")
    say("|---|---|---|---|---|---|---|---|")
    parts = {f"{number}/{len(samples)}": sample for number, sample in enumerate(samples, 1)}
    for name, row in {"before": before, **parts, "after": after}.items():
        say(f"| {name} | {' | '.join(str(row[key]) for key in COUNTS)} | {row['resident'] / 2**20:.0f} |")
    say(f"memory in the second half: {growth(samples, after):+.1%}")
    wrong = faults(heard, before, samples, after)
    say(f"verdict: {'; '.join(wrong) or 'good'}")
    return 1 if wrong else 0
