"""`outrider bench acceptance`: the command and its output."""

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
    speculate: Annotated[list[str], typer.Option(metavar="METHOD[:KEY=VALUE,...]", help="Drafting method; repeatable")],
    prompt: options.Prompts = None,
    model: options.Model = options.DEFAULT_MODEL,
    sets: options.Sets = None,
    file: options.File = None,
    limit: options.SetLimit = None,
    max_tokens: options.MaxTokens = 128,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Sampling temperature, 0 is greedy; repeatable")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts answered in one batch")] = 8,
    speed: Annotated[bool, typer.Option("--speed", help="Also run plain decoding and compare the speed")] = False,
    raw: options.Raw = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Write a chart of the figures")] = None,
    quantize: options.Quantize = None,
    backend: options.Backend = options.DEFAULT_BACKEND,
    deterministic: options.Deterministic = False,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Measure the mean acceptance length and the acceptance rates by depth.

    Drafts have their full width unless the method sets `adaptive=true`.
    """
    from ..bench.acceptance import AcceptanceConfig, measure
    from ..bench.charts import acceptance_chart

    check(EngineConfig(backend=backend, threads=threads))
    config = AcceptanceConfig(speculate, temperature or [0.0], max_tokens, batch, speed)
    for value in config.temperatures:
        SamplingParams(max_tokens=max_tokens, temperature=value)  # refuse bad values before loading the model
    chosen = collect_sets(prompt, sets or [], file, limit)
    if plot is not None:
        console.check_plot(plot)
    fields = {"quantize": quantize, "backend": backend, "deterministic": deterministic, "threads": threads}
    found = measure(
        lambda drafter, tokens: options.open_model(
            model, speculate=drafter, max_requests=batch, max_step_tokens=tokens, **fields
        ),
        lambda llm: {name: [prompt.tokens(llm, raw, None) for prompt in prompts] for name, prompts in chosen.items()},
        config,
        console.note,
    )
    results = list(printed(found) if json else found)
    if plot is not None:
        console.write(plot, acceptance_chart(results), "drawn")
    if not json:
        show(results)


def printed(found: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Print each result as soon as it is known: a run may take an hour."""
    for one in found:
        console.json_line(one)
        yield one


def show(found: Sequence[dict[str, Any]]) -> None:
    from ..diagnostics.machine import machine_title

    first = found[0]
    names = list(first["sets"])
    headings, labels = drafters(found)
    temperature = "" if len(headings) > 1 else f"temperature {first['temperature']:g}, "
    console.text(
        f"{first['model']} on {machine_title(first['machine'])}; "
        f"{temperature}at most {first['max_tokens']} tokens per prompt\n\n"
    )
    speeds = ("x plain speed",) if "speedup" in first["mean"] else ()
    console.table(
        "Mean acceptance length: tokens per step that verifies a draft, with the model's own",
        (*headings, *names, "mean", *speeds),
        [
            (*label, *(length(one["sets"][name]) for name in names), length(one["mean"]), *speedup(one["mean"]))
            for label, one in zip(labels, found, strict=True)
        ],
    )
    deepest = max(len(one["mean"]["acceptance_rates"]) for one in found)
    for title, kind in (
        ("Acceptance rate in percent by depth; mean of the sets", "acceptance_rates"),
        ("Conditional rate in percent: given that the token before was accepted", "conditional_rates"),
    ):
        console.text("\n")
        rows = [(*label, *rates(one["mean"][kind], deepest)) for label, one in zip(labels, found, strict=True)]
        console.table(title, (*headings, *(str(depth + 1) for depth in range(deepest))), rows)
    console.text("\n")
    counted = {"prompts": "prompts", "tokens": "tokens", "steps": "steps", "plain_steps": "undrafted"}
    counted |= {"drafted": "drafted", "accepted": "accepted"}
    console.table(
        "Counts; undrafted: steps without a draft",
        (*headings, "set", *counted.values()),
        [
            (*label, name, *(str(one["sets"][name][count]) for count in counted))
            for label, one in zip(labels, found, strict=True)
            for name in names
        ],
        words=len(headings) + 1,
    )


def drafters(found: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and first columns of each table: the drafter and, if there are several, the temperature."""
    from ..diagnostics.method_spec import short

    names = [short(one["drafter"]) for one in found]
    if len({one["temperature"] for one in found}) == 1:
        return ["drafter"], [[name] for name in names]
    return ["drafter", "temperature"], [
        [name, f"{one['temperature']:g}"] for name, one in zip(names, found, strict=True)
    ]


def length(figures: dict[str, Any]) -> str:
    return f"{figures['mean_acceptance_length']:.2f}"


def speedup(figures: dict[str, Any]) -> list[str]:
    return [f"{figures['speedup']:.2f}"] if "speedup" in figures else []


def rates(known: Sequence[float | None], count: int) -> list[str]:
    found = ["" if rate is None else f"{100 * rate:.1f}" for rate in known]
    return [*found, *[""] * (count - len(found))]
