"""`outrider bench peers`: the command, and how its figures are shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UserError
from . import console, options
from .prompts import Prompt, collect_sets, read_file

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

EVALUATION = ("mt_bench", "humaneval", "gsm8k")


def peers(
    prompt: options.Prompts = None,
    model: options.Model = options.DEFAULT_MODEL,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="llama.cpp, openvino, transformers or vllm; may be given several times [default: all]"),
    ] = None,
    speculate: options.Speculate = None,
    folder: Annotated[
        Path | None, typer.Option(help=f"A folder with sets of prompts: {', '.join(EVALUATION)} (.jsonl)")
    ] = None,
    sets: options.Sets = None,
    file: options.File = None,
    limit: options.SetLimit = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to continue each prompt with")] = 128,
    batch: options.Batches = "1,8",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the long prompt")] = 512,
    rounds: options.Repeats = 3,
    raw: options.Raw = False,
    threads: options.Threads = None,
    quantize: options.Quantize = None,
    again: Annotated[bool, typer.Option("--again", help="Set the peers up anew")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the ratios as well")] = None,
    json: options.Json = False,
) -> None:
    """Other engines beside this one, on the same prompts and weights, on the CPU.

    Each is installed into an environment of its own in the cache folder: the first time takes a while.
    """
    from ..bench.peers import export, measure, registry, report
    from ..diagnostics.machine import usable_cores
    from ..speculation.config import parse
    from ..tokenizer import Tokenizer

    method = registry.forgetful(speculate or registry.default_method(model))
    parse(method)  # refused before anything is installed
    chosen = [registry.ours(method), *registry.choose(peer or [])]
    sizes = options.batch_sizes(batch)
    if threads is not None and threads < 1:
        raise UserError(f"`threads` is {threads}: it must be at least 1")
    if plot is not None:
        console.check_plot(plot)
    asked = evaluation(folder, limit) if folder is not None else {}
    if prompt or sets or file is not None or not asked:
        asked |= collect_sets(prompt, sets or [], file, limit)
    checkpoint = export.checked(model)
    words = Tokenizer.open(checkpoint.tokenizer_source)
    plan = measure.PeersConfig(rounds, tokens, sizes, prompt_tokens, threads or usable_cores(), quantize)
    ids = {name: [token_ids(one, words, raw) for one in prompts] for name, prompts in asked.items()}
    found = report.report(measure.run(chosen, model, checkpoint, ids, plan, console.note, again), model)
    if plot is not None:
        console.write(plot, report.ratio_chart(found), "drawn")
    if json:
        console.json_line(found)
    else:
        show(found)


def evaluation(folder: Path, limit: int | None) -> dict[str, list[Prompt]]:
    """The sets that are usual for speculation, by their names."""
    return {name: read_file(folder / f"{name}.jsonl")[:limit] for name in EVALUATION}


def token_ids(prompt: Prompt, words: Tokenizer, raw: bool) -> list[int]:
    """Every engine gets the same ids: none of them reads text."""
    messages = prompt.conversation(words, raw)
    if messages is None:
        return words.encode(prompt.text or "")
    return words.encode(words.apply_chat(messages), add_special=False)


def show(found: dict[str, Any]) -> None:
    from ..bench.peers.report import counted

    machine, rounds = found["machine"], counted(found["rounds"], "round")
    sets = ", ".join(f"{count} of {name}" for name, count in found["sets"].items())
    console.text(
        f"{found['model']} on {machine['processor']}, {counted(machine['threads'], 'thread')}, {machine['level']}; "
        f"{found['tokens']} tokens after each prompt ({sets}); median [lowest to highest] of {rounds}\n"
    )
    for engine in found["engines"]:
        console.text(f"\n{described(engine)}\n")
        rows = [one for one in found["ratios"] if one["peer"] == engine["name"]]
        if rows:
            columns = ("figure", "outrider is", "ours", "theirs")
            console.table(
                "", columns, [(one["figure"], console.figure(one["ratio"], "x"), *sides(one)) for one in rows]
            )
    for one in found["skipped"]:
        console.text(f"\nwithout {one['name']}: {one['reason']}\n")


def described(engine: dict[str, Any]) -> str:
    """Who it is, what its own speculation brings it, and whether it says what we console."""
    parts = [f"{engine['name']} {engine['version']}, weights {engine['weights']}"]
    rates = {(one["way"], one["batch"]): one for one in engine["decode"]}
    for (way, batch), one in rates.items():
        if way == "speculation":
            gain = one["tokens_per_second"]["median"] / rates["plain", batch]["tokens_per_second"]["median"]
            width = "" if one["width"] is None else f" of {one['width']} tokens"
            parts.append(f"{engine['speculation']}{width}: {gain:.2f} x its plain at batch {batch}")
    agreement = engine["agreement"]
    if agreement is not None:
        parts.append(
            f"the first {agreement['first_tokens']} tokens are ours in {agreement['share_of_equal_beginnings']:.0%} of "
            f"{agreement['prompts']} texts"
        )
    return "; ".join(parts)


def sides(one: dict[str, Any]) -> Sequence[str]:
    def told(value: float | None) -> str:
        if value is None:
            return ""
        return console.size(value) if one["unit"] == "bytes" else f"{console.digits(value)} {one['unit']}"

    return told(one["ours"]), told(one["theirs"])
