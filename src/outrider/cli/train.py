"""`outrider train`: draft heads for a model, from prompts alone."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from . import console, options


def train(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where everything goes; a run in it goes on")],
    method: Annotated[
        list[str] | None,
        typer.Argument(metavar="METHOD[:KEY=VALUE,...]", help="What to train; several learn together"),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Prompts, .jsonl, .json or .txt; may be given several times"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of answers that the model writes to learn from")] = 10_000_000,
    max_new: Annotated[int, typer.Option(help="Tokens of one answer at most")] = 512,
    self_prompts: Annotated[float, typer.Option(metavar="SHARE", help="Prompts that the model writes itself")] = 0.0,
    greedy: Annotated[float, typer.Option(metavar="SHARE", help="Answers that are greedy; others are drawn")] = 0.5,
    skip_broken: Annotated[bool, typer.Option("--skip-broken", help="Leave out lines that hold no prompt")] = False,
    max_requests: Annotated[int | None, typer.Option(help="Answers at once [default: what suits the device]")] = None,
    answers: Annotated[Path | None, typer.Option(metavar="DIR", help="Answers that were made before")] = None,
    answers_only: Annotated[bool, typer.Option("--answers-only", help="Stop when the answers are there")] = False,
    begin: Annotated[
        str | None, typer.Option(metavar="FROM", help="Heads to begin with: a run's state.pt, a folder, or `shipped`")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="End after so many steps")] = None,
    passes: Annotated[float | None, typer.Option(help="End after so many passes [default: 3]")] = None,
    seconds: Annotated[float | None, typer.Option(help="End after so many seconds of training")] = None,
    rows: Annotated[int, typer.Option(help="Rows of a step")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of a row, and of a document at most")] = 1024,
    answer_length: Annotated[
        int | None, typer.Option(help="Learn from the first so many tokens of an answer [default: all]")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At its highest [default: what suits the method]")] = None,
    storage: Annotated[str, typer.Option(help="Matrices of the heads: q8_0, q5_1 (smaller), bf16 or f32")] = "q8_0",
    seed: Annotated[int, typer.Option(help="The same seed gives the same heads")] = 0,
    backend: options.Backend = options.DEFAULT_BACKEND,
    json: options.Json = False,
) -> None:
    """Train draft heads for a model, on its own answers to prompts.

    A run that was stopped goes on with the same command. DIR/METHOD is a head to use at once, DIR/METHOD-speculators
    the same for vLLM, and the card beside each says how it was made.
    """
    from ..config import EngineConfig, check
    from ..train.job import Job
    from ..train.methods import parse
    from ..train.progress import Lines
    from ..train.run import run
    from .train_progress import Screen

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
        begin=begin,
        rows=rows,
        length=length,
        answer_length=answer_length,
        steps=steps,
        passes=passes,
        seconds=seconds,
        storage=cast(Any, storage),  # checked there
    )
    if json or not sys.stderr.isatty():
        result = run(job, Lines(console.note, (lambda moment: console.json_line(asdict(moment))) if json else None))
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
