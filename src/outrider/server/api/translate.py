"""From what clients ask to what the engine does: prompts as tokens, fields as SamplingParams."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import UserError
from ...tokenizer import Tokenizer
from ...types import SamplingParams
from ..context import Context
from ..tools.resolve import ToolPlan
from . import response_format
from .errors import ApiError
from .requests import ChatRequest, CompletionRequest, Sampling

LONG_TEXT = 4096  # characters from which a text is encoded beside the event loop
DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it; a chat takes what is left of the context
SEVERAL = 2048  # prompts in one request, at most
# Fields that SamplingParams has under the same name.
SAME = (
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
    "trace",
)


@dataclass(frozen=True)
class Job:
    """One prompt of a request, ready for the engine."""

    tokens: list[int]
    params: SamplingParams
    text: str = ""  # the prompt as the reply repeats it, where it does
    names: Mapping[str, str] = field(default_factory=dict)  # fields that the client calls otherwise than the engine


async def encode(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, add_special=special)
    return await asyncio.to_thread(tokenizer.encode, text, special)


def check(asked: Sampling) -> None:
    """What one field says about another."""
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "`stream_options` is for streams: leave it out, or set `stream`", param="stream_options")
    widths = {asked.speculate_width, asked.num_speculative_tokens} - {None}
    if len(widths) > 1:
        message = "`speculate_width` and `num_speculative_tokens` are one thing: give one of them"
        raise ApiError(400, message, param="num_speculative_tokens")


# ---- completions ----


def prompts(asked: CompletionRequest) -> list[str] | list[list[int]]:
    """One prompt or several, as texts or as tokens."""
    given = asked.prompt
    if isinstance(given, str):
        return [given]
    if all(isinstance(each, int) for each in given):
        return [given]  # type: ignore[return-value]  # just looked at
    kinds = {type(each) for each in given}
    if kinds not in ({str}, {list}):
        raise ApiError(400, "`prompt` mixes texts and tokens: make it one or several of one kind", param="prompt")
    if len(given) > SEVERAL:
        raise ApiError(400, f"`prompt` holds {len(given)} prompts: send {SEVERAL} at most", param="prompt")
    return given  # type: ignore[return-value]  # just looked at


def check_completion(asked: CompletionRequest) -> None:
    check(asked)
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        message = f"`best_of` is {asked.best_of}: all samples are returned, so leave it out, or make it equal to `n`"
        raise ApiError(400, message, param="best_of", code="unsupported_field")


async def completion_jobs(asked: CompletionRequest, given: list[str] | list[list[int]], context: Context) -> list[Job]:
    tokenizer = context.llm.llm.tokenizer
    special = True if asked.add_special_tokens is None else asked.add_special_tokens
    form = response_format.structured(asked)
    jobs: list[Job] = []
    for prompt in given:
        tokens = await encode(tokenizer, prompt, special) if isinstance(prompt, str) else prompt
        limit = max_tokens(context, tokens, asked.max_tokens, DEFAULT_TOKENS)
        extras: dict[str, Any] = {"logprobs": asked.logprobs, "structured": form}
        if asked.echo and asked.prompt_logprobs is None:
            extras["prompt_logprobs"] = asked.logprobs
        names = {"structured": response_format.field_of(asked)}
        params = sampling(asked, context, limit, extras, names)
        text = repeated(tokenizer, prompt, params) if asked.echo else ""
        jobs.append(Job(tokens, params, text, names))
    return jobs


def repeated(tokenizer: Tokenizer, prompt: str | list[int], params: SamplingParams) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, params.skip_special_tokens)


# ---- chats ----


def check_chat(asked: ChatRequest) -> None:
    check(asked)
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "`top_logprobs` needs `logprobs`: set it to true", param="top_logprobs")
    if len({asked.max_tokens, asked.max_completion_tokens} - {None}) > 1:
        message = "`max_tokens` is the older name of `max_completion_tokens`: give one of them"
        raise ApiError(400, message, param="max_tokens")
    if asked.continue_final_message and asked.add_generation_prompt:
        message = "`continue_final_message` goes on with the last message, and `add_generation_prompt` begins a new one"
        raise ApiError(400, f"{message}: set one of them", param="continue_final_message")


async def chat_jobs(asked: ChatRequest, plan: ToolPlan, context: Context) -> list[Job]:
    tokenizer = context.llm.llm.tokenizer
    text = tokenizer.apply_chat(
        plan.messages,
        # Whoever goes on with a message begins no new one.
        add_generation_prompt=asked.add_generation_prompt is not False and not asked.continue_final_message,
        continue_final_message=bool(asked.continue_final_message),
        tools=plan.tools,
        variables=asked.chat_template_kwargs,
    )
    tokens = await encode(tokenizer, text, bool(asked.add_special_tokens))
    name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    limit = max_tokens(context, tokens, getattr(asked, name), None, name)
    extras: dict[str, Any] = {"structured": plan.structured}
    if asked.logprobs:
        extras["logprobs"] = asked.top_logprobs or 0
    if plan.keep_special:
        extras["skip_special_tokens"] = False  # calls are marked by tokens that are not shown otherwise
    names = {"structured": response_format.field_of(asked), "max_tokens": name}
    return [Job(tokens, sampling(asked, context, limit, extras, names), names=names)]


# ---- both ----


def max_tokens(
    context: Context, prompt: Sequence[int], asked: int | None, default: int | None, name: str = "max_tokens"
) -> int:
    """Tokens to generate at most: what was asked for, else the default, else what is left of the context."""
    context.guard.check_lengths(len(prompt), asked, name)
    if asked is not None:
        return max(asked, 1)  # the engine gives one at least; a reply that shall have none leaves it out
    left = max(context.llm.llm.resolved.max_context - len(prompt), 1)
    limits = [left, default, context.options.max_tokens]
    return min(limit for limit in limits if limit is not None)


def sampling(
    asked: Sampling, context: Context, limit: int, extras: Mapping[str, Any], names: Mapping[str, str]
) -> SamplingParams:
    given = ((name, getattr(asked, name)) for name in SAME if name not in extras)
    fields: dict[str, Any] = {name: value for name, value in given if value is not None}
    width = asked.speculate_width if asked.speculate_width is not None else asked.num_speculative_tokens
    if asked.prediction is not None:
        # Encoded here, so that the engine's thread need not.
        fields["prediction"] = context.llm.llm.tokenizer.encode(asked.prediction.text, add_special=False)
    fields |= {"max_tokens": limit, "seed": None if asked.seed == -1 else asked.seed, "speculate_width": width}
    try:
        return SamplingParams(**fields, **{name: value for name, value in extras.items() if value is not None})
    except UserError as error:
        raise renamed(error, names) from None


def renamed(error: UserError, names: Mapping[str, str]) -> UserError:
    """What the engine refuses, told in the names of the fields that the client sent."""
    told = str(error)
    for name, given in names.items():
        told = told.replace(f"`{name}`", f"`{given}`")
    return UserError(told)
