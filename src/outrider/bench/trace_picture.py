"""A trace as one picture: every step a row with its tree, where its time went and why it ended."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from ..errors import UserError
from .trace import Trace, TraceStep, columns, visible
from .trace_svg import LETTER, LINE, PADDING, box, text, tree

WIDTH, MARGIN = 1280, 32
NUMBER, TREE, TIMES, REASON = 32, 96, 900, 1100  # where the columns begin
MOST_LINES = 12  # of one step
INK, FADED, RULE = "#1d1f21", "#5d6166", "#dedad1"
COLOURS = {"kept": "#0072b2", "corrected": "#c24e00", "bonus": "#007f5c", "plain": INK, "thrown": FADED}
PARTS = {"draft": "#cc79a7", "verify": "#0072b2", "host": "#8a8f96"}
SANS = "'DejaVu Sans','Noto Sans','Segoe UI','Helvetica Neue',Arial,sans-serif"
MONO = "'DejaVu Sans Mono','Noto Sans Mono',Menlo,Consolas,monospace"


def picture(trace: Trace) -> str:
    """Every step a row: its tree, where its time went, why it ended. A light page, whatever the reader's is."""
    figures = (
        f"{trace.tokens} tokens in {len(trace.steps)} steps: {trace.tokens / max(len(trace.steps), 1):.2f} a step; "
        f"{trace.kept} of {trace.drafted} drafted tokens kept; {trace.tokens_per_second:.1f} tokens/s after the first"
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


def picture_row(step: TraceStep, top: float, longest: float, prompt: int) -> tuple[list[str], float]:
    said = [PADDING * 2 + LETTER * columns(visible(one)) for one in step.texts[step.kept :]]
    room = TIMES - TREE - sum(said) - 64
    parts, width, height = tree(step, TREE, top, room, MOST_LINES) if step.nodes else ([], 0.0, LINE)
    x, y = TREE + width, top + LINE / 2
    if step.nodes and said:
        parts.append(text(x + 6, y + 4, "→", "quiet"))
        x += 24
    for one, wide in zip(step.texts[step.kept :], said, strict=True):
        parts.append(box(x, y, wide, visible(one), step.own))
        x += wide + 4
    parts.insert(0, text(NUMBER + 36, y + 4, str(step.number), "quiet mono", "end"))
    why = f"the prompt, {prompt} tokens" if prompt else step.ending.value
    parts += [text(REASON, y + 4, why, "quiet"), *bars(step, y, longest, bool(prompt))]
    return parts, height


def bars(step: TraceStep, y: float, longest: float, prompt: bool) -> Iterator[str]:
    """A bar of the step's time; that of the prompt has no place on the others' scale."""
    at, room = float(TIMES), REASON - TIMES - 76
    if not prompt:
        for part in PARTS:
            wide = room * getattr(step, part) / longest
            yield f'<rect class="{part}" x="{at:.2f}" y="{y - 5:g}" width="{wide:.2f}" height="10"/>'
            at += wide
    yield text(at + (0 if prompt else 6), y + 4, f"{1000 * step.seconds:.1f} ms", "quiet")


def legend(y: float) -> Iterator[str]:
    words = {
        "kept": "drafted and kept",
        "thrown": "drafted, not kept",
        "corrected": "the model's own, against the draft",
    }
    x = float(MARGIN)
    for kind, told in {**words, "bonus": "the model's own, after a whole draft"}.items():
        yield box(x, y, 26, "ab", kind)
        yield text(x + 32, y + 4, told, "quiet")
        x += 60 + 6.6 * len(told)
    for part in PARTS:
        yield f'<rect class="{part}" x="{x:g}" y="{y - 5:g}" width="10" height="10"/>'
        yield text(x + 15, y + 4, part, "quiet")
        x += 36 + 6.6 * len(part)


def picture_style() -> str:
    kinds = "".join(
        f".node.{kind} rect{{stroke:{colour};fill:{colour};fill-opacity:0.1}}.edge.{kind}{{stroke:{colour}}}"
        for kind, colour in COLOURS.items()
    )
    parts = "".join(f".{part}{{fill:{colour}}}" for part, colour in PARTS.items())
    return (
        f"text{{font-family:{SANS};font-size:12px;fill:{INK}}}.mono{{font-family:{MONO}}}"
        f".title{{font-size:20px;font-weight:bold}}.quiet{{fill:{FADED}}}.rule{{stroke:{RULE}}}.root{{fill:{INK}}}"
        f".edge{{fill:none;stroke-width:1.5}}{kinds}{parts}"
        ".node.thrown rect{fill:none;stroke-dasharray:3 3}.edge.thrown{stroke-dasharray:3 3}"
        f".node.thrown text{{fill:{FADED};text-decoration:line-through}}"
    )


def png(drawing: str) -> bytes:
    """Twice as many dots, for screens that have them."""
    try:
        renderer = importlib.import_module("resvg_py")
    except ImportError:
        raise UserError(
            "a PNG needs `resvg-py`, which is not installed: install `outrider[png]`, or take `--html`"
        ) from None
    return bytes(renderer.svg_to_bytes(svg_string=drawing, zoom=2))
