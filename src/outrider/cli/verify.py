"""`outrider verify`: the command and its output."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import EngineConfig, check
from ..types import SamplingParams
from . import console, options
from .prompts import Prompt, collect

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

FULL = {"prompts": 6, "max_tokens": 48, "samples": 2000}
# On two cores of a Neoverse-N1, SmolLM2-135M with all methods takes less than a minute.
QUICK = {"prompts": 2, "max_tokens": 16, "samples": 150}


def verify(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts whose answers are compared [default: built-in]", show_default=False),
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    speculate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD[:KEY=VALUE,...]",
            help=f"Drafting method to check, one of {options.METHOD_NAMES}; repeatable [default: all]",
        ),
    ] = None,
    file: options.File = None,
    limit: options.Limit = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"Take less than a minute with a small model: {QUICK['prompts']} prompts, {QUICK['samples']} samples, "
            f"{QUICK['max_tokens']} tokens; rejection and block are checked with one method only",
        ),
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help=f"Maximum number of tokens to generate [default: {FULL['max_tokens']}]")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Sampling temperature; repeatable [default: 0 and 0.8]")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=100, help=f"Answers to sample for the distribution test [default: {FULL['samples']}]"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed for all sampling")] = 0,
    raw: options.Raw = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="GPU: use the default kernels and count texts that differ without failing")
    ] = False,
    quantize: options.Quantize = None,
    backend: options.Backend = options.DEFAULT_BACKEND,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Check on this model and machine that speculation changes nothing but the speed.

    Compares texts with plain decoding, alone and in a batch. For verification by rejection, tests the distribution of
    short answers instead. Exits with code 1 if a check fails.
    """
    check(EngineConfig(backend=backend, threads=threads))
    default = QUICK if quick else FULL
    max_tokens, samples = max_tokens or default["max_tokens"], samples or default["samples"]
    temperatures = temperature or [0.0, 0.8]
    for value in temperatures:
        SamplingParams(max_tokens=max_tokens, temperature=value)  # refuse bad values before loading the model
    prompts = collect(prompt, file) if prompt or file is not None else None
    fields: dict[str, Any] = {"quantize": quantize, "backend": backend, "threads": threads, "deterministic": not fast}
    if not sys.stderr.isatty():
        console.note(f"checking {model}: a line follows for each check")
    with console.bar(f"starting to check {model}", *columns()) as progress:
        with options.importing():
            from ..diagnostics.verify import PROMPTS, VerifyConfig, measure
            from ..llm import LLM

        built_in = [Prompt(text=text) for text in PROMPTS][: default["prompts"]]
        report = measure(
            lambda drafter: LLM(model, speculate=drafter, **fields),
            lambda llm: [prompt.tokens(llm, raw, None) for prompt in (prompts or built_in)[:limit]],
            VerifyConfig(speculate or ["all"], temperatures, max_tokens, samples, seed, counts_only=fast, quick=quick),
            model,
            console.note,
            progress,
        )
    if json:
        console.json_line(report)
    else:
        show(report)
    if not report["passed"]:
        for check_result in report["checks"]:
            if check_result["verdict"] == "fail":
                console.note(f"FAILED: {title(check_result)}: {check_result['reason']}")
        raise typer.Exit(1)


def columns() -> list[ProgressColumn]:
    """Return the columns of the progress bar: the share that is done, the time so far and the time that is left."""
    from rich.progress import TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return [TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()]


def show(report: dict[str, Any]) -> None:
    from ..diagnostics.machine import machine_title

    checks = report["checks"]
    temperatures = " and ".join(f"{value:g}" for value in report["temperatures"])
    console.text(
        f"{report['model']} on {machine_title(report['machine'])}; {report['prompts']} prompts at temperature "
        f"{temperatures}, alone and in a batch; {report['samples']} answers sampled for each distribution test\n\n"
    )
    ran = [result for result in checks if result["verdict"] != "skipped"]
    console.table(
        "",
        ("drafter", "verification", "verdict", "texts", "accepted", "chi-square", "limit", "detects"),
        [
            (
                short(result["drafter"]),
                result["verification"] or "",
                result["verdict"],
                f"{result['texts']['compared'] - result['texts']['different']}/{result['texts']['compared']}",
                f"{result['accepted']}/{result['drafted']}" if result["verification"] else "",
                *chi_square(result["distribution"]),
            )
            for result in ran
        ],
        words=3,
    )
    console.text(f"\n{legend(report)}\n")
    skipped = [(result["drafter"], result["reason"]) for result in checks if result["verdict"] == "skipped"]
    if skipped:
        console.text("\n")
        console.table("Not checked", ("", ""), skipped, words=2)
    console.text(f"\n{'All checks passed.' if report['passed'] else 'CHECKS FAILED.'}\n")


def legend(report: dict[str, Any]) -> str:
    return (
        "texts       equal to plain decoding; for rejection and block verification: equal alone and\n"
        "            in a batch\n"
        "accepted    of the drafted tokens\n"
        "chi-square  largest statistic over the first three tokens, each and jointly; a correct engine\n"
        f"            exceeds the limit once in {1 / report['false_alarm']:,.0f} tests\n"
        "detects     a bias of this size (total variation) fails in "
        f"{report['power']:.0%} of runs;\n            four times as many `--samples` halve it"
    )


def chi_square(test: dict[str, Any] | None) -> tuple[str, str, str]:
    if test is None:
        return "", "", ""
    statistic = "impossible" if test["statistic"] is None else f"{test['statistic']:.1f}"
    return statistic, f"{test['threshold']:.1f}", f"{test['detectable_total_variation']:.1%}"


def title(result: dict[str, Any]) -> str:
    return " verified by ".join(filter(None, (result["drafter"], result["verification"])))


def short(drafter: str) -> str:
    from ..speculation.config import short_spec

    return "plain" if drafter == "none" else short_spec(drafter)
