"""Render a trace as an HTML page, or as one picture of every step.

The page is self-contained: no scripts, no external files, light and dark mode. Its trees and times are SVG, as is the
picture.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from ..errors import UserError
from .machine import machine_title
from .trace import AnswerStep, AnswerTrace, Ending, columns, rows, sentence, visible

STYLES = (Path(__file__).parent.parent / "pages.css", Path(__file__).parent / "trace_page.css")
LEGEND = {
    "kept": "drafted and accepted",
    "corrected": "chosen by the model where the draft was rejected",
    "bonus": "chosen by the model after a fully accepted draft",
    "plain": "chosen by the model without a draft",
}
MAX_DEPTH = 16  # depths in the table of acceptance rates

# ---- measures and colors of the drawings ----

LINE, GAP, LETTER, PADDING = 24, 12, 7.25, 6  # pixels; LETTER is one column of the fixed-width font at 12 px
NUMBERED = 48  # with more steps, the bars are too narrow for numbers above them
WIDTH, MARGIN = 1280, 32
NUMBER, TREE, TIMES, REASON = 32, 96, 900, 1100  # left edges of the columns in pixels
MAX_LINES = 12  # of one step's tree
INK, FADED, RULE = "#1d1f21", "#5d6166", "#dedad1"
COLORS = {"kept": "#0072b2", "corrected": "#c24e00", "bonus": "#007f5c", "plain": INK, "thrown": FADED}
PARTS = {"draft": "#cc79a7", "verify": "#0072b2", "host": "#8a8f96"}
SANS = "'DejaVu Sans','Noto Sans','Segoe UI','Helvetica Neue',Arial,sans-serif"
MONO = "'DejaVu Sans Mono','Noto Sans Mono',Menlo,Consolas,monospace"


# ---- page ----


def page(trace: AnswerTrace) -> str:
    """Return the page as HTML."""
    name = escape(trace.model.rpartition("/")[2])
    body = "\n".join([*head(trace, name), *figures(trace), *steps(trace)])
    style = "\n".join(path.read_text(encoding="utf-8") for path in STYLES)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{name} with {escape(trace.method)}, step by step</title>\n"
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def head(trace: AnswerTrace, name: str) -> Iterator[str]:
    drafts = "without drafts" if trace.method == "none" else f"with drafts by <b>{escape(trace.method)}</b>"
    where = escape(machine_title(trace.machine))
    yield f"<header><h1>{name}</h1><p>{drafts}, temperature {trace.temperature:g}, on {where}</p></header>"
    yield f'<section><h2>Prompt</h2><p class="prompt">{escape(trace.prompt)}</p>'
    keys = (f'<li><span class="token {kind}">token</span> {meaning}</li>' for kind, meaning in LEGEND.items())
    yield f'<h2>Answer</h2><ul class="legend">{"".join(keys)}</ul>'
    yield f'<p class="answer">{"".join(answer(trace.steps))}</p></section>'


def answer(steps: Iterable[AnswerStep]) -> Iterator[str]:
    """Yield the text of each step as a link to its details."""
    for step in steps:
        tokens = "".join(
            f'<span class="token {"kept" if index < step.kept else step.own}">{escape(words)}</span>'
            for index, words in enumerate(step.shown)
            if words
        )
        title = escape(f"Step {step.number}: {sentence(step)}", quote=True)
        yield f'<a class="step" href="#s{step.number}" title="{title}">{tokens}</a>'


def figures(trace: AnswerTrace) -> Iterator[str]:
    count = max(len(trace.steps), 1)
    share = f"{trace.kept / trace.drafted:.0%}" if trace.drafted else "none"
    values = {
        "tokens": str(trace.tokens),
        "steps": str(len(trace.steps)),
        "tokens per step": f"{trace.tokens / count:.2f}",
        "accepted": f"{share} <small>{trace.kept} of {trace.drafted}</small>",
        "tokens per second": f"{trace.tokens_per_second:.1f}",
        "prefill": f"{1000 * trace.first_step_seconds:.0f} ms <small>{trace.prompt_tokens} tokens</small>",
    }
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in values.items())
    yield f'<section><dl class="figures">{items}</dl></section>'
    if trace.later:
        yield f"<section><h2>Time by phase</h2>{shares(trace)}{times_figure(trace.later)}"
        above = "; above it, its number of tokens" if len(trace.later) <= NUMBERED else ""
        yield f'<p class="note quiet">One bar for each step after prefill{above}.</p></section>'
    if trace.drafted:
        listed = "".join(positions(trace))
        yield f'<section><h2>Acceptance rate by depth</h2><ol class="positions">{listed}</ol></section>'


def shares(trace: AnswerTrace) -> str:
    """Return a stacked bar of the time in draft, verify and host, with a legend."""
    spent = {part: sum(getattr(step, part) for step in trace.later) for part in PARTS}
    whole = sum(spent.values()) or 1.0
    bar = "".join(f'<span class="{part}" style="flex:{seconds / whole:.4f}"></span>' for part, seconds in spent.items())
    keys = "".join(
        f'<li><i class="{part}"></i>{part} <b>{seconds / whole:.1%}</b> '
        f'<span class="quiet">{1000 * seconds / len(trace.later):.2f} ms per step</span></li>'
        for part, seconds in spent.items()
    )
    return f'<div class="bar" aria-hidden="true">{bar}</div><ul class="parts">{keys}</ul>'


def positions(trace: AnswerTrace) -> Iterator[str]:
    for depth, (drafted, accepted) in enumerate(trace.rates()[:MAX_DEPTH], 1):
        rate = accepted / drafted
        yield (
            f'<li><span class="depth">{depth}</span><span class="track"><span style="width:{rate:.1%}"></span></span>'
            f'<span class="share">{rate:.0%}</span><span class="quiet">{accepted} of {drafted}</span></li>'
        )


def steps(trace: AnswerTrace) -> Iterator[str]:
    """Yield the list of steps; radio buttons filter it through the style sheet alone."""
    known = [ending for ending in Ending if any(step.ending is ending for step in trace.steps)]
    yield '<section class="steps"><h2>Step by step</h2><fieldset><legend>Show</legend>'
    yield '<label><input type="radio" name="show" id="show-all" checked> all</label>'
    for ending in known:
        count = sum(step.ending is ending for step in trace.steps)
        yield (
            f'<label><input type="radio" name="show" id="show-{kind(ending)}"> {ending.value} '
            f'<span class="quiet">{count}</span></label>'
        )
    yield "</fieldset><ol>"
    for step in trace.steps:
        yield "".join(one_step(step, trace.prompt_tokens if step.number == 1 else 0))
    yield "</ol></section>"


def one_step(step: AnswerStep, prompt: int) -> Iterator[str]:
    """Yield the card of a step; without a draft it is a single line."""
    yield f'<li class="card {kind(step.ending)}" id="s{step.number}"><p class="line"><b>{step.number}</b>'
    if step.nodes:
        yield f'<span class="ending">{step.ending.value}</span><span>{step.kept} of {len(step.nodes)} accepted</span>'
    else:
        reason = f"prefill, {prompt} tokens" if prompt else step.ending.value
        yield f'<span class="ending">{reason}</span><span class="chips">{added(step)}</span>'
    yield '<span class="spent quiet">'
    yield " · ".join(f"{part}&nbsp;{1000 * getattr(step, part):.2f}" for part in PARTS)
    yield "&nbsp;ms</span></p>"
    if step.nodes:
        if step.branches:
            yield f'<div class="scroll" tabindex="0">{tree_figure(step)}</div><p class="chips">{added(step)}</p>'
        else:
            drafted = "".join(chip(node.text, "kept" if node.kept else "thrown") for node in step.nodes)
            yield f'<p class="chips">{drafted}{added(step) if len(step.texts) > step.kept else ""}</p>'
        yield f'<p class="quiet">{escape(sentence(step))}</p>'
    yield "</li>\n"


def added(step: AnswerStep) -> str:
    """Return the tokens that the model added to the accepted ones; for a tree, the accepted ones too."""
    first = 0 if step.branches else step.kept
    chips = (
        chip(text, "kept" if index < step.kept else step.own) for index, text in enumerate(step.texts) if index >= first
    )
    return f'<span class="then">→</span>{"".join(chips)}'


def chip(text: str, kind: str) -> str:
    tag = "s" if kind == "thrown" else "span"
    return f'<{tag} class="chip {kind}">{escape(visible(text))}</{tag}>'


def kind(ending: Ending) -> str:
    return ending.value.replace(" ", "-")


# ---- drawings ----


def tree(step: AnswerStep, left: float, top: float, max_width: float, max_lines: int) -> tuple[list[str], float, float]:
    """Draw the drafted tree from left to right; return its elements, width and height.

    The accepted branch has solid lines, rejected tokens are dashed and struck out. Tokens beyond `max_width` or below
    `max_lines` are left out and counted.
    """
    lines = rows(step)
    boxes = [PADDING * 2 + LETTER * columns(visible(node.text)) for node in step.nodes]
    starts = [left + 14 + GAP]
    for depth in range(1 + max((node.depth for node in step.nodes), default=-1)):
        widest = max(width for width, node in zip(boxes, step.nodes, strict=True) if node.depth == depth)
        starts.append(starts[depth] + widest + 2 * GAP)
    edges, nodes = [], [f'<circle class="root" cx="{left + 6:g}" cy="{top + LINE / 2:g}" r="4"/>']
    ends = {-1: (left + 8, (top + LINE / 2))}
    drawn = 0
    for index, node in enumerate(step.nodes):
        x, y = starts[node.depth], top + LINE * (lines[index] + 0.5)
        if x + boxes[index] > left + max_width or lines[index] >= max_lines or node.parent not in ends:
            continue
        ends[index], drawn = (x + boxes[index], y), drawn + 1
        edges.append(edge(ends[node.parent], (x, y), "kept" if node.kept else "thrown"))
        nodes.append(box(x, y, boxes[index], visible(node.text), "kept" if node.kept else "thrown", node.drafters))
    width = max((x for x, _ in ends.values()), default=left) - left
    if drawn < len(step.nodes):
        nodes.append(text(left + width + 8, (top + LINE / 2) + 4, f"+{len(step.nodes) - drawn}", "quiet"))
        width += 40
    height = LINE * (1 + max((lines[index] for index in ends if index >= 0), default=0))
    return [*edges, *nodes], width + 2, height


def edge(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    bend = f"C{start[0] + GAP:g},{start[1]:g} {end[0] - GAP:g},{end[1]:g} {end[0]:g},{end[1]:g}"
    return f'<path class="edge {kind}" d="M{start[0]:g},{start[1]:g} {bend}"/>'


def box(x: float, y: float, width: float, label: str, kind: str, drafters: Sequence[str] = ()) -> str:
    title = f"<title>{escape(' and '.join(drafters))}</title>" if drafters else ""
    return (
        f'<g class="node {kind}"><rect x="{x:g}" y="{y - 9:g}" width="{width:g}" height="18" rx="4"/>'
        f"{text(x + PADDING, y + 4, label, 'mono')}{title}</g>"
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(content)}</text>'


def tree_figure(step: AnswerStep) -> str:
    """Draw the tree of a step; the page styles it."""
    parts, width, height = tree(step, 0, 0, math.inf, len(step.nodes))
    label = f"A tree of {len(step.nodes)} drafted tokens, {step.kept} accepted"
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return f'<svg class="tree" {size} role="img" aria-label="{label}">{"".join(parts)}</svg>'


def times_figure(steps: Sequence[AnswerStep]) -> str:
    """Draw a stacked bar of the times of each step, with its number of tokens above."""
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
    for index, step in enumerate(steps):
        x, y = left + pitch * (index + 0.5) - thick / 2, top + height
        title = escape(f"step {step.number}: {len(step.tokens)} tokens, {spent(step)}")
        bars = []
        for part in PARTS:
            tall = height * getattr(step, part) / longest
            y -= tall
            bars.append(f'<rect class="{part}" x="{x:.2f}" y="{y:.2f}" width="{thick:.2f}" height="{tall:.2f}"/>')
        parts.append(f'<a href="#s{step.number}"><title>{title}</title>{"".join(bars)}</a>')
        if len(steps) <= NUMBERED:
            parts.append(text(x + thick / 2, y - 4, str(len(step.tokens)), "quiet", "middle"))
    parts.append(f'<line class="axis" x1="{left:g}" x2="{width:g}" y1="{top + height:g}" y2="{top + height:g}"/>')
    label = f"Milliseconds of {len(steps)} steps, by draft, verify and host"
    size = f'viewBox="0 0 {width:g} {top + height + 6:g}"'
    return f'<svg class="times" {size} role="img" aria-label="{label}">{"".join(parts)}</svg>'


def spent(step: AnswerStep) -> str:
    return ", ".join(f"{part} {1000 * getattr(step, part):.1f} ms" for part in PARTS)


# ---- picture ----


def picture(trace: AnswerTrace) -> str:
    """Draw every step as a row: its tree, its times, why it ended; on a light background."""
    figures = (
        f"{trace.tokens} tokens in {len(trace.steps)} steps: {trace.tokens / max(len(trace.steps), 1):.2f} per step; "
        f"{trace.kept} of {trace.drafted} drafted tokens accepted; "
        f"{trace.tokens_per_second:.1f} tokens/s after the first"
    )
    asked = trace.prompt if len(trace.prompt) < 130 else f"{trace.prompt[:129]}…"
    parts = [
        text(MARGIN, 44, f"{trace.model.rpartition('/')[2]}, drafts by {trace.method}", "title"),
        text(MARGIN, 68, asked.replace("\n", " ↵ "), "quiet"),
        text(MARGIN, 90, figures),
        *legend(116),
    ]
    top = 148.0
    longest = max((step.seconds for step in trace.later), default=0.0) or 1.0
    for step in trace.steps:
        parts.append(f'<line class="rule" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{top:g}" y2="{top:g}"/>')
        row, height = picture_row(step, top + 4, longest, prompt=trace.prompt_tokens if step.number == 1 else 0)
        parts += row
        top += height + 8
    height = top + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}">'
        f'<style>{picture_style()}</style><rect width="{WIDTH}" height="{height:g}" fill="#fbfaf7"/>'
        f"{''.join(parts)}</svg>"
    )


def picture_row(step: AnswerStep, top: float, longest: float, prompt: int) -> tuple[list[str], float]:
    widths = [PADDING * 2 + LETTER * columns(visible(added)) for added in step.texts[step.kept :]]
    max_width = TIMES - TREE - sum(widths) - 64
    parts, width, height = tree(step, TREE, top, max_width, MAX_LINES) if step.nodes else ([], 0.0, LINE)
    x, y = TREE + width, top + LINE / 2
    if step.nodes and widths:
        parts.append(text(x + 6, y + 4, "→", "quiet"))
        x += 24
    for added, box_width in zip(step.texts[step.kept :], widths, strict=True):
        parts.append(box(x, y, box_width, visible(added), step.own))
        x += box_width + 4
    parts.insert(0, text(NUMBER + 36, y + 4, str(step.number), "quiet mono", "end"))
    reason = f"prefill, {prompt} tokens" if prompt else step.ending.value
    parts += [text(REASON, y + 4, reason, "quiet"), *bars(step, y, longest, bool(prompt))]
    return parts, height


def bars(step: AnswerStep, y: float, longest: float, prompt: bool) -> Iterator[str]:
    """Draw the step's times as a bar; prefill is out of scale and gets only its number."""
    x, scale = float(TIMES), (REASON - TIMES - 76) / longest
    if not prompt:
        for part in PARTS:
            width = scale * getattr(step, part)
            yield f'<rect class="{part}" x="{x:.2f}" y="{y - 5:g}" width="{width:.2f}" height="10"/>'
            x += width
    yield text(x + (0 if prompt else 6), y + 4, f"{1000 * step.seconds:.1f} ms", "quiet")


