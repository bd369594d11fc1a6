"""Translate requests for the engine: prompts to token ids, fields to `SamplingParams`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...errors import UserError
from ...input_processor import PREDICTION_CHARACTERS
from ...tokenizer import ChatPrompt, Tokenizer
from ...tokenizer.tokenizer import LONG_TEXT
from ...types import SamplingParams
from ..context import Context
from ..tools.resolve import ResolvedTools
from .costs import check_costs, check_prompt_logprobs
from .errors import ApiError
from .requests import ChatRequest, CompletionRequest, GenerationRequest
from .response_format import requested_field, structured_output

DEFAULT_TOKENS = 16  # default `max_tokens` of a completion, as in OpenAI's API; a chat uses the rest of the context
MAX_PROMPTS = 2048  # prompts in one request
# Fields that SamplingParams has under the same name.
SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "prompt_logprobs",
    "speculate",
    "always_draft",
    "trace",
)


@dataclass(frozen=True)
class EngineInput:
    """One prompt of a request in the form that the engine takes."""

    tokens: list[int]
    params: SamplingParams
    echo: str = ""  # the prompt's text, if the response repeats it
    names: Mapping[str, str] = field(default_factory=dict)  # engine's field name -> name in the request, if different
    adapter: str | None = None  # None: the model itself


async def encode(tokenizer: Tokenizer, text: str | ChatPrompt, special: bool) -> list[int]:
    """Tokenize a text, in a thread of its own if it is long."""
    if isinstance(text, str):
        call, length = partial(tokenizer.encode, text, special), len(text)
    else:
        call, length = partial(tokenizer.encode_chat, text, special), len(text.text)
    return call() if length < LONG_TEXT else await asyncio.to_thread(call)


async def prediction_tokens(request: GenerationRequest, context: Context) -> list[int] | None:
    """Tokenize the predicted output here, to keep that work off the engine's thread, as far as the context goes."""
    if request.prediction is None:
        return None
    text = request.prediction.text[: PREDICTION_CHARACTERS * context.llm.llm.resolved.max_context]
    return await encode(context.llm.llm.tokenizer, text, False)


def check(request: GenerationRequest, prompts: int = 1) -> None:
    """Check the fields that depend on each other, and what they cost."""
    check_costs(request, prompts)
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "`stream_options` needs `stream`: remove it, or set `stream`", param="stream_options")
    widths = {request.speculate_width, request.num_speculative_tokens} - {None}
    if len(widths) > 1:
        message = "`speculate_width` and `num_speculative_tokens` mean the same: pass only one of them"
        raise ApiError(400, message, param="num_speculative_tokens")


# ---- completions ----


