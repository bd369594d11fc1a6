"""`outrider bench acceptance`: the command, and how its figures are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import EngineConfig, check
from ..types import SamplingParams
from . import console, options
from .prompts import collect_sets


def acceptance(
    speculate: Annotated[
        list[str], typer.Option(metavar="METHOD[:KEY=VALUE,...]", help="Who drafts; may be given several times")
    ],
    prompt: options.Prompts = None,
    model: options.Model = options.DEFAULT_MODEL,
    sets: options.Sets = None,
    file: options.File = None,
    limit: options.SetLimit = None,
    max_tokens: options.MaxTokens = 128,
    temperature: Annotated[list[float] | None, typer.Option(help="0 is greedy; may be given several times")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts that are answered at once")] = 8,
    speed: Annotated[bool, typer.Option("--speed", help="Decode plainly too, in turn, and compare the speed")] = False,
    raw: options.Raw = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the figures as well")] = None,
    quantize: options.Quantize = None,
    backend: options.Backend = options.DEFAULT_BACKEND,
    deterministic: options.Deterministic = False,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """How much of their drafts the model keeps: the mean length, and the rates by position.

    Drafts have their full width, unless a drafter says `adaptive=true`.
    """
    from ..bench.acceptance import AcceptanceConfig, measure
    from ..bench.charts import acceptance_chart

    check(EngineConfig(backend=backend, threads=threads))
    plan = AcceptanceConfig(speculate, temperature or [0.0], max_tokens, batch, speed)
    for each in plan.temperatures:
        SamplingParams(max_tokens=max_tokens, temperature=each)  # refused before anything is loaded
    chosen = collect_sets(prompt, sets or [], file, limit)
    if plot is not None:
        console.check_plot(plot)
    fields = {"quantize": quantize, "backend": backend, "deterministic": deterministic, "threads": threads}
    found = measure(
        lambda drafter, tokens: options.open_model(
            model, speculate=drafter, max_requests=batch, max_step_tokens=tokens, **fields
        ),
        lambda llm: {name: [one.tokens(llm, raw, None) for one in prompts] for name, prompts in chosen.items()},
        plan,
        console.note,
    )
    results = list(printed(found) if json else found)
    if plot is not None:
        console.write(plot, acceptance_chart(results), "drawn")
    if not json:
        show(results)


def printed(found: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A line as soon as it is known: a run may take an hour."""
    for one in found:
        console.json_line(one)
        yield one


def show(found: Sequence[dict[str, Any]]) -> None:
    from ..diagnostics.machine import machine_title

    first = found[0]
    names = list(first["sets"])
    headings, who = drafters(found)
    warmth = "" if len(headings) > 1 else f"temperature {first['temperature']:g}, "
    console.text(
        f"{first['model']} on {machine_title(first['machine'])}; "
        f"{warmth}at most {first['max_tokens']} tokens a prompt\n\n"
    )
    speeds = ("x plain speed",) if "speedup" in first["mean"] else ()
    console.table(
        "Tokens a step that verifies a draft, the model's own included",
        (*headings, *names, "mean", *speeds),
        [
            (*own, *(length(one["sets"][name]) for name in names), length(one["mean"]), *pace(one["mean"]))
            for own, one in zip(who, found, strict=True)
        ],
    )
    deepest = max(len(one["mean"]["acceptance_rates"]) for one in found)
    for title, kind in (
        ("Of 100 of these steps, those that keep the token at a position; mean of the sets", "acceptance_rates"),
        ("The same, of 100 that kept the one before", "conditional_rates"),
    ):
        console.text("\n")
        rows = [(*own, *rates(one["mean"][kind], deepest)) for own, one in zip(who, found, strict=True)]
        console.table(title, (*headings, *(str(depth + 1) for depth in range(deepest))), rows)
    console.text("\n")
    counted = {"prompts": "prompts", "tokens": "tokens", "steps": "steps", "plain_steps": "undrafted"}
    counted |= {"drafted": "drafted", "accepted": "kept"}
    console.table(
        "Counts; undrafted: steps that had no draft",
        (*headings, "set", *counted.values()),
        [
            (*own, name, *(str(one["sets"][name][count]) for count in counted))
            for own, one in zip(who, found, strict=True)
            for name in names
        ],
        words=len(headings) + 1,
    )


def drafters(found: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The first columns of each table: who drafts, and at which temperature where there are several."""
    from ..diagnostics.method_spec import short

    names = [short(one["drafter"]) for one in found]
    if len({one["temperature"] for one in found}) == 1:
        return ["drafter"], [[name] for name in names]
    return ["drafter", "temperature"], [
        [name, f"{one['temperature']:g}"] for name, one in zip(names, found, strict=True)
    ]


def length(figures: dict[str, Any]) -> str:
    return f"{figures['mean_acceptance_length']:.2f}"


def pace(figures: dict[str, Any]) -> list[str]:
    return [f"{figures['speedup']:.2f}"] if "speedup" in figures else []


def rates(known: Sequence[float | None], count: int) -> list[str]:
    found = ["" if rate is None else f"{100 * rate:.1f}" for rate in known]
    return [*found, *[""] * (count - len(found))]
