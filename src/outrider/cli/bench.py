"""`outrider bench`: `acceptance`, `peers`, `speed`, `rows`, `speculation` and `kernels`, and their output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import EngineConfig, check
from ..errors import UserError
from ..types import SamplingParams
from . import console, options
from .options import DRAFT, MEASURED_DRAFT, DraftFlags, MeasuredDraftFlags, unfold
from .prompts import Prompt, collect, collect_sets, read_file

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

EVALUATION = ("mt_bench", "humaneval", "gsm8k")  # the prompt sets that papers on speculation use

app = typer.Typer(
    help="Measure speed, speculation and kernels on this machine.",
    cls=console.SummaryGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def acceptance(
    speculate: Annotated[
        list[str],
        typer.Option(
            metavar="METHOD[:KEY=VALUE,...]", help=f"Drafting method, one of {options.METHOD_NAMES}; repeatable"
        ),
    ],
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
        show_acceptance(results)


def printed(found: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Print each result as soon as it is known: a run may take an hour."""
    for one in found:
        console.json_line(one)
        yield one


def show_acceptance(found: Sequence[dict[str, Any]]) -> None:
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
    from ..speculation.config import short_spec

    names = [short_spec(one["drafter"]) for one in found]
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


@app.command()
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
    activations: options.Activations = EngineConfig.activations,
    backend: Annotated[
        str, typer.Option(help="cpu, or cuda: against vLLM, if it is installed in this environment")
    ] = "cpu",
    again: Annotated[bool, typer.Option("--again", help="Reinstall the engines")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Write a chart of the ratios")] = None,
    json: options.Json = False,
) -> None:
    """Compare with other engines, with the same prompts and weights.

    On the CPU, installs each engine into its own environment in the cache folder, which takes minutes the first time.
    """
    from ..bench.peers import export, measure, registry, report
    from ..diagnostics.machine import usable_cores
    from ..speculation import auto
    from ..speculation.checkpoints import has_modules
    from ..speculation.config import parse
    from ..tokenizer import Tokenizer

    if backend not in ("cpu", "cuda"):
        raise UserError(f"`--backend` is `{backend}`: pass cpu or cuda")
    check(EngineConfig(quantize=quantize, activations=activations, threads=threads))  # before installing anything
    if speculate is None or auto.is_auto(speculate):
        speculate = auto.choose(model, backend, has_modules(export.checked(model, backend)))
    method = registry.forgetful(speculate)
    parse(method)  # refuse a bad specification before installing anything
    chosen = [registry.ours(method), *registry.choose(peer or [], backend)]
    sizes = options.numbers("--batch", batch)
    if plot is not None:
        console.check_plot(plot)
    prompt_sets = evaluation(folder, limit) if folder is not None else {}
    if prompt or sets or file is not None or not prompt_sets:
        prompt_sets |= collect_sets(prompt, sets or [], file, limit)
    checkpoint = export.checked(model, backend)
    tokenizer = Tokenizer.open(checkpoint.tokenizer_source)
    drafts = registry.vllm_drafts(method) if backend == "cuda" else None
    if drafts is not None:
        drafts["model"] = str(export.head_folder(str(drafts["model"])))
        chosen = [chosen[0], *(registry.with_drafts(one, drafts) for one in chosen[1:])]
    config = measure.PeersConfig(
        rounds,
        tokens,
        sizes,
        prompt_tokens,
        threads or usable_cores(),
        quantize=quantize,
        activations=activations,
        backend=backend,
        drafts=drafts,
    )
    ids = {name: [token_ids(prompt, tokenizer, raw) for prompt in prompts] for name, prompts in prompt_sets.items()}
    found = report.report(measure.run(chosen, model, checkpoint, ids, config, console.note, again), model)
    if plot is not None:
        console.write(plot, report.ratio_chart(found), "drawn")
    if json:
        console.json_line(found)
    else:
        show_peers(found)


def evaluation(folder: Path, limit: int | None) -> dict[str, list[Prompt]]:
    """Read the prompt sets that papers on speculation use."""
    return {name: read_file(folder / f"{name}.jsonl")[:limit] for name in EVALUATION}


