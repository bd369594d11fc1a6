"""`outrider verify`: the command and its output."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..config import EngineConfig, check
from ..types import SamplingParams
from . import console, options
from .prompts import Prompt, collect


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
    max_tokens: options.MaxTokens = 48,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Sampling temperature; repeatable [default: 0 and 0.8]")
    ] = None,
    samples: Annotated[int, typer.Option(min=100, help="Answers to sample for the distribution test")] = 2000,
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
    from ..diagnostics.verify import PROMPTS, VerifyConfig, measure

    check(EngineConfig(backend=backend, threads=threads))
    temperatures = temperature or list(VerifyConfig.temperatures)
    for value in temperatures:
        SamplingParams(max_tokens=max_tokens, temperature=value)  # refuse bad values before loading the model
    prompts = collect(prompt, file) if prompt or file is not None else [Prompt(text=text) for text in PROMPTS]
    config = VerifyConfig(speculate or ["all"], temperatures, max_tokens, samples, seed, counts_only=fast)
    fields = {"quantize": quantize, "backend": backend, "threads": threads, "deterministic": not fast}
    report = measure(
        lambda drafter: options.open_model(model, speculate=drafter, **fields),
        lambda llm: [prompt.tokens(llm, raw, None) for prompt in prompts[:limit]],
        config,
        model,
        console.note,
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
