"""Draw self-contained SVG charts for light and dark pages, and the chart of `outrider bench acceptance`.

That chart has acceptance rates by depth as lines above, and mean acceptance lengths as bars below. Each drafter has a
color; further temperatures have dashed lines and paler bars.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ..speculation.config import short_spec

PANEL = 220  # height of the axes in pixels
GAP = 56  # pixels between the two line charts, for the labels of an axis

Figures = dict[str, Any]  # as bench/acceptance.py yields them


@dataclass(frozen=True)
class Series:
    """A drafter at one temperature."""

    drafter: str
    color: int
    shade: int
    figures: Figures

    @property
    def classes(self) -> str:
        return f"c{self.color} t{self.shade}"

    @property
    def label(self) -> str:
        return f"{self.drafter}, temperature {self.figures['temperature']:g}"


@dataclass(frozen=True)
class Frame:
    """Position of a chart, and the values at its lower and upper edge."""

    left: float
    top: float
    width: float
    height: float
    low: float
    high: float

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.top + self.height * (1 - share), 1)


def acceptance_chart(found: Sequence[Figures]) -> str:
    """Draw the figures that `bench.acceptance.measure` yields."""
    all_series = series(found)
    keys, below = legend(all_series, 76)
    lines = below + 56
    half = (WIDTH - 2 * MARGIN - GAP - 2 * 34) / 2
    left = Frame(MARGIN + 34, lines, half, PANEL, 0, 1)
    right = Frame(MARGIN + 34 + half + GAP + 34, lines, half, PANEL, 0, 1)
    highest = max(one["mean_acceptance_length"] for each in found for one in each["sets"].values())
    top = lines + PANEL + 92
    bars = Frame(MARGIN + 34, top, WIDTH - 2 * MARGIN - 34, PANEL, 0, max(2.0, float(int(highest) + 1)))
    height = int(top + PANEL + 52)
    facts = f"at most {found[0]['max_tokens']} tokens per prompt, mean of {len(found[0]['sets'])} sets"
    parts = [
        text(MARGIN, 36, f"Acceptance of drafts, {found[0]['model'].rpartition('/')[2]}", "title"),
        text(MARGIN, 56, facts if len(found[0]["sets"]) > 1 else facts.partition(",")[0], "quiet"),
        *keys,
        *rate_lines(left, all_series, "acceptance_rates", "acceptance rate by depth"),
        *rate_lines(
            right, all_series, "conditional_rates", "conditional rate: given that the token before was accepted"
        ),
        *length_bars(bars, all_series),
    ]
    return drawing(parts, height, "Acceptance rate by depth and mean acceptance length")


def series(found: Sequence[Figures]) -> list[Series]:
    drafters = list(dict.fromkeys(one["drafter"] for one in found))
    temperatures = list(dict.fromkeys(one["temperature"] for one in found))
    return [
        Series(
            short_spec(one["drafter"]),
            drafters.index(one["drafter"]) % COLORS,
            temperatures.index(one["temperature"]) % len(DASHES),
            one,
        )
        for one in found
    ]


def legend(all_series: Sequence[Series], top: float) -> tuple[list[str], float]:
    """Draw the key of colors and, with several temperatures, of line styles; return its elements and bottom edge."""
    keys = [(one.drafter, f"c{one.color} t0") for one in all_series if not one.shade]
    kinds = [(f"temperature {one.figures['temperature']:g}", f"any t{one.shade}") for one in all_series]
    keys += list(dict.fromkeys(kinds)) if len(set(kinds)) > 1 else []
    parts: list[str] = []
    left: float = MARGIN
    for label, classes in keys:
        width = 34 + LETTER * len(label) + 20
        if left + width > WIDTH - MARGIN and left > MARGIN:
            left, top = MARGIN, top + 20
        parts.append(path([(left, top), (left + 26, top)], classes))
        parts.append(text(left + 34, top + 4, label))
        left += width
    return parts, top


def rate_lines(frame: Frame, all_series: Sequence[Series], rates: str, title: str) -> list[str]:
    parts = [text(frame.left - 34, frame.top - 16, title, "head"), *grid(frame, [0, 0.25, 0.5, 0.75, 1], "{:.0%}")]
    deepest = max([len(one.figures["mean"][rates]) for one in all_series] + [1])
    step = frame.width / deepest
    for depth in range(deepest):
        parts.append(
            text(frame.left + step * (depth + 0.5), frame.top + frame.height + 18, str(depth + 1), "number", "middle")
        )
    parts.append(text(frame.left + frame.width / 2, frame.top + frame.height + 36, "depth", "quiet", "middle"))
    for one in all_series:
        known = [(depth, rate) for depth, rate in enumerate(one.figures["mean"][rates]) if rate is not None]
        points = [(round(frame.left + step * (depth + 0.5), 1), frame.y(rate)) for depth, rate in known]
        if points:
            parts.append(path(points, one.classes))
        for (x, y), (depth, rate) in zip(points, known, strict=True):
            title = escape(f"{one.label}, depth {depth + 1}: {rate:.1%}")
            parts.append(f'<circle class="dot c{one.color}" cx="{x}" cy="{y}" r="3"><title>{title}</title></circle>')
    return parts


def length_bars(frame: Frame, all_series: Sequence[Series]) -> list[str]:
    names = list(all_series[0].figures["sets"])
    groups = [*names, "mean"] if len(names) > 1 else names
    title = "mean acceptance length: tokens per step that verifies a draft, with the model's own"
    ticks = [float(value) for value in range(int(frame.high) + 1)]
    parts = [text(frame.left - 34, frame.top - 16, title, "head"), *grid(frame, ticks, "{:g}")]
    span = frame.width / len(groups)
    width = min(span * 0.84 / len(all_series), 44)
    for index, name in enumerate(groups):
        middle = frame.left + span * (index + 0.5)
        kind = "head" if name == "mean" else ""
        parts.append(text(middle, frame.top + frame.height + 20, name, kind, "middle"))
        for number, one in enumerate(all_series):
            figures = one.figures["mean"] if name == "mean" and len(names) > 1 else one.figures["sets"][name]
            value = figures["mean_acceptance_length"]
            x, y = round(middle + width * (number - len(all_series) / 2), 1), frame.y(value)
            label = escape(f"{one.label}, {name}: {value:.2f}")
            shape = f'x="{x + 1}" y="{y}" width="{round(width - 2, 1)}" height="{round(frame.y(0) - y, 1)}" rx="2"'
            parts.append(f'<rect class="bar {one.classes}" {shape}><title>{label}</title></rect>')
            if width >= 20:  # a narrower bar has no space for a number
                digits = f"{value:.2f}" if width >= 28 else f"{value:.1f}"
                parts.append(text(x + width / 2, y - 5, digits, "number", "middle"))
    return parts


def grid(frame: Frame, values: Sequence[float], form: str) -> list[str]:
    parts = []
    for value in values:
        y = frame.y(value)
        kind = "grid" if value > values[0] else "axis"
        parts.append(f'<line class="{kind}" x1="{frame.left}" y1="{y}" x2="{frame.left + frame.width}" y2="{y}"/>')
        parts.append(text(frame.left - 8, y + 4, form.format(value), "number", "end"))
    return parts


def path(points: Sequence[tuple[float, float]], classes: str) -> str:
    along = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline class="line {classes}" points="{along}"/>'


WIDTH, MARGIN = 960, 28
LIGHT = ("#2467c4", "#d2571f", "#12876a", "#8748c9", "#c22f55", "#a8780a", "#56687a", "#c14ba6")
DARK = ("#74aef5", "#f3926a", "#4fcaa5", "#bd97f2", "#f27f98", "#e2b64c", "#a5b4c4", "#ee96d6")
COLORS = len(LIGHT)  # that can be distinguished
DASHES = ("none", "6 4", "2 4", "8 3 2 3")
LETTER = 7.2  # approximate width of a letter at 12 px


def drawing(parts: Iterable[str], height: int, label: str, more_style: str = "") -> str:
    """Assemble an SVG that follows the reader's color scheme. label: description for screen readers."""
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{label}">\n<style>{style()}{more_style}</style>\n'
        f'<rect class="page" width="{WIDTH}" height="{height}"/>\n{inner}\n</svg>\n'
    )


def style() -> str:
    def colors(chosen: Sequence[str]) -> str:
        return "".join(f".c{number}{{color:{color}}}" for number, color in enumerate(chosen))

    dashes = "".join(f".t{shade}{{stroke-dasharray:{dash}}}" for shade, dash in enumerate(DASHES))
    pale = "".join(f".bar.t{shade}{{opacity:{1 - 0.25 * shade:g}}}" for shade in range(len(DASHES)))
    return (
        "text{font:12px system-ui,sans-serif;fill:#1f2630}.title{font-size:18px;font-weight:600}"
        ".head{font-weight:600}.quiet{fill:#5d6977}.number{font-size:11px;fill:#5d6977}.page{fill:#fff}"
        ".grid{stroke:#dfe4ea}.axis{stroke:#8a96a3}.any{color:#5d6977}"
        ".line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}"
        ".dot,.bar{fill:currentColor}"
        f"{colors(LIGHT)}{dashes}{pale}"
        "@media(prefers-color-scheme:dark){text{fill:#e6eaef}.quiet,.number{fill:#9aa6b2}.page{fill:#14181d}"
        f".any{{color:#9aa6b2}}.grid{{stroke:#2a323b}}.axis{{stroke:#65717e}}{colors(DARK)}}}"
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
