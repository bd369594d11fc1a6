"""`outrider generate`: generate text for prompts."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..types import Output, SamplingParams, SpecStats
from . import console, options
from .options import DRAFT, ENGINE, DraftFlags, EngineFlags, SamplingFlags, unfold
from .prompts import Prompt, collect, read_prediction
from .results import check_errors, output_json, speculation_summary

if TYPE_CHECKING:
    from ..llm import LLM

# Bytes of the buffer that measures the memory bandwidth of a GPU: small, because the KV cache has nearly all memory.
BUFFER_BYTES = 256 * 2**20
SAMPLING = SamplingFlags(max_tokens=256)


@unfold
def generate(
    prompt: options.Prompts = None,
    model: options.Model = options.DEFAULT_MODEL,
    file: options.File = None,
    sampling: SamplingFlags = SAMPLING,
    n: Annotated[int, typer.Option("--n", help="Number of samples for each prompt")] = 1,
    stop: options.Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after the end-of-sequence token")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Print the log-probabilities of this many tokens per position; needs --json")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", "--no-chat", help="Use the prompt without the chat template")] = False,
    system: options.System = None,
    engine: EngineFlags = ENGINE,
    max_context: options.MaxContext = None,
    draft: DraftFlags = DRAFT,
    prediction: options.Prediction = None,
    json: options.Json = False,
) -> None:
    """Generate text for prompts. The text is printed to stdout, the speed to stderr."""
    prompts = collect(prompt, file)
    if logprobs is not None and not json:
        raise typer.BadParameter("`--logprobs` needs `--json`: add `--json`")
    params = SamplingParams(
        **vars(sampling),
        n=n,
        stop=stop or (),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        speculate=False if draft.speculate == "none" else None,  # None: `--prediction` alone enables drafting
    )
    predictions = [one.prediction for one in prompts]
    if prediction is not None:
        predictions = [one if one is not None else read_prediction(prediction) for one in predictions]
    llm = options.open_model(model, max_context=max_context, **vars(engine), **draft.fields())
    inputs = [one.tokens(llm, raw, system) for one in prompts]
    if draft.is_auto and not json:
        console.note(draft.drafting(llm))
    all_params = [replace(params, prediction=one) for one in predictions]
    if json:
        print_json(llm, prompts, inputs, all_params)
    elif len(prompts) == 1 and n == 1:
        print_speed(llm, stream(llm, inputs[0], all_params[0]))
    else:
        print_all(llm, prompts, inputs, all_params)


def print_json(llm: LLM, prompts: list[Prompt], inputs: list[list[int] | str], params: list[SamplingParams]) -> None:
    outputs = llm.generate(inputs, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        console.json_line(output_json(prompt, output))
    check_errors(outputs)


def print_all(llm: LLM, prompts: list[Prompt], inputs: list[list[int] | str], params: list[SamplingParams]) -> None:
    begin = time.perf_counter()
    llm.engine.reset_times()
    outputs = llm.generate(inputs, params)
    seconds = time.perf_counter() - begin
    for prompt, output in zip(prompts, outputs, strict=True):
        title = prompt.text if prompt.text is not None else prompt.messages
        for one in output.completions:
            console.text(f"{title}\n{one.text.strip()}\n\n")
    tokens = sum(len(one.token_ids) for output in outputs for one in output.completions)
    console.note(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s, {bandwidth_use(llm)}")
    print_speculation(outputs)
    check_errors(outputs)


def stream(llm: LLM, prompt: list[int] | str, params: SamplingParams) -> Output:
    """Print the text as it is generated. Step times are counted from the first token on, after the prompt."""
    shown = ""
    last: Output | None = None
    for output in llm.stream(prompt, params):
        if last is None:
            llm.engine.reset_times()
        last = output
        text = output.completions[0].text
        console.text(text[len(shown) :])
        shown = text
    console.text("\n")
    assert last is not None, "a request gives at least one output"
    return last


def print_speed(llm: LLM, output: Output) -> None:
    stats = output.stats
    assert stats is not None, "a finished output carries its stats"
    tokens = len(output.completions[0].token_ids)
    console.note(
        f"{tokens} tokens in {stats.seconds:.2f} s: {stats.tokens_per_second:.1f} tokens/s, "
        f"the first after {stats.first_token_seconds * 1000:.0f} ms, {bandwidth_use(llm)}"
    )
    print_speculation([output])
    check_errors([output])


def print_speculation(outputs: list[Output]) -> None:
    """Print the speculation stats of all outputs together; nothing after plain decoding."""
    all_stats = [output.stats for output in outputs if output.stats is not None]
    methods = sorted({stats.method for stats in all_stats if stats.method})
    spec_stats = SpecStats()
    for stats in all_stats:
        spec_stats.add(stats.speculation)
    if methods:
        console.note(speculation_summary(", ".join(methods), spec_stats))


def bandwidth_use(llm: LLM) -> str:
    """Return the fraction of the memory bandwidth that reading weights took, in the steps since `reset_times`."""
    from ..diagnostics.machine import bandwidth_meter

    times, weights = llm.engine.times, llm.engine.weight_bytes
    if not times.steps:
        return "too short to compare with the memory bandwidth"
    bandwidth = bandwidth_meter(llm.engine.device, weights, BUFFER_BYTES).read(passes=5).bytes_per_second
    used = weights * times.steps / times.seconds
    return f"{used / bandwidth:.0%} of the memory bandwidth ({bandwidth / 1e9:.1f} GB/s)"
