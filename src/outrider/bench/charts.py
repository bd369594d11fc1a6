"""The figures of `outrider bench acceptance` as a picture: an SVG that needs nothing else and suits a dark page too.

Above, the rates by position as lines, below, the mean lengths as bars. A drafter is a colour; a further temperature is
a broken line and a paler bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ..diagnostics.method_spec import short

PANEL = 220  # height of the axes
GAP = 56  # between the two panels of lines: room for the labels of an axis

Found = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """A drafter at one temperature."""

    drafter: str
    colour: int
    shade: int
    found: Found

    @property
    def classes(self) -> str:
        return f"c{self.colour} t{self.shade}"

    @property
    def label(self) -> str:
        return f"{self.drafter}, temperature {self.found['temperature']:g}"


@dataclass(frozen=True)
class Frame:
    """Where a panel is drawn, and the values at its upper and lower edge."""

    left: float
    top: float
    width: float
    height: float
    low: float
    high: float

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.top + self.height * (1 - share), 1)


def acceptance_chart(found: Sequence[Found]) -> str:
    """`found` as `measure` of bench/acceptance.py gives it."""
    every = series(found)
    keys, below = legend(every, 76)
    lines = below + 56
    half = (WIDTH - 2 * MARGIN - GAP - 2 * 34) / 2
    left = Frame(MARGIN + 34, lines, half, PANEL, 0, 1)
    right = Frame(MARGIN + 34 + half + GAP + 34, lines, half, PANEL, 0, 1)
    highest = max(one["mean_acceptance_length"] for each in found for one in each["sets"].values())
    top = lines + PANEL + 92
    bars = Frame(MARGIN + 34, top, WIDTH - 2 * MARGIN - 34, PANEL, 0, max(2.0, float(int(highest) + 1)))
    height = int(top + PANEL + 52)
    facts = f"at most {found[0]['max_tokens']} tokens a prompt, mean of {len(found[0]['sets'])} sets"
    parts = [
        text(MARGIN, 36, f"What {found[0]['model'].rpartition('/')[2]} keeps of drafts", "title"),
        text(MARGIN, 56, facts if len(found[0]["sets"]) > 1 else facts.partition(",")[0], "quiet"),
        *keys,
        *rate_lines(left, every, "acceptance_rates", "share of steps that keep the token at a position"),
        *rate_lines(right, every, "conditional_rates", "the same, of those that kept the one before"),
        *length_bars(bars, every),
    ]
    return drawing(parts, height, "Acceptance by position, and mean accepted length")


def series(found: Sequence[Found]) -> list[Series]:
    drafters = list(dict.fromkeys(one["drafter"] for one in found))
    temperatures = list(dict.fromkeys(one["temperature"] for one in found))
    return [
        Series(
            short(one["drafter"]),
            drafters.index(one["drafter"]) % COLOURS,
            temperatures.index(one["temperature"]) % len(DASHES),
            one,
        )
        for one in found
    ]


def legend(every: Sequence[Series], top: float) -> tuple[list[str], float]:
    """A key for each colour, and, where there are several temperatures, for each kind of line; and where they end."""
    keys = [(one.drafter, f"c{one.colour} t0") for one in every if not one.shade]
    kinds = [(f"temperature {one.found['temperature']:g}", f"any t{one.shade}") for one in every]
    keys += list(dict.fromkeys(kinds)) if len(set(kinds)) > 1 else []
    parts: list[str] = []
    left: float = MARGIN
    for told, classes in keys:
        width = 34 + LETTER * len(told) + 20
        if left + width > WIDTH - MARGIN and left > MARGIN:
            left, top = MARGIN, top + 20
        parts.append(path([(left, top), (left + 26, top)], classes))
        parts.append(text(left + 34, top + 4, told))
        left += width
    return parts, top


def rate_lines(frame: Frame, every: Sequence[Series], rates: str, title: str) -> list[str]:
    parts = [text(frame.left - 34, frame.top - 16, title, "head"), *grid(frame, [0, 0.25, 0.5, 0.75, 1], "{:.0%}")]
    deepest = max([len(one.found["mean"][rates]) for one in every] + [1])
    step = frame.width / deepest
    for depth in range(deepest):
        parts.append(
            text(frame.left + step * (depth + 0.5), frame.top + frame.height + 18, str(depth + 1), "number", "middle")
        )
    parts.append(text(frame.left + frame.width / 2, frame.top + frame.height + 36, "position", "quiet", "middle"))
    for one in every:
        known = [(depth, rate) for depth, rate in enumerate(one.found["mean"][rates]) if rate is not None]
        points = [(round(frame.left + step * (depth + 0.5), 1), frame.y(rate)) for depth, rate in known]
        if points:
            parts.append(path(points, one.classes))
        for (x, y), (depth, rate) in zip(points, known, strict=True):
            told = escape(f"{one.label}, position {depth + 1}: {rate:.1%}")
            parts.append(f'<circle class="dot c{one.colour}" cx="{x}" cy="{y}" r="3"><title>{told}</title></circle>')
    return parts


def length_bars(frame: Frame, every: Sequence[Series]) -> list[str]:
    names = list(every[0].found["sets"])
    groups = [*names, "mean"] if len(names) > 1 else names
    title = "tokens a step that verifies a draft, the model's own included"
    ticks = [float(value) for value in range(int(frame.high) + 1)]
    parts = [text(frame.left - 34, frame.top - 16, title, "head"), *grid(frame, ticks, "{:g}")]
    span = frame.width / len(groups)
    width = min(span * 0.84 / len(every), 44)
    for at, name in enumerate(groups):
        middle = frame.left + span * (at + 0.5)
        kind = "head" if name == "mean" else ""
        parts.append(text(middle, frame.top + frame.height + 20, name, kind, "middle"))
        for number, one in enumerate(every):
            figures = one.found["mean"] if name == "mean" and len(names) > 1 else one.found["sets"][name]
            value = figures["mean_acceptance_length"]
            x, y = round(middle + width * (number - len(every) / 2), 1), frame.y(value)
            told = escape(f"{one.label}, {name}: {value:.2f}")
            shape = f'x="{x + 1}" y="{y}" width="{round(width - 2, 1)}" height="{round(frame.y(0) - y, 1)}" rx="2"'
            parts.append(f'<rect class="bar {one.classes}" {shape}><title>{told}</title></rect>')
            if width >= 20:  # else it has no room
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
COLOURS = len(LIGHT)  # that can be told apart
DASHES = ("none", "6 4", "2 4", "8 3 2 3")
LETTER = 7.2  # width of a letter, nearly, in a line of 12


def drawing(parts: Iterable[str], height: int, label: str, more_style: str = "") -> str:
    """The parts on a page of the reader's own brightness. label: what it shows, for those who do not see it."""
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{label}">\n<style>{style()}{more_style}</style>\n'
        f'<rect class="page" width="{WIDTH}" height="{height}"/>\n{inner}\n</svg>\n'
    )


def style() -> str:
    def colours(chosen: Sequence[str]) -> str:
        return "".join(f".c{number}{{color:{colour}}}" for number, colour in enumerate(chosen))

    dashes = "".join(f".t{shade}{{stroke-dasharray:{dash}}}" for shade, dash in enumerate(DASHES))
    pale = "".join(f".bar.t{shade}{{opacity:{1 - 0.25 * shade:g}}}" for shade in range(len(DASHES)))
    return (
        "text{font:12px system-ui,sans-serif;fill:#1f2630}.title{font-size:18px;font-weight:600}"
        ".head{font-weight:600}.quiet{fill:#5d6977}.number{font-size:11px;fill:#5d6977}.page{fill:#fff}"
        ".grid{stroke:#dfe4ea}.axis{stroke:#8a96a3}.any{color:#5d6977}"
        ".line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}"
        ".dot,.bar{fill:currentColor}"
        f"{colours(LIGHT)}{dashes}{pale}"
        "@media(prefers-color-scheme:dark){text{fill:#e6eaef}.quiet,.number{fill:#9aa6b2}.page{fill:#14181d}"
        f".any{{color:#9aa6b2}}.grid{{stroke:#2a323b}}.axis{{stroke:#65717e}}{colours(DARK)}}}"
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'