def token_ids(prompt: Prompt, tokenizer: Tokenizer, raw: bool) -> list[int]:
    """Tokenize a prompt; all engines get the same token ids."""
    messages = prompt.conversation(tokenizer, raw)
    if messages is None:
        return tokenizer.encode(prompt.text or "")
    return tokenizer.encode_chat(tokenizer.chat_prompt(messages))


def show_peers(found: dict[str, Any]) -> None:
    from ..bench.charts import counted

    machine, rounds = found["machine"], counted(found["rounds"], "round")
    sets = ", ".join(f"{count} of {name}" for name, count in found["sets"].items())
    console.text(
        f"{found['model']} on {machine['processor']}, {counted(machine['threads'], 'thread')}, {machine['level']}; "
        f"{found['tokens']} tokens after each prompt ({sets}); median [lowest to highest] of {rounds}\n"
    )
    for engine in found["engines"]:
        console.text(f"\n{engine_text(engine)}\n")
        rows = [one for one in found["ratios"] if one["peer"] == engine["name"]]
        if rows:
            columns = ("figure", "outrider is", "ours", "theirs")
            console.table(
                "", columns, [(one["figure"], console.figure(one["ratio"], "x"), *sides(one)) for one in rows]
            )
    for one in found["skipped"]:
        console.text(f"\nwithout {one['name']}: {one['reason']}\n")


def engine_text(engine: dict[str, Any]) -> str:
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


@app.command()
@unfold
def speed(
    model: options.Model = options.DEFAULT_MODEL,
    rounds: options.Repeats = 5,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode in each round")] = 64,
    batch: options.Batches = "1,4,16",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt in tokens")] = 128,
    draft: MeasuredDraftFlags = MEASURED_DRAFT,
    peer: Annotated[
        str | None, typer.Option(help="Compare with another engine: transformers or transformers-loop")
    ] = None,
    quantize: options.Quantize = None,
    activations: options.Activations = EngineConfig.activations,
    kv_dtype: options.KvDtype = EngineConfig.kv_dtype,
    backend: options.Backend = options.DEFAULT_BACKEND,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Measure decoding, verification and prefill speed, and compare with the memory bandwidth.

    `random/NAME`, such as `random/llama-3.1-8b`, is the shape of a model with random weights.
    """
    from ..bench.speed import SpeedConfig, measure

    check(EngineConfig(backend=backend, threads=threads))
    config = SpeedConfig(rounds, tokens, options.numbers("--batch", batch), prompt_tokens)
    fields = {
        "quantize": quantize,
        "activations": activations,
        "kv_dtype": kv_dtype,
        "backend": backend,
        "threads": threads,
        "max_requests": max(EngineConfig.max_requests, *config.batches),
        "cache_tokens": config.cache_tokens,
        **draft.fields(default="none"),
    }
    found = measure(lambda: options.open_model(model, **fields), backend, config, peer, console.note)
    if json:
        console.json_line(found)
    else:
        show_speed(found)


@app.command()
def rows(
    model: options.Model = options.DEFAULT_MODEL,
    rows: Annotated[str, typer.Option(help="Numbers of rows, separated by commas")] = "1,2,4,5,8,16,32",
    threads: Annotated[
        str | None, typer.Option(help="Thread counts, separated by commas [default: 1, 2, 4, ... up to all cores]")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens in the KV cache before the step")] = 256,
    rounds: options.Repeats = 9,
    quantize: options.Quantize = None,
    activations: options.Activations = EngineConfig.activations,
    kv_dtype: options.KvDtype = EngineConfig.kv_dtype,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Write a chart of the figures")] = None,
    json: options.Json = False,
) -> None:
    """Time one step on the CPU by its number of rows and by threads: layers, output matrix and host.

    A step of N rows verifies N - 1 drafted tokens. `random/NAME` is the shape of a model with random weights.
    """
    from ..bench.rows import RowsConfig, measure
    from ..bench.rows_chart import rows_chart
    from ..diagnostics.machine import usable_cores

    counts = options.numbers("--threads", threads) if threads is not None else doubling(usable_cores())
    chosen = tuple(sorted({1, *options.numbers("--rows", rows)}))  # one row is what the others are compared with
    config = RowsConfig(counts, chosen, context, rounds)
    if plot is not None:
        console.check_plot(plot)
    precision = {"quantize": quantize, "activations": activations, "kv_dtype": kv_dtype}
    found = measure(lambda: options.open_model(model, **precision, **config.engine), config)
    if plot is not None:
        console.write(plot, rows_chart(found), "drawn")
    if json:
        console.json_line(found)
    else:
        show_rows(found)


def doubling(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to `most`, and `most`."""
    return tuple(sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most}))


