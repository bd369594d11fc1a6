"""Compute the figures of each engine and our ratios to each peer, round by round; draw the ratios as a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean, median
from typing import Any

from ...diagnostics.machine import host_facts
from ...weights.random import is_random
from ..charts import COLORS, LETTER, MARGIN, WIDTH, counted, drawing, text
from ..speed import spread
from .measure import PeerBenchmark, PeerRun, PeersConfig, Way

RATE = "tokens/s"
AGREEING = 8  # first tokens that greedy texts should share; later ones may differ by rounding


def report(race: PeerBenchmark, model: str) -> dict[str, Any]:
    config = race.config
    ours, *theirs = race.entrants
    return {
        "model": model,
        "machine": machine(config),
        "rounds": config.rounds,
        "tokens": config.tokens,
        "prompt_tokens": config.prompt_tokens,
        "batches": list(config.batches),
        "sets": {name: len(prompts) for name, prompts in race.sets.items()},
        "engines": [engine(entrant, ours, config, list(race.sets)) for entrant in race.entrants],
        "ratios": [ratio for peer in theirs for ratio in ratios(ours, peer, config, list(race.sets))],
        "skipped": [{"name": name, "reason": reason} for name, reason in race.skipped.items()],
    }


def machine(config: PeersConfig) -> dict[str, Any]:
    """Describe what computed: the processor, or the GPU."""
    if config.backend == "cpu":
        return host_facts() | {"threads": config.threads}
    from ...device import cuda  # imports Triton

    gpu = cuda.describe() or {"name": "no GPU"}
    return host_facts() | {"processor": gpu["name"], "threads": config.threads, "level": "cuda"}


def engine(entrant: PeerRun, ours: PeerRun, config: PeersConfig, sets: Sequence[str]) -> dict[str, Any]:
    return {
        "name": entrant.peer.name,
        **entrant.facts,
        "speculation": entrant.peer.speculation or None,
        "no_speculation": entrant.no_speculation,
        "decode": [decoding(entrant, way, batch, sets) for batch in config.batches for way in entrant.ways(batch)],
        "prompt_tokens_per_second": spread([config.prompt_tokens / seconds for seconds in entrant.prompts]),
        "start_seconds": spread(entrant.starts),
        "memory_bytes": entrant.memory,
        "agreement": None if entrant is ours or is_random(entrant.given) else agreement(ours, entrant),
    }


def decoding(entrant: PeerRun, way: Way, batch: int, sets: Sequence[str]) -> dict[str, Any]:
    return {
        "batch": batch,
        "way": way,
        "width": entrant.widths.get(batch) if way == "speculation" else None,
        "tokens_per_second": spread(rates(entrant, way, batch, sets)),
        "sets": {name: spread([one.rate for one in entrant.decodings[way, batch, name]]) for name in sets},
    }


def rates(entrant: PeerRun, way: Way, batch: int, sets: Sequence[str]) -> list[float]:
    """Return the tokens per second of each round, averaged over the sets."""
    by_set = [[one.rate for one in entrant.decodings[way, batch, name]] for name in sets]
    return [fmean(row) for row in zip(*by_set, strict=True)]


def best(entrant: PeerRun, batch: int, sets: Sequence[str]) -> Way:
    """Return the faster mode, plain or speculation."""
    return max(entrant.ways(batch), key=lambda way: median(rates(entrant, way, batch, sets)))


def ratios(ours: PeerRun, peer: PeerRun, config: PeersConfig, sets: Sequence[str]) -> list[dict[str, Any]]:
    """Compare us with a peer. A ratio above 1: we are faster, start sooner or take less memory."""
    found = [
        compared(f"{title}, batch {batch}", values, rates(ours, mine, batch, sets), rates(peer, its, batch, sets), RATE)
        for batch in config.batches
        for title, mine, its in pairs(ours, peer, batch, sets)
        for values in [faster(ours, mine, peer, its, batch, sets)]
    ]
    here, there = ([config.prompt_tokens / seconds for seconds in one.prompts] for one in (ours, peer))
    found.append(compared(f"prompt of {config.prompt_tokens} tokens", quotients(here, there), here, there, RATE))
    starts = quotients(peer.starts, ours.starts)
    found.append(compared("start to first token", starts, ours.starts, peer.starts, "seconds"))
    taken = quotients(resident(peer), resident(ours))
    found.append(compared("memory, plain", taken, resident(ours), resident(peer), "bytes"))
    return [{"peer": peer.peer.name, **one} for one in found]


def pairs(ours: PeerRun, peer: PeerRun, batch: int, sets: Sequence[str]) -> list[tuple[str, Way, Way]]:
    mine, its = best(ours, batch, sets), best(peer, batch, sets)
    return [
        ("plain", "plain", "plain"),
        ("best against its plain", mine, "plain"),
        ("best against its best", mine, its),
    ]


def compared(
    figure: str, values: Sequence[float], ours: Sequence[float], theirs: Sequence[float], unit: str
) -> dict[str, Any]:
    sides = {"ours": median(ours) if ours else None, "theirs": median(theirs) if theirs else None}
    return {"figure": figure, "ratio": spread(values), **sides, "unit": unit}


def faster(ours: PeerRun, mine: Way, peer: PeerRun, its: Way, batch: int, sets: Sequence[str]) -> list[float]:
    """Return our speed relative to the peer's in each round, averaged over the sets."""
    by_set = [
        [
            here.rate / there.rate
            for here, there in zip(ours.decodings[mine, batch, name], peer.decodings[its, batch, name], strict=True)
        ]
        for name in sets
    ]
    return [fmean(row) for row in zip(*by_set, strict=True)]


def quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=False)]


def resident(entrant: PeerRun) -> list[float]:
    known = entrant.memory.get("plain")
    return [] if known is None else [float(known["resident"])]


def agreement(ours: PeerRun, peer: PeerRun) -> dict[str, Any]:
    """Compare greedy texts with the peer's: a low agreement means that it is set up wrongly."""
    lengths = [shared(text, peer.texts[key]) for key, text in ours.texts.items()]
    longest = max(len(text) for text in ours.texts.values())
    checked = min(AGREEING, longest)
    return {
        "prompts": len(lengths),
        "first_tokens": checked,
        "share_of_equal_beginnings": fmean(length >= checked for length in lengths),
        "mean_equal_tokens": fmean(lengths),
    }


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens before the first difference."""
    for index, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return index
    return min(len(one), len(other))


LABELS = 236  # pixels for the names at the left
FIGURES = 64  # pixels for the numbers at the right
BAR, GAP, TOP = 15, 16, 112
REACH = ".reach{stroke:#1f2630}@media(prefers-color-scheme:dark){.reach{stroke:#e6eaef}}"
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True)
class Axis:
    low: float
    high: float

    def x(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(MARGIN + LABELS + share * (WIDTH - 2 * MARGIN - LABELS - FIGURES), 1)


def ratio_chart(found: dict[str, Any]) -> str:
    """Draw the ratios of a `report` as bars, grouped by figure, one color for each peer.

    The axis is logarithmic and bars start at 1 (equal speed); a thin line spans the lowest and the highest round.
    """
    measured = [one for one in found["ratios"] if one["ratio"] is not None]
    peers = list(dict.fromkeys(one["peer"] for one in measured))
    figures = list(dict.fromkeys(one["figure"] for one in measured))
    axis = span(measured)
    parts = [
        text(MARGIN, 36, f"Outrider against other engines, {found['model'].rpartition('/')[2]}", "title"),
        text(MARGIN, 56, facts(found), "quiet"),
        *legend(peers),
    ]
    bars: list[str] = []
    top = float(TOP)
    for figure in figures:
        group = [one for one in measured if one["figure"] == figure]
        bars.append(text(MARGIN, top + BAR * len(group) / 2 + 4, figure))
        for index, one in enumerate(group):
            bars += bar(axis, one, top + BAR * index, peers.index(one["peer"]))
        top += BAR * len(group) + GAP
    height = int(top + 32)
    parts += [*grid(axis, top - GAP / 2), *bars]
    return drawing(parts, height, "Outrider against other engines", REACH)


def facts(found: dict[str, Any]) -> str:
    machine = found["machine"]
    threads, rounds = counted(machine["threads"], "thread"), counted(found["rounds"], "round")
    return f"{machine['processor']}, {threads}, median of {rounds}; right of 1: Outrider is ahead"


def span(measured: list[dict[str, Any]]) -> Axis:
    lows = [one["ratio"]["low"] for one in measured]
    highs = [one["ratio"]["high"] for one in measured]
    low = max([tick for tick in TICKS if tick <= min([*lows, 1.0])] or [min(lows)])
    high = min([tick for tick in TICKS if tick >= max([*highs, 2.0])] or [max(highs)])
    return Axis(low, high)


def legend(peers: list[str]) -> list[str]:
    parts: list[str] = []
    left = float(MARGIN)
    for number, peer in enumerate(peers):
        parts.append(f'<rect class="bar {color(number)}" x="{left:g}" y="70" width="22" height="10" rx="2"/>')
        parts.append(text(left + 30, 80, peer))
        left += 60 + LETTER * len(peer)
    return parts


def color(number: int) -> str:
    return f"c{number % COLORS} t0"


def grid(axis: Axis, bottom: float) -> list[str]:
    parts = []
    for tick in (tick for tick in TICKS if axis.low <= tick <= axis.high):
        x, kind = axis.x(tick), "axis" if tick == 1 else "grid"
        parts.append(f'<line class="{kind}" x1="{x}" y1="{TOP - 8}" x2="{x}" y2="{bottom:g}"/>')
        parts.append(text(x, bottom + 16, f"{tick:g} x", "number", "middle"))
    return parts


def bar(axis: Axis, one: dict[str, Any], top: float, number: int) -> list[str]:
    value, low, high = (one["ratio"][name] for name in ("median", "low", "high"))
    left, right = sorted((axis.x(1), axis.x(value)))
    title = escape(f"{one['figure']}, {one['peer']}: {value:.2f} x, {low:.2f} to {high:.2f}")
    middle = top + BAR / 2
    shape = f'x="{left}" y="{top + 2:g}" width="{max(right - left, 1):.1f}" height="{BAR - 4}" rx="2"'
    return [
        f'<rect class="bar {color(number)}" {shape}><title>{title}</title></rect>',
        f'<line class="reach" x1="{axis.x(low)}" y1="{middle:g}" x2="{axis.x(high)}" y2="{middle:g}"/>',
        text(max(right, axis.x(high)) + 6, middle + 4, f"{value:.2f}" if value < 10 else f"{value:.0f}", "number"),
    ]