def prompts_of(request: CompletionRequest) -> list[str] | list[list[int]]:
    """Return the prompts of a request, as texts or as token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    tokens = [item for item in prompt if isinstance(item, int)]
    if len(tokens) == len(prompt):
        return [tokens]
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(prompt) not in (len(texts), len(lists)):
        raise ApiError(400, "`prompt` mixes texts and token ids: use only one of them", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise ApiError(400, f"`prompt` has {len(prompt)} prompts: send at most {MAX_PROMPTS}", param="prompt")
    return texts or lists


def check_completion(request: CompletionRequest) -> None:
    prompt = request.prompt
    check(request, len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1)
    if request.best_of is not None and request.best_of != (request.n or 1):
        message = f"`best_of` is {request.best_of}: all samples are returned, so remove it, or set it to `n`"
        raise ApiError(400, message, param="best_of", code="unsupported_field")


async def completion_inputs(
    request: CompletionRequest, prompts: list[str] | list[list[int]], context: Context
) -> list[EngineInput]:
    tokenizer = context.llm.llm.tokenizer
    special = True if request.add_special_tokens is None else request.add_special_tokens
    structured = structured_output(request)
    prediction = await prediction_tokens(request, context)
    inputs: list[EngineInput] = []
    for prompt in prompts:
        tokens = await encode(tokenizer, prompt, special) if isinstance(prompt, str) else prompt
        try:
            limit = max_tokens(context, tokens, request.max_tokens, DEFAULT_TOKENS)
        except ApiError as error:
            if len(prompts) > 1:
                error.message = error.message.replace("the prompt has", f"prompt {len(inputs)} has")
            raise
        extras: dict[str, Any] = {"logprobs": request.logprobs, "structured": structured, "prediction": prediction}
        if request.echo and request.prompt_logprobs is None:
            extras["prompt_logprobs"] = request.logprobs
        listed = extras.get("prompt_logprobs", request.prompt_logprobs)
        name = "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs"
        check_prompt_logprobs(listed, len(tokens), (request.n or 1) * len(prompts), name)
        names = {"structured": requested_field(request)}
        params = sampling_params(request, limit, extras, names)
        echo = prompt_text(tokenizer, prompt, params) if request.echo else ""
        inputs.append(EngineInput(tokens, params, echo, names))
    return inputs


def prompt_text(tokenizer: Tokenizer, prompt: str | list[int], params: SamplingParams) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, params.skip_special_tokens)


# ---- chats ----


def check_chat(request: ChatRequest) -> None:
    check(request)
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "`top_logprobs` needs `logprobs`: set it to true", param="top_logprobs")
    if len({request.max_tokens, request.max_completion_tokens} - {None}) > 1:
        message = "`max_tokens` is the older name of `max_completion_tokens`: pass only one of them"
        raise ApiError(400, message, param="max_tokens")
    if request.continue_final_message and request.add_generation_prompt:
        message = "`continue_final_message` continues the last message, and `add_generation_prompt` begins a new one"
        raise ApiError(400, f"{message}: set only one of them", param="continue_final_message")


async def chat_input(
    request: ChatRequest, tools: ResolvedTools, variables: Mapping[str, Any], context: Context
) -> tuple[str, EngineInput]:
    """Return the prompt as the chat template writes it, and the input of the engine."""
    tokenizer = context.llm.llm.tokenizer
    prompt = tokenizer.chat_prompt(
        tools.messages,
        add_generation_prompt=request.add_generation_prompt is not False and not request.continue_final_message,
        continue_final_message=bool(request.continue_final_message),
        tools=tools.tools,
        variables=variables,
    )
    tokens = await encode(tokenizer, prompt, bool(request.add_special_tokens))
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    limit = max_tokens(context, tokens, getattr(request, name), None, name)
    check_prompt_logprobs(request.prompt_logprobs, len(tokens), 1)  # one list for all choices
    prediction = await prediction_tokens(request, context)
    extras: dict[str, Any] = {"structured": tools.structured, "prediction": prediction}
    if request.logprobs:
        extras["logprobs"] = request.top_logprobs or 0
    if tools.keep_special:
        extras["skip_special_tokens"] = False  # the parser needs the special tokens that mark calls
    names = {"structured": requested_field(request), "max_tokens": name}
    return prompt.text, EngineInput(tokens, sampling_params(request, limit, extras, names), names=names)


# ---- both ----


def max_tokens(
    context: Context, prompt: Sequence[int], requested: int | None, default: int | None, name: str = "max_tokens"
) -> int:
    """Return the token limit: the requested one, else the default, else the rest of the context."""
    context.admission.check_lengths(len(prompt), requested, name)
    if requested is not None:
        return max(requested, 1)  # the engine generates at least one token; a response with none leaves it out
    rest = max(context.llm.llm.resolved.max_context - len(prompt), 1)
    limits = [rest, default, context.options.max_tokens]
    return min(limit for limit in limits if limit is not None)


def sampling_params(
    request: GenerationRequest, limit: int, extras: Mapping[str, Any], names: Mapping[str, str]
) -> SamplingParams:
    """Return the parameters of a request. extras: fields that replace its own; names: as in `EngineInput`."""
    values = ((name, getattr(request, name)) for name in SAMPLING_FIELDS if name not in extras)
    fields: dict[str, Any] = {name: value for name, value in values if value is not None}
    width = request.speculate_width if request.speculate_width is not None else request.num_speculative_tokens
    fields |= {"max_tokens": limit, "seed": None if request.seed == -1 else request.seed, "speculate_width": width}
    try:
        return SamplingParams(**fields, **{name: value for name, value in extras.items() if value is not None})
    except UserError as error:
        raise rename_fields(error, names) from None


def rename_fields(error: UserError, names: Mapping[str, str]) -> UserError:
    """Replace the engine's field names in an error message by those of the request."""
    message = str(error)
    for name, requested in names.items():
        message = message.replace(f"`{name}`", f"`{requested}`")
    return UserError(message)
