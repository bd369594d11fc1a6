"""`outrider bench peers`: the command and its output."""

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
        typer.Option(
            help="Engine to compare with: llama.cpp, openvino, transformers or vllm; repeatable [default: all]"
        ),
    ] = None,
    speculate: options.Speculate = None,
    folder: Annotated[
        Path | None, typer.Option(help=f"Folder with the prompt sets {', '.join(EVALUATION)} as .jsonl files")
    ] = None,
    sets: options.Sets = None,
    file: options.File = None,
    limit: options.SetLimit = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate after each prompt")] = 128,
    batch: options.Batches = "1,8",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length in tokens of the prompt that times prefill")] = 512,
    rounds: options.Repeats = 3,
    raw: options.Raw = False,
    threads: options.Threads = None,
    quantize: options.Quantize = None,
    again: Annotated[bool, typer.Option("--again", help="Reinstall the engines")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Write a chart of the ratios")] = None,
    json: options.Json = False,
) -> None:
    """Compare with other engines on the CPU, with the same prompts and weights.

    Installs each engine into its own environment in the cache folder, which takes minutes the first time.
    """
    from ..bench.peers import export, measure, registry, report
    from ..diagnostics.machine import usable_cores
    from ..speculation.config import parse
    from ..tokenizer import Tokenizer

    method = registry.forgetful(speculate or registry.default_method(model))
    parse(method)  # refuse a bad specification before installing anything
    chosen = [registry.ours(method), *registry.choose(peer or [])]
    sizes = options.batch_sizes(batch)
    if threads is not None and threads < 1:
        raise UserError(f"`threads` is {threads}: it must be at least 1")
    if plot is not None:
        console.check_plot(plot)
    prompt_sets = evaluation(folder, limit) if folder is not None else {}
    if prompt or sets or file is not None or not prompt_sets:
        prompt_sets |= collect_sets(prompt, sets or [], file, limit)
    checkpoint = export.checked(model)
    tokenizer = Tokenizer.open(checkpoint.tokenizer_source)
    config = measure.PeersConfig(rounds, tokens, sizes, prompt_tokens, threads or usable_cores(), quantize)
    ids = {name: [token_ids(prompt, tokenizer, raw) for prompt in prompts] for name, prompts in prompt_sets.items()}
    found = report.report(measure.run(chosen, model, checkpoint, ids, config, console.note, again), model)
    if plot is not None:
        console.write(plot, report.ratio_chart(found), "drawn")
    if json:
        console.json_line(found)
    else:
        show(found)


def evaluation(folder: Path, limit: int | None) -> dict[str, list[Prompt]]:
    """Read the prompt sets that papers on speculation use."""
    return {name: read_file(folder / f"{name}.jsonl")[:limit] for name in EVALUATION}


def token_ids(prompt: Prompt, tokenizer: Tokenizer, raw: bool) -> list[int]:
    """Tokenize a prompt; all engines get the same token ids."""
    messages = prompt.conversation(tokenizer, raw)
    if messages is None:
        return tokenizer.encode(prompt.text or "")
    return tokenizer.encode(tokenizer.apply_chat(messages), add_special=False)


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
    """Describe an engine: version, weights, gain from its speculation, and agreement with our texts."""
    parts = [f"{engine['name']} {engine['version']}, weights {engine['weights']}"]
    rates = {(one["way"], one["batch"]): one for one in engine["decode"]}
    for (way, batch), one in rates.items():
        if way == "speculation":
            gain = one["tokens_per_second"]["median"] / rates["plain", batch]["tokens_per_second"]["median"]
            width = "" if one["width"] is None else f" of {one['width']} tokens"
            parts.append(f"{engine['speculation']}{width}: {gain:.2f} x its plain decoding at batch {batch}")
    agreement = engine["agreement"]
    if agreement is not None:
        parts.append(
            f"the first {agreement['first_tokens']} tokens equal ours in "
            f"{agreement['share_of_equal_beginnings']:.0%} of {agreement['prompts']} texts"
        )
    return "; ".join(parts)


def sides(one: dict[str, Any]) -> Sequence[str]:
    def shown(value: float | None) -> str:
        if value is None:
            return ""
        return console.size(value) if one["unit"] == "bytes" else f"{console.digits(value)} {one['unit']}"

    return shown(one["ours"]), shown(one["theirs"])
