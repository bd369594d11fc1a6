"""`outrider generate`: generate text for prompts."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UserError
from ..types import Output, SamplingParams, SpecStats
from . import console, options
from .answers import AnswerText, shown, with_channels
from .options import DRAFT, ENGINE, DraftFlags, EngineFlags, SamplingFlags, unfold
from .prompts import Prompt, collect, read_prediction
from .results import check_errors, output_json, speculation_summary, suspension_note

if TYPE_CHECKING:
    from ..llm import LLM

# Bytes of the buffer that measures the memory bandwidth of a GPU: small, because the KV cache has nearly all memory.
BUFFER_BYTES = 256 * 2**20
SAMPLING = SamplingFlags(max_tokens=256)
Input = list[int] | str | UserError  # of the engine; an error if the prompt cannot be served
KeepGoing = Annotated[
    bool | None,
    typer.Option(
        "--keep-going/--no-keep-going",
        help="If a prompt is too long or refused, name it and answer the others [default: only with --file]",
        show_default=False,
    ),
]


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
    lora: options.Adapter = None,
    prediction: options.Prediction = None,
    keep_going: KeepGoing = None,
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
    if params.speculate is False and (prediction is not None or any(predictions)):
        console.note("the prediction has no effect: `--speculate none` turns drafting off")
    if prediction is not None:
        predictions = [one if one is not None else read_prediction(prediction) for one in predictions]
    adapter = options.adapter_fields(lora)
    llm = options.open_model(model, max_context=max_context, **vars(engine), **draft.fields(), **adapter)
    inputs = read_inputs(llm, prompts, raw, system, file is not None if keep_going is None else keep_going)
    if draft.is_auto and not json:
        console.note(draft.drafting(llm))
    params = params if raw else with_channels(params, llm)
    all_params = [replace(params, prediction=one) for one in predictions]
    if json:
        print_json(llm, prompts, inputs, all_params, lora)
    elif len(prompts) == 1 and n == 1 and not isinstance(inputs[0], UserError):
        print_speed(llm, stream(llm, inputs[0], all_params[0], lora))
    else:
        print_all(llm, prompts, inputs, all_params, lora)


def read_inputs(llm: LLM, prompts: list[Prompt], raw: bool, system: str | None, keep_going: bool) -> list[Input]:
    """Return the engine's input for each prompt, or the error of a prompt that cannot be served.

    Raise the error if there is nothing else to answer, or if the others are not to be answered.
    """
    inputs: list[Input] = []
    for prompt in prompts:
        try:
            inputs.append(prompt.tokens(llm, raw, system))
        except UserError as error:
            if not keep_going and len(prompts) > 1:
                raise UserError(f"{error}; `--keep-going` answers the others") from None
            inputs.append(error)
    refused = [one for one in inputs if isinstance(one, UserError)]
    if len(refused) == len(inputs):
        raise refused[0]
    for one in refused:
        console.note(f"error: {one}")
    return inputs


def answer(llm: LLM, inputs: list[Input], params: list[SamplingParams], lora: str | None) -> list[Output]:
    """Generate for all inputs, and return the texts to show; the output of one that cannot be served has its error."""
    from ..llm import refused_output

    asked = [(one, own) for one, own in zip(inputs, params, strict=True) if not isinstance(one, UserError)]
    outputs = iter(llm.generate([one for one, _ in asked], [own for _, own in asked], lora_request=lora))
    return [
        refused_output(f"refused-{index}", own.n, str(one)) if isinstance(one, UserError) else shown(next(outputs), own)
        for index, (one, own) in enumerate(zip(inputs, params, strict=True))
    ]


def print_json(
    llm: LLM, prompts: list[Prompt], inputs: list[Input], params: list[SamplingParams], lora: str | None
) -> None:
    outputs = answer(llm, inputs, params, lora)
    for prompt, output in zip(prompts, outputs, strict=True):
        console.json_line(output_json(prompt, output))
    check_errors(outputs)


def print_all(
    llm: LLM, prompts: list[Prompt], inputs: list[Input], params: list[SamplingParams], lora: str | None
) -> None:
    begin = time.perf_counter()
    llm.engine.reset_times()
    outputs = answer(llm, inputs, params, lora)
    seconds = time.perf_counter() - begin
    for prompt, given, output in zip(prompts, inputs, outputs, strict=True):
        if isinstance(given, UserError):
            continue
        title = prompt.text if prompt.text is not None else prompt.messages
        for one in output.completions:
            console.text(f"{title}\n{one.text.strip()}\n\n")
    tokens = sum(len(one.token_ids) for output in outputs for one in output.completions)
    console.note(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s, {bandwidth_use(llm)}")
    print_speculation(outputs)
    check_errors(outputs)


def stream(llm: LLM, prompt: list[int] | str, params: SamplingParams, lora: str | None) -> Output:
    """Print the text as it is generated. Step times are counted from the first token on, after the prompt."""
    answer_text = AnswerText(params)
    last: Output | None = None
    for output in llm.stream(prompt, params, lora_request=lora):
        if last is None:
            llm.engine.reset_times()
        last = output
        console.text(answer_text.push(output.completions[0].text))
    assert last is not None, "a request gives at least one output"
    console.text(answer_text.push(last.completions[0].text, final=True) + "\n")
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
    spec_stats = SpecStats.total(stats.speculation for stats in all_stats)
    if methods:
        console.note(speculation_summary(", ".join(methods), spec_stats))
        if reason := suspension_note(spec_stats):
            console.note(reason)


def bandwidth_use(llm: LLM) -> str:
    """Return the fraction of the memory bandwidth that reading weights took, in the steps since `reset_times`."""
    from ..diagnostics.machine import bandwidth_meter

    times, weights = llm.engine.times, llm.engine.weight_bytes
    if not times.steps:
        return "too short to compare with the memory bandwidth"
    bandwidth = bandwidth_meter(llm.engine.device, weights, BUFFER_BYTES).read(passes=5).bytes_per_second
    used = weights * times.steps / times.seconds
    return f"{used / bandwidth:.0%} of the memory bandwidth ({bandwidth / 1e9:.1f} GB/s)"
