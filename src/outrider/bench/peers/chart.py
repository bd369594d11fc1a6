"""The ratios of `outrider bench peers` as a picture: an SVG that needs nothing else and suits a dark page too.

A group of bars for each figure, a colour for each peer. The axis is logarithmic, bars begin at 1, where both are alike;
a thin line goes from the lowest to the highest round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Any

from ..svg import COLOURS, LETTER, MARGIN, WIDTH, drawing, text

LABELS = 236  # width of the names at the left
FIGURES = 64  # and of the numbers at the right
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
    """`found` as `report` of peers/report.py gives it."""
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
        for at, one in enumerate(group):
            bars += bar(axis, one, top + BAR * at, peers.index(one["peer"]))
        top += BAR * len(group) + GAP
    height = int(top + 32)
    parts += [*grid(axis, top - GAP / 2), *bars]
    return drawing(parts, height, "Outrider against other engines", REACH)


def facts(found: dict[str, Any]) -> str:
    machine = found["machine"]
    threads, rounds = counted(machine["threads"], "thread"), counted(found["rounds"], "round")
    return f"{machine['processor']}, {threads}, median of {rounds}; to the right of 1 it is ahead"


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


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
        parts.append(f'<rect class="bar {colour(number)}" x="{left:g}" y="70" width="22" height="10" rx="2"/>')
        parts.append(text(left + 30, 80, peer))
        left += 60 + LETTER * len(peer)
    return parts


def colour(number: int) -> str:
    return f"c{number % COLOURS} t0"


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
    told = escape(f"{one['figure']}, {one['peer']}: {value:.2f} x, {low:.2f} to {high:.2f}")
    middle = top + BAR / 2
    shape = f'x="{left}" y="{top + 2:g}" width="{max(right - left, 1):.1f}" height="{BAR - 4}" rx="2"'
    return [
        f'<rect class="bar {colour(number)}" {shape}><title>{told}</title></rect>',
        f'<line class="reach" x1="{axis.x(low)}" y1="{middle:g}" x2="{axis.x(high)}" y2="{middle:g}"/>',
        text(max(right, axis.x(high)) + 6, middle + 4, f"{value:.2f}" if value < 10 else f"{value:.0f}", "number"),
    ]