def legend(y: float) -> Iterator[str]:
    words = {
        "kept": "accepted",
        "thrown": "rejected",
        "corrected": "chosen by the model after a rejection",
    }
    x = float(MARGIN)
    for kind, meaning in {**words, "bonus": "chosen by the model after a fully accepted draft"}.items():
        yield box(x, y, 26, "ab", kind)
        yield text(x + 32, y + 4, meaning, "quiet")
        x += 60 + 6.6 * len(meaning)
    for part in PARTS:
        yield f'<rect class="{part}" x="{x:g}" y="{y - 5:g}" width="10" height="10"/>'
        yield text(x + 15, y + 4, part, "quiet")
        x += 36 + 6.6 * len(part)


def picture_style() -> str:
    kinds = "".join(
        f".node.{kind} rect{{stroke:{color};fill:{color};fill-opacity:0.1}}.edge.{kind}{{stroke:{color}}}"
        for kind, color in COLORS.items()
    )
    parts = "".join(f".{part}{{fill:{color}}}" for part, color in PARTS.items())
    return (
        f"text{{font-family:{SANS};font-size:12px;fill:{INK}}}.mono{{font-family:{MONO}}}"
        f".title{{font-size:20px;font-weight:bold}}.quiet{{fill:{FADED}}}.rule{{stroke:{RULE}}}.root{{fill:{INK}}}"
        f".edge{{fill:none;stroke-width:1.5}}{kinds}{parts}"
        ".node.thrown rect{fill:none;stroke-dasharray:3 3}.edge.thrown{stroke-dasharray:3 3}"
        f".node.thrown text{{fill:{FADED};text-decoration:line-through}}"
    )


def png(drawing: str) -> bytes:
    """Render the SVG as a PNG at twice its size, for high-resolution screens."""
    try:
        renderer = importlib.import_module("resvg_py")
    except ImportError:
        raise UserError(
            "a PNG needs `resvg-py`, which is not installed: install `outrider[png]`, or use `--html`"
        ) from None
    return bytes(renderer.svg_to_bytes(svg_string=drawing, zoom=2))