def show_rows(found: dict[str, Any]) -> None:
    machine = found["machine"]
    console.text(
        f"{found['model']} on {machine['processor']}, {machine['level']}; {found['context']} tokens in the cache, "
        f"medians of {found['rounds']} rounds in ms\n"
        "further row: mean cost of each row after the first, relative to one row; head: the output matrix\n\n"
    )
    console.table(
        "",
        ("threads", "rows", "step", "x one row", "further row", "layers", "head", "host"),
        [
            (
                str(one["threads"]),
                str(one["rows"]),
                console.digits(one["milliseconds"]["median"]),
                f"{one['relative_to_one']:.2f}",
                "" if one["further_row"] is None else f"{one['further_row']:.2f}",
                *(console.digits(one[f"{part}_milliseconds"]) for part in ("layers", "head", "host")),
            )
            for one in found["steps"]
        ],
        words=0,
    )


@app.command()
@unfold
def speculation(
    prompt: options.Prompts = None,
    model: options.Model = options.DEFAULT_MODEL,
    draft: DraftFlags = DRAFT,
    file: options.File = None,
    code_changes: Annotated[
        bool, typer.Option("--edits", help="Use built-in prompts that ask for small changes in code")
    ] = False,
    limit: options.Limit = None,
    max_tokens: options.MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy")] = 0.0,
    batch: Annotated[int, typer.Option(min=1, help="Prompts answered in one batch")] = 1,
    rounds: options.Repeats = 3,
    raw: options.Raw = False,
    quantize: options.Quantize = None,
    backend: options.Backend = options.DEFAULT_BACKEND,
    deterministic: options.Deterministic = False,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Compare speculation with plain decoding on the same prompts: speed, acceptance, times of the requests."""
    from ..bench.speculation import edit_prompts, measure

    prompts = collect([*(prompt or []), *(edit_prompts() if code_changes else [])], file)[:limit]
    fields = {
        "quantize": quantize,
        "backend": backend,
        "deterministic": deterministic,
        "threads": threads,
        "max_requests": max(EngineConfig.max_requests, batch),
        **draft.fields(),
    }
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    found = measure(
        lambda: options.open_model(model, **fields),
        lambda llm: [prompt.tokens(llm, raw, None) for prompt in prompts],
        params,
        rounds,
        batch,
    )
    if json:
        console.json_line(found)
    else:
        show_speculation(found)


@app.command()
def kernels(
    seconds: Annotated[float, typer.Option(min=0.0, help="Approximate duration of the measurement")] = 20.0,
    backend: options.Backend = options.DEFAULT_BACKEND,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Time every kernel at every instruction-set level, or on a GPU, against the reference."""
    from dataclasses import asdict

    from ..bench.kernels import rows
    from ..device import choose_backend, open_device
    from ..kernels import load

    check(EngineConfig(backend=backend, threads=threads))
    chosen = choose_backend(backend)
    open_device(chosen)  # refuse a missing device before measuring
    load(chosen, threads)
    results = rows(chosen, seconds)
    if json:
        for one in results:
            console.json_line({**asdict(one), "gigabytes_per_second": one.gigabytes_per_second, "speedup": one.speedup})
        return
    console.table(
        "",
        ("operation", "case", "level", "microseconds", "GB/s", "x reference", "error"),
        (
            (
                one.op,
                one.case,
                one.level,
                f"{one.seconds * 1e6:.1f}",
                "" if one.gigabytes_per_second is None else f"{one.gigabytes_per_second:.1f}",
                f"{one.speedup:.1f}",
                f"{one.error:.1e}",
            )
            for one in results
        ),
        words=3,
    )


def show_speed(found: dict[str, Any]) -> None:
    from ..diagnostics.machine import machine_title

    console.text(
        f"{found['model']} on {machine_title(found['machine'])}; "
        f"median [lowest to highest] of {found['rounds']} rounds\n\n"
    )
    beyond, late = found["memory_beyond_weights_and_cache_bytes"], found["late_work"]
    rows = [
        ("memory bandwidth", console.figure(found["bandwidth_gb_per_second"], "GB/s")),
        ("weights read per step", console.size(found["weight_bytes_per_step"])),
        ("fraction of bandwidth, batch 1", console.figure(found["fraction_of_bandwidth"], "")),
        ("host time per step, batch 1", console.figure(found["host_milliseconds_per_step"], "ms")),
        ("host share of a step, batch 1", console.figure(found["host_share"], "")),
        ("prefill", console.figure(found["prefill_tokens_per_second"], "tokens/s")),
        ("load to first token", f"{found['load_to_first_token_seconds']:.2f} s"),
        ("memory beyond weights and cache", "not measured" if beyond is None else console.size(beyond)),
        (
            "after the warm-up",
            f"{late['captures']} graphs captured, {late['compilations']} kernels compiled, "
            f"{late['eager_runs']} runs without a graph",
        ),
    ]
    rows += [
        (
            f"decode, batch {one['batch']}",
            f"{console.figure(one['tokens_per_second'], 'tokens/s')}, "
            f"{one['step_milliseconds']['median']:.2f} ms per step",
        )
        for one in found["decode"]
    ]
    rows += [
        (
            f"step with {one['tokens']} {'token' if one['tokens'] == 1 else 'tokens'}",
            f"{console.figure(one['milliseconds'], 'ms')}, {one['relative_to_one']:.2f} x one token",
        )
        for one in found["step"]
    ]
    rows += [
        (
            f"{one['method']} against plain decoding, batch {one['batch']}",
            f"{console.figure(one['speedup'], 'x')}, {one['tokens_per_step']:.2f} tokens per step",
        )
        for one in found["speculation"]
    ]
    if found["peer"] is not None:
        rows += [
            (found["peer"]["name"], console.figure(found["peer"]["tokens_per_second"], "tokens/s")),
            ("Outrider against it, batch 1", console.figure(found["peer"]["speedup"], "x")),
        ]
    console.table("", ("figure", "value"), rows)


def show_speculation(found: dict[str, Any]) -> None:
    from ..diagnostics.machine import machine_title

    console.text(
        f"{found['model']} with {found['method']} on {machine_title(found['machine'])}; {found['prompts']} "
        f"{'prompt' if found['prompts'] == 1 else 'prompts'}"
        f"{'' if found['batch'] == 1 else ' in batches of ' + str(found['batch'])}, "
        f"median [lowest to highest] of {found['rounds']} rounds\n\n"
    )
    console.table(
        "",
        ("figure", "value"),
        [
            ("speedup over plain decoding", console.figure(found["speedup"], "x")),
            ("tokens/s of plain decoding", console.digits(found["plain_tokens_per_second"])),
            ("tokens/s with speculation", console.digits(found["tokens_per_second"])),
            ("tokens per step, with the target's own", f"{found['tokens_per_step']:.2f}"),
            ("the same of steps with a draft", f"{found['mean_acceptance_length']:.2f}"),
            ("drafted, accepted", f"{found['drafted']}, {found['accepted']}"),
            ("acceptance rate by depth", " ".join(f"{rate:.0%}" for rate in found["acceptance_rates"])),
            ("time outside the forward passes", f"{found['outside_models']:.1%}"),
            ("texts that differ from plain decoding", str(found["different_texts"])),
        ],
    )
    console.text("\n")
    names = {"queue": "queue", "prefill": "prefill", "first_token": "first token", "decode": "decode"}
    names["per_output_token"] = "per output token"
    console.table(
        "Times of a request in ms, medians",
        ("", *names.values()),
        [
            (label, *(console.digits(found["request_milliseconds"][mode][name]) for name in names))
            for mode, label in (("plain", "plain decoding"), ("drafted", "speculation"))
        ],
    )
    console.text(f"\n{verdict(found['method'], found['speedup']['median'])}\n")


def verdict(method: str, speedup: float) -> str:
    """State in one sentence whether speculation paid."""
    if speedup >= 1:
        return f"{method} decoded {speedup:.2f} times as fast as plain decoding."
    return f"{method} did not pay here: {speedup:.2f} of the speed of plain decoding (`--speculate none`)."
