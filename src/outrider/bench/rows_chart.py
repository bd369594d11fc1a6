"""Draw the figures of `outrider bench rows`: the cost of further rows, and the gain from further threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, log2
from typing import Any

from .charts import COLORS, GAP, LETTER, MARGIN, PANEL, WIDTH, Frame, counted, drawing, grid, path, text

AXIS = 34  # pixels left of a chart, for the labels of its axis
TICKS = 6  # labels of an axis at most
TOP = 132  # pixels above the charts
Points = Mapping[int, float]  # value by number of rows or threads


def rows_chart(found: dict[str, Any]) -> str:
    """Draw the figures that `bench.rows.measure` returns."""
    steps = found["steps"]
    times = {(one["threads"], one["rows"]): one["milliseconds"]["median"] for one in steps}
    threads = sorted({one["threads"] for one in steps})
    rows = sorted({one["rows"] for one in steps})
    first = threads[0]
    cost = {counted(n, "thread"): {each: times[n, each] / times[n, 1] for each in rows} for n in threads}
    gain = {counted(each, "row"): {n: times[first, each] / times[n, each] for n in threads} for each in rows}
    half = (WIDTH - 2 * MARGIN - GAP - 2 * AXIS) / 2
    left, right = MARGIN + AXIS, MARGIN + 2 * AXIS + half + GAP
    parts = [
        text(MARGIN, 36, f"Rows and threads of one step, {found['model'].rpartition('/')[2]}", "title"),
        text(MARGIN, 56, facts(found), "quiet"),
        *panel(left, half, "time of a step relative to one row", "rows", cost),
    ]
    if len(threads) > 1:
        parts += panel(right, half, f"speed relative to {counted(first, 'thread')}", "threads", gain)
    return drawing(parts, TOP + PANEL + 56, "Time of a step by rows and threads")


def facts(found: dict[str, Any]) -> str:
    machine = found["machine"]
    where = f"{machine['processor']}, {machine['level']}"
    return f"{where}; {found['context']} tokens in the cache, median of {found['rounds']} rounds"


def panel(left: float, width: float, title: str, unit: str, lines: Mapping[str, Points]) -> list[str]:
    """Draw one chart with its title and key. lines: label -> points."""
    highest = max(value for points in lines.values() for value in points.values())
    ticks = axis_ticks(highest)
    frame = Frame(left, TOP, width, PANEL, 0, ticks[-1])
    parts = [
        text(left - AXIS, TOP - 44, title, "head"),
        *key(left - AXIS, TOP - 22, lines),
        *grid(frame, ticks, "{:g}"),
    ]
    counts = sorted({count for points in lines.values() for count in points})
    span = max(log2(counts[-1]), 1)
    across = {count: round(left + 10 + (width - 20) * log2(count) / span, 1) for count in counts}
    for count, x in across.items():
        parts.append(text(x, TOP + PANEL + 18, str(count), "number", "middle"))
    parts.append(text(left + width / 2, TOP + PANEL + 38, unit, "quiet", "middle"))
    for number, (label, points) in enumerate(lines.items()):
        color = f"c{number % COLORS}"
        parts.append(path([(across[count], frame.y(value)) for count, value in points.items()], f"{color} t0"))
        for count, value in points.items():
            hint = escape(f"{label}, {counted(count, unit.removesuffix('s'))}: {value:.2f}")
            at = f'cx="{across[count]}" cy="{frame.y(value)}"'
            parts.append(f'<circle class="dot {color}" {at} r="3"><title>{hint}</title></circle>')
    return parts


def key(left: float, top: float, lines: Mapping[str, Points]) -> list[str]:
    """Draw the key of a chart: a number in the color of its line."""
    parts = []
    unit = list(lines)[-1].partition(" ")[2]
    for number, label in enumerate(lines):
        count = label.partition(" ")[0]
        parts.append(path([(left, top), (left + 16, top)], f"c{number % COLORS} t0"))
        parts.append(text(left + 21, top + 4, count))
        left += 21 + LETTER * len(count) + 14
    return [*parts, text(left, top + 4, unit, "quiet")]


def axis_ticks(highest: float) -> Sequence[float]:
    """Return round numbers from 0 to `highest` or just above, `TICKS` + 1 at most."""
    sizes = (size * scale for scale in (1, 10, 100, 1000) for size in (1, 2, 5))
    step = next(size for size in sizes if highest <= TICKS * size)
    return [float(step * number) for number in range(ceil(highest / step) + 1)]
