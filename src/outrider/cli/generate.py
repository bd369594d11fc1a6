"""`outrider generate`: prompts in, text out."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..types import Output, SamplingParams, SpecStats
from . import console, options
from .options import DRAFT, ENGINE, DraftFlags, EngineFlags, SamplingFlags, unfold
from .prompts import Prompt, collect, read_prediction
from .results import check_endings, describe, gain

if TYPE_CHECKING:
    from ..llm import LLM

COPIED = 256 * 2**20  # bytes: on a GPU the cache has taken nearly all others
SAMPLING = SamplingFlags(max_tokens=256)


@unfold
def generate(
    prompt: options.Prompts = None,
    model: options.Model = options.DEFAULT_MODEL,
    file: options.File = None,
    sampling: SamplingFlags = SAMPLING,
    n: Annotated[int, typer.Option("--n", help="Samples for each prompt")] = 1,
    stop: options.Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of the text")] = False,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities of so many tokens, with --json")] = None,
    raw: Annotated[bool, typer.Option("--raw", "--no-chat", help="Complete the prompt without chat template")] = False,
    system: options.System = None,
    engine: EngineFlags = ENGINE,
    max_context: options.MaxContext = None,
    draft: DraftFlags = DRAFT,
    prediction: options.Prediction = None,
    json: options.Json = False,
) -> None:
    """Answer prompts. The text goes to stdout, the speed to stderr."""
    prompts = collect(prompt, file)
    if logprobs is not None and not json:
        raise typer.BadParameter("`--logprobs` is printed with `--json` only: add `--json`")
    params = SamplingParams(
        **vars(sampling),
        n=n,
        stop=stop or (),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        speculate=False if draft.speculate == "none" else None,  # else a prediction is reason enough to draft
    )
    expected = [one.prediction for one in prompts]
    if prediction is not None:
        expected = [one if one is not None else read_prediction(prediction) for one in expected]
    llm = options.open_model(model, max_context=max_context, **vars(engine), **draft.fields())
    inputs = [one.tokens(llm, raw, system) for one in prompts]
    each = [replace(params, prediction=one) for one in expected]
    if json:
        print_json(llm, prompts, inputs, each)
    elif len(prompts) == 1 and n == 1:
        speed(llm, stream(llm, inputs[0], each[0]))
    else:
        print_all(llm, prompts, inputs, each)


def print_json(llm: LLM, prompts: list[Prompt], inputs: list[list[int] | str], params: list[SamplingParams]) -> None:
    outputs = llm.generate(inputs, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        console.json_line(describe(prompt, output))
    check_endings(outputs)


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
    console.note(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s, {share(llm)}")
    note_gain(outputs)
    check_endings(outputs)


def stream(llm: LLM, prompt: list[int] | str, params: SamplingParams) -> Output:
    """Print the text as it comes. Step times count from the first token on: those before read the prompt."""
    shown = ""
    last: Output | None = None
    for output in llm.stream(prompt, params):
        if last is None:
            llm.engine.reset_times()
        last = output
        whole = output.completions[0].text
        console.text(whole[len(shown) :])
        shown = whole
    console.text("\n")
    assert last is not None, "a request gives at least one output"
    return last


def speed(llm: LLM, output: Output) -> None:
    spent = output.stats
    assert spent is not None, "a finished output carries its stats"
    tokens = len(output.completions[0].token_ids)
    console.note(
        f"{tokens} tokens in {spent.seconds:.2f} s: {spent.tokens_per_second:.1f} tokens/s, "
        f"the first after {spent.first_token_seconds * 1000:.0f} ms, {share(llm)}"
    )
    note_gain([output])
    check_endings([output])


def note_gain(outputs: list[Output]) -> None:
    """What speculation gave to all of them together; nothing about plain decoding."""
    spent = [output.stats for output in outputs if output.stats is not None]
    methods = sorted({one.method for one in spent if one.method})
    spec_stats = SpecStats()
    for one in spent:
        spec_stats.add(one.speculation)
    if methods:
        console.note(gain(", ".join(methods), spec_stats))


def share(llm: LLM) -> str:
    """How much of the memory bandwidth the steps since `reset_times` used for reading weights."""
    from ..diagnostics.machine import bandwidth_meter

    times, weights = llm.engine.times, llm.engine.weight_bytes
    if not times.steps:
        return "too short to compare with the memory bandwidth"
    bandwidth = bandwidth_meter(llm.engine.device, weights, COPIED).read(passes=5).bytes_per_second
    used = weights * times.steps / times.seconds
    return f"{used / bandwidth:.0%} of the memory bandwidth ({bandwidth / 1e9:.1f} GB/s)"
