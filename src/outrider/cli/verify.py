"""`outrider verify`: the command, and how its findings are shown."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..config import EngineConfig, check
from ..types import SamplingParams
from . import console, options
from .prompts import Prompt, collect


def verify(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Prompts to compare texts over [default: built-in]", show_default=False)
    ] = None,
    model: options.Model = options.DEFAULT_MODEL,
    speculate: Annotated[
        list[str] | None,
        typer.Option(metavar="METHOD[:KEY=VALUE,...]", help="Whom to check; may be given several times [default: all]"),
    ] = None,
    file: options.File = None,
    limit: options.Limit = None,
    max_tokens: options.MaxTokens = 48,
    temperature: Annotated[
        list[float] | None, typer.Option(help="May be given several times [default: 0 and 0.8]")
    ] = None,
    samples: Annotated[int, typer.Option(min=100, help="Answers to draw for the test of the distribution")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of all texts and answers")] = 0,
    raw: options.Raw = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="On a GPU: its default kernels; texts that differ are counted, not failed")
    ] = False,
    quantize: options.Quantize = None,
    backend: options.Backend = options.DEFAULT_BACKEND,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Prove on this model and machine that speculation changes nothing but the speed.

    Texts are compared with plain decoding, alone and in a batch; where drafts are verified by rejection, the
    distribution of short answers is tested. Exit code 1 when something differs.
    """
    from ..diagnostics.verify import PROMPTS, VerifyConfig, measure

    check(EngineConfig(backend=backend, threads=threads))
    heats = temperature or list(VerifyConfig.temperatures)
    for each in heats:
        SamplingParams(max_tokens=max_tokens, temperature=each)  # refused before anything is loaded
    given = collect(prompt, file) if prompt or file is not None else [Prompt(text=text) for text in PROMPTS]
    plan = VerifyConfig(speculate or ["all"], heats, max_tokens, samples, seed, counts_only=fast)
    fields = {"quantize": quantize, "backend": backend, "threads": threads, "deterministic": not fast}
    found = measure(
        lambda drafter: options.open_model(model, speculate=drafter, **fields),
        lambda llm: [one.tokens(llm, raw, None) for one in given[:limit]],
        plan,
        model,
        console.note,
    )
    if json:
        console.json_line(found)
    else:
        show(found)
    if not found["passed"]:
        for one in found["checks"]:
            if one["verdict"] == "fail":
                console.note(f"FAILED: {who(one)}: {one['reason']}")
        raise typer.Exit(1)


def show(found: dict[str, Any]) -> None:
    from ..diagnostics.machine import machine_title

    checks = found["checks"]
    heats = " and ".join(f"{one:g}" for one in found["temperatures"])
    console.text(
        f"{found['model']} on {machine_title(found['machine'])}; {found['prompts']} prompts at temperature {heats}, "
        f"alone and in a batch; {found['samples']} answers drawn for each law\n\n"
    )
    ran = [one for one in checks if one["verdict"] != "skipped"]
    console.table(
        "",
        ("drafter", "by", "verdict", "texts", "kept", "chi-square", "limit", "catches"),
        [
            (
                short(one["drafter"]),
                one["verification"] or "",
                one["verdict"],
                f"{one['texts']['compared'] - one['texts']['different']}/{one['texts']['compared']}",
                f"{one['accepted']}/{one['drafted']}" if one["verification"] else "",
                *chi_square(one["law"]),
            )
            for one in ran
        ],
        words=3,
    )
    console.text(f"\n{explain(found)}\n")
    skipped = [(one["drafter"], one["reason"]) for one in checks if one["verdict"] == "skipped"]
    if skipped:
        console.text("\n")
        console.table("Not checked", ("", ""), skipped, words=2)
    console.text(f"\n{'All hold.' if found['passed'] else 'NOT ALL HOLD.'}\n")


def explain(found: dict[str, Any]) -> str:
    return (
        "texts       the same as plain decoding's, each alone; verified by rejection or as\n"
        "            blocks: the same as the drafter's own, alone\n"
        "kept        of the drafted tokens\n"
        "chi-square  how far three tokens are from the model's own law, each and together;\n"
        f"            a sound engine passes the limit once in {1 / found['false_alarm']:,.0f} tests\n"
        "catches     any bias of this size, as total variation, fails in "
        f"{found['power']:.0%} of runs;\n            four times as many `--samples` halve it"
    )


def chi_square(law: dict[str, Any] | None) -> tuple[str, str, str]:
    if law is None:
        return "", "", ""
    told = "impossible" if law["statistic"] is None else f"{law['statistic']:.1f}"
    return told, f"{law['threshold']:.1f}", f"{law['detectable_total_variation']:.1%}"


def who(found: dict[str, Any]) -> str:
    return " verified by ".join(filter(None, (found["drafter"], found["verification"])))


def short(drafter: str) -> str:
    from ..diagnostics.method_spec import short

    return "plain" if drafter == "none" else short(drafter)
