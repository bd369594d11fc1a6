"""`outrider train`: train draft heads for a model from prompts, with a progress display on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from . import console, options

if TYPE_CHECKING:
    from ..train.progress import ProgressEvent

TRAINED_METHODS = "eagle3, eagle, peagle, dflash, dspark, medusa, mtp or draft_model"


def train(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder; a run in it is resumed")],
    method: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD[:KEY=VALUE,...]", help=f"Head to train: {TRAINED_METHODS}; several train together"
        ),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="File of prompts, .jsonl, .json or .txt; may be repeated"),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Tokens of answers that the model generates as training data")
    ] = 10_000_000,
    max_new: Annotated[int, typer.Option(help="Maximum tokens of one answer")] = 512,
    self_prompts: Annotated[
        float, typer.Option(metavar="FRACTION", help="Fraction of the prompts that the model writes itself")
    ] = 0.0,
    greedy: Annotated[
        float, typer.Option(metavar="FRACTION", help="Fraction of the answers that are greedy; others are sampled")
    ] = 0.5,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Skip lines without a prompt")] = False,
    max_requests: Annotated[
        int | None, typer.Option(help="Requests in a batch while answers are generated [default: by device]")
    ] = None,
    answers: Annotated[Path | None, typer.Option(metavar="DIR", help="Use the answers of another run")] = None,
    answers_only: Annotated[bool, typer.Option("--answers-only", help="Generate answers and stop")] = False,
    init_from: Annotated[
        str | None,
        typer.Option(
            "--init-from",
            "--begin",  # deprecated alias
            metavar="FROM",
            help="Initialise heads from a run's state.pt, a folder of heads, or `shipped`",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Maximum number of steps")] = None,
    passes: Annotated[float | None, typer.Option(help="Maximum number of passes over the data [default: 3]")] = None,
    seconds: Annotated[float | None, typer.Option(help="Maximum seconds of training")] = None,
    rows: Annotated[int, typer.Option(help="Rows of a training batch")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of a row; longer documents are truncated")] = 1024,
    answer_length: Annotated[
        int | None, typer.Option(help="Train on this many tokens of an answer, from its start [default: all]")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate [default: by method]")] = None,
    storage: Annotated[
        str, typer.Option(help="Storage of the heads' matrices: q8_0, q5_1 (smaller), bf16 or f32")
    ] = "q8_0",
    seed: Annotated[int, typer.Option(help="Seed; equal seeds give equal heads")] = 0,
    backend: options.Backend = options.DEFAULT_BACKEND,
    json: options.Json = False,
) -> None:
    """Train draft heads for a model, on its own answers to prompts.

    The same command resumes a run that was stopped. DIR/METHOD is the head, DIR/METHOD-speculators the same head for
    vLLM; card.json in each describes the data and the settings.
    """
    from ..config import EngineConfig, check
    from ..train.job import Job
    from ..train.methods import parse
    from ..train.progress import TextProgress
    from ..train.run import run

    check(EngineConfig(backend=backend))
    job = Job(
        model=model,
        out=out,
        methods=() if answers_only and not method else parse(method or [], learning_rate),
        prompts=tuple(prompts or ()),
        backend=backend,
        seed=seed,
        tokens=tokens,
        max_new=max_new,
        self_prompts=self_prompts,
        greedy=greedy,
        skip_broken=skip_broken,
        max_requests=max_requests,
        answers=answers,
        answers_only=answers_only,
        init_from=init_from,
        rows=rows,
        length=length,
        answer_length=answer_length,
        steps=steps,
        passes=passes,
        seconds=seconds,
        storage=cast(Any, storage),  # checked by Job
    )
    if json or not sys.stderr.isatty():
        on_event = (lambda event: console.json_line(event.as_json())) if json else None
        result = run(job, TextProgress(console.note, on_event))
    else:
        with Screen() as screen:
            result = run(job, screen)
    if json:
        console.json_line({"kind": "end", "finished": result.finished, "said": result.said, "card": result.card})
    elif result.finished:
        console.text(result.said + "\n")
    if not result.finished:
        console.note(result.said)
        raise typer.Exit(130)


TEXT_COLUMNS = ("head", "text", "accepted by depth")  # left-aligned


class Screen:
    """A ProgressReporter on a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.bar.add_task("", total=None, status="")
        self.latest: dict[str, ProgressEvent] = {}
        self.live = Live(self.bar, console=self.console, refresh_per_second=4)

    def __enter__(self) -> Screen:
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.__exit__(kind, error, trace)

    def stage(self, text: str) -> None:
        self.bar.reset(self.task, total=None, description=text, status="")

    def note(self, text: str) -> None:
        self.console.print(f"note: {text}", markup=False)

    def answers(self, documents: int, tokens: int, wanted: int) -> None:
        self.bar.update(self.task, total=wanted, completed=tokens, status=f"{documents} answers, {tokens} tokens")

    def event(self, event: ProgressEvent) -> None:
        self.latest[event.kind] = event
        of = f" of {event.steps}" if event.steps else ""
        self.bar.update(self.task, total=event.steps, completed=event.step, status=f"step {event.step}{of}")
        self.live.update(Group(self.bar, metrics_table(self.latest)))


def metrics_table(latest: Mapping[str, ProgressEvent]) -> Table:
    from ..train.progress import percentages

    table = Table(box=None, pad_edge=False)
    for column in ("head", "text", "loss", "tokens a step", "accepted by depth", "tokens/s", "rate"):
        table.add_column(column, justify="left" if column in TEXT_COLUMNS else "right")
    for kind, event in latest.items():
        for name, metrics in event.metrics.items():
            speed = f"{event.tokens_per_second:.0f}" if event.tokens_per_second else ""
            rate = f"{event.rates[name]:.1e}" if kind == "train" else ""
            table.add_row(
                name, kind, f"{metrics.loss:.3f}", f"{metrics.length:.2f}", percentages(metrics.acceptance), speed, rate
            )
    return table
