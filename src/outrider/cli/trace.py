"""`outrider trace`: the command and its terminal output."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import UserError
from ..types import SamplingParams
from . import console, options
from .options import DRAFT, DraftFlags, SamplingFlags, unfold
from .prompts import collect, read_prediction

if TYPE_CHECKING:
    from ..diagnostics.trace import AnswerStep, AnswerTrace

STYLES = {"kept": "bold blue", "thrown": "dim strike", "corrected": "yellow", "bonus": "green", "plain": ""}
PIPED = 160  # columns of a line if the output is not a terminal
SAMPLING = SamplingFlags(max_tokens=96)


@unfold
def trace(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt to answer; `-` reads it from stdin", show_default=False)
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    draft: DraftFlags = DRAFT,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page that shows every step")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a PNG that shows every step")] = None,
    sampling: SamplingFlags = SAMPLING,
    stop: options.Stop = None,
    raw: options.Raw = False,
    system: options.System = None,
    prediction: options.Prediction = None,
    quantize: options.Quantize = None,
    backend: options.Backend = options.DEFAULT_BACKEND,
    deterministic: options.Deterministic = False,
    threads: options.Threads = None,
    max_context: options.MaxContext = None,
    json: options.Json = False,
) -> None:
    """Show every step of an answer: drafted tokens, accepted tokens, why the step ended, and the times.

    Without `--html` and `--png`, prints the steps as a table. Runs one decode step at a time on every device.
    """
    from ..diagnostics.trace import record

    (asked,) = collect(None if prompt is None else [prompt], None)
    params = SamplingParams(
        **vars(sampling),
        stop=stop or (),
        prediction=None if prediction is None else read_prediction(prediction),
        trace=True,
    )
    for path in filter(None, (html, png)):
        if path.is_dir():
            raise UserError(f"`{path}` is a folder: name a file in it")
        if not path.parent.is_dir():
            raise UserError(f"there is no folder `{path.parent}` for `{path.name}`: make it first")
    llm = options.open_model(
        model,
        quantize=quantize,
        backend=backend,
        deterministic=deterministic,
        threads=threads,
        max_context=max_context,
        decode_steps=1,
        **draft.fields(default="auto" if prediction is None else "none"),
    )
    found = record(llm, asked.tokens(llm, raw, system), asked.text or "", params)
    save(found, html, png)
    if json:
        console.json_line(found.as_json())
    elif html is None and png is None:
        show(found)


def save(found: AnswerTrace, html: Path | None, png: Path | None) -> None:
    from ..diagnostics.trace_render import page, picture
    from ..diagnostics.trace_render import png as rendered

    if html is not None:
        console.write(html, page(found), "written")
    if png is not None:
        console.write(png, rendered(picture(found)), "drawn")


def show(found: AnswerTrace) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED)
    table = Table(box=None, pad_edge=False)
    for column in ("step", "draft", "verify", "host", "accepted"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("ended by", no_wrap=True)
    table.add_column("drafted → added by the model", overflow="fold")
    for step in found.steps:
        times = (f"{1000 * seconds:.1f}" for seconds in (step.draft, step.verify, step.host))
        accepted = f"{step.kept}/{len(step.nodes)}" if step.nodes else ""
        reason = "prefill" if step.number == 1 else step.ending.value
        table.add_row(str(step.number), *times, accepted, reason, steps_text(step))
    console.print(table)
    console.print(
        f"\n{found.text.strip()}\n\n{found.tokens} tokens in {len(found.steps)} steps, "
        f"{found.tokens / len(found.steps):.2f} per step; {found.kept} of {found.drafted} drafted tokens of "
        f"{found.method} accepted; {found.tokens_per_second:.1f} tokens/s after the first; times in ms",
        markup=False,
    )


def steps_text(step: AnswerStep) -> Text:
    """Format the tree, a line for each branch, and the tokens that the model added; ✗ marks rejected tokens."""
    from ..diagnostics.trace import columns, rows, visible

    lines = [Text() for _ in range(1 + max(rows(step), default=0))]
    widths: dict[int, int] = {}
    for node in step.nodes:
        widths[node.depth] = max(widths.get(node.depth, 0), columns(visible(node.text)) + 2)
    line_of = rows(step)
    for index in sorted(range(len(step.nodes)), key=lambda i: (line_of[i], step.nodes[i].depth)):
        node, line = step.nodes[index], lines[line_of[index]]
        begin = sum(widths[depth] for depth in range(node.depth))
        parent = step.nodes[node.parent] if node.parent >= 0 else None
        is_first = not line.plain
        line.append(" " * max(begin - columns(line.plain), 0))
        is_rejection = not node.kept and (parent is None or parent.kept or is_first)
        line.append(" ✗" if is_rejection else (" └" if is_first and line_of[index] else "  "), "dim")
        line.append(visible(node.text), STYLES["kept" if node.kept else "thrown"])
    if step.texts[step.kept :]:
        lines[0].append(" → " if step.nodes else "→ ", "dim")
        lines[0].append("".join(map(visible, step.texts[step.kept :])), STYLES[step.own])
    return Text("\n").join(lines)
