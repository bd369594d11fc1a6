"""`outrider bench`: the commands `speed`, `speculation` and `kernels`, and their output."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..config import EngineConfig, check
from ..types import SamplingParams
from . import bench_acceptance, bench_peers, console, options
from .options import DRAFT, DraftFlags, unfold

app = typer.Typer(
    help="Measure speed, speculation and kernels on this machine.", no_args_is_help=True, rich_markup_mode=None
)
app.command(name="acceptance")(bench_acceptance.acceptance)
app.command(name="peers")(bench_peers.peers)


@app.command()
@unfold
def speed(
    model: options.Model = options.DEFAULT_MODEL,
    rounds: options.Repeats = 5,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode in each round")] = 64,
    batch: options.Batches = "1,4,16",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt in tokens")] = 128,
    draft: DraftFlags = DRAFT,
    peer: Annotated[
        str | None, typer.Option(help="Compare with another engine: transformers or transformers-loop")
    ] = None,
    quantize: options.Quantize = None,
    backend: options.Backend = options.DEFAULT_BACKEND,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Measure decoding, verification and prefill speed, and compare with the memory bandwidth.

    `random/NAME`, such as `random/llama-3.1-8b`, is the shape of a model with random weights.
    """
    from ..bench.speed import SpeedConfig, measure

    check(EngineConfig(backend=backend, threads=threads))
    config = SpeedConfig(rounds, tokens, options.batch_sizes(batch), prompt_tokens)
    fields = {
        "quantize": quantize,
        "backend": backend,
        "threads": threads,
        "max_requests": max(EngineConfig.max_requests, *config.batches),
        "cache_tokens": config.cache_tokens,
        **draft.fields(),
    }
    found = measure(lambda: options.open_model(model, **fields), backend, config, peer, console.note)
    if json:
        console.json_line(found)
    else:
        show_speed(found)


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
    rounds: options.Repeats = 3,
    raw: options.Raw = False,
    quantize: options.Quantize = None,
    backend: options.Backend = options.DEFAULT_BACKEND,
    deterministic: options.Deterministic = False,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Compare speculation with plain decoding on the same prompts."""
    from ..bench.speculation import edit_prompts, measure
    from .prompts import collect

    prompts = collect([*(prompt or []), *(edit_prompts() if code_changes else [])], file)[:limit]
    drafter = draft.fields(default="ngram")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    found = measure(
        lambda: options.open_model(
            model, quantize=quantize, backend=backend, deterministic=deterministic, threads=threads, **drafter
        ),
        lambda llm: [prompt.tokens(llm, raw, None) for prompt in prompts],
        params,
        rounds,
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
    beyond = found["memory_beyond_weights_and_cache_bytes"]
    rows = [
        ("memory bandwidth", console.figure(found["bandwidth_gb_per_second"], "GB/s")),
        ("weights read per step", console.size(found["weight_bytes_per_step"])),
        ("fraction of bandwidth, batch 1", console.figure(found["fraction_of_bandwidth"], "")),
        ("host time per step, batch 1", console.figure(found["host_milliseconds_per_step"], "ms")),
        ("host share of a step, batch 1", console.figure(found["host_share"], "")),
        ("prefill", console.figure(found["prefill_tokens_per_second"], "tokens/s")),
        ("load to first token", f"{found['load_to_first_token_seconds']:.2f} s"),
        ("memory beyond weights and cache", "not measured" if beyond is None else console.size(beyond)),
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
            f"{console.figure(one['speedup'], 'x')}, {one['mean_acceptance_length']:.2f} tokens per step",
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
        f"{found['model']} with {found['method']} on {machine_title(found['machine'])}; {found['prompts']} prompts, "
        f"median [lowest to highest] of {found['rounds']} rounds\n\n"
    )
    console.table(
        "",
        ("figure", "value"),
        [
            ("speedup over plain decoding", console.figure(found["speedup"], "x")),
            ("tokens/s of plain decoding", console.digits(found["plain_tokens_per_second"])),
            ("tokens/s with speculation", console.digits(found["tokens_per_second"])),
            ("mean acceptance length, with the target's own token", f"{found['mean_acceptance_length']:.2f}"),
            ("drafted, accepted", f"{found['drafted']}, {found['accepted']}"),
            ("acceptance rate by depth", " ".join(f"{rate:.0%}" for rate in found["acceptance_rates"])),
            ("time outside the forward passes", f"{found['outside_models']:.1%}"),
            ("texts that differ from plain decoding", str(found["different_texts"])),
        ],
    )
