"""Parts of a trace as drawings, which whoever shows them styles: the tree of a step, the times of all steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .trace import TraceStep, columns, rows, visible

LINE, GAP, LETTER, PADDING = 24, 12, 7.25, 6  # pixels; a letter of the fixed-width font at 12
NUMBERED = 48  # steps whose bars have room for a number above them
PARTS = ("draft", "verify", "host")


def tree(step: TraceStep, left: float, top: float, widest: float, most: int) -> tuple[list[str], float, float]:
    """What was drafted, from left to right, and how wide and high that is.

    The way that was kept is drawn in full lines, the rest dashed and struck out. Left out is what stands further right
    than `widest`, or below so many lines.
    """
    lines = rows(step)
    boxes = [PADDING * 2 + LETTER * columns(visible(node.text)) for node in step.nodes]
    starts = [left + 14 + GAP]
    for depth in range(1 + max((node.depth for node in step.nodes), default=-1)):
        deepest = max(wide for wide, node in zip(boxes, step.nodes, strict=True) if node.depth == depth)
        starts.append(starts[depth] + deepest + 2 * GAP)
    edges, found = [], [f'<circle class="root" cx="{left + 6:g}" cy="{top + LINE / 2:g}" r="4"/>']
    ends = {-1: (left + 8, (top + LINE / 2))}
    drawn = 0
    for place, node in enumerate(step.nodes):
        x, y = starts[node.depth], top + LINE * (lines[place] + 0.5)
        if x + boxes[place] > left + widest or lines[place] >= most or node.parent not in ends:
            continue
        ends[place], drawn = (x + boxes[place], y), drawn + 1
        edges.append(edge(ends[node.parent], (x, y), "kept" if node.kept else "thrown"))
        found.append(box(x, y, boxes[place], visible(node.text), "kept" if node.kept else "thrown", node.drafters))
    width = max((x for x, _ in ends.values()), default=left) - left
    if drawn < len(step.nodes):
        found.append(text(left + width + 8, (top + LINE / 2) + 4, f"+{len(step.nodes) - drawn}", "quiet"))
        width += 40
    height = LINE * (1 + max((lines[place] for place in ends if place >= 0), default=0))
    return [*edges, *found], width + 2, height


def edge(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    bend = f"C{start[0] + GAP:g},{start[1]:g} {end[0] - GAP:g},{end[1]:g} {end[0]:g},{end[1]:g}"
    return f'<path class="edge {kind}" d="M{start[0]:g},{start[1]:g} {bend}"/>'


def box(x: float, y: float, width: float, label: str, kind: str, drafters: Sequence[str] = ()) -> str:
    told = f"<title>{escape(' and '.join(drafters))}</title>" if drafters else ""
    return (
        f'<g class="node {kind}"><rect x="{x:g}" y="{y - 9:g}" width="{width:g}" height="18" rx="4"/>'
        f"{text(x + PADDING, y + 4, label, 'mono')}{told}</g>"
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(content)}</text>'


def tree_figure(step: TraceStep) -> str:
    """For a page, which styles it."""
    parts, width, height = tree(step, 0, 0, math.inf, len(step.nodes))
    told = f"A tree of {len(step.nodes)} drafted tokens, {step.kept} kept"
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return f'<svg class="tree" {size} role="img" aria-label="{told}">{"".join(parts)}</svg>'


def times_figure(steps: Sequence[TraceStep]) -> str:
    """A bar for each step: where its time went, and above it the tokens that it gave."""
    width, height, top, left = 720.0, 150.0, 22.0, 72.0
    longest = max((step.seconds for step in steps), default=0.0) or 1.0
    pitch = (width - left) / max(len(steps), 1)
    thick = min(pitch * 0.8, 28.0)
    parts = [
        f'<line class="rule" x1="{left:g}" x2="{width:g}" y1="{y:g}" y2="{y:g}"/>' for y in (top, top + height / 2)
    ]
    parts += [
        text(left - 6, top + 4, f"{1000 * longest:.3g} ms", "quiet", "end"),
        text(left - 6, top + height / 2 + 4, f"{500 * longest:.3g}", "quiet", "end"),
        text(left - 6, top + height + 4, "0", "quiet", "end"),
    ]
    for at, step in enumerate(steps):
        x, y = left + pitch * (at + 0.5) - thick / 2, top + height
        told = escape(f"step {step.number}: {len(step.tokens)} tokens, {spent(step)}")
        bars = []
        for part in PARTS:
            tall = height * getattr(step, part) / longest
            y -= tall
            bars.append(f'<rect class="{part}" x="{x:.2f}" y="{y:.2f}" width="{thick:.2f}" height="{tall:.2f}"/>')
        parts.append(f'<a href="#s{step.number}"><title>{told}</title>{"".join(bars)}</a>')
        if len(steps) <= NUMBERED:
            parts.append(text(x + thick / 2, y - 4, str(len(step.tokens)), "quiet", "middle"))
    parts.append(f'<line class="axis" x1="{left:g}" x2="{width:g}" y1="{top + height:g}" y2="{top + height:g}"/>')
    told = f"Milliseconds of {len(steps)} steps, by draft, verify and host"
    size = f'viewBox="0 0 {width:g} {top + height + 6:g}"'
    return f'<svg class="times" {size} role="img" aria-label="{told}">{"".join(parts)}</svg>'


def spent(step: TraceStep) -> str:
    return ", ".join(f"{part} {1000 * getattr(step, part):.1f} ms" for part in PARTS)
