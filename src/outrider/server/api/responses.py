"""Responses of chats and completions: OpenAI's types with vLLM's additions, built from the engine's outputs."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ...tokenizer import TokenTexts
from ...types import Completion, DecodeStep, Draft, Output, SpecStats, TokenLogprobs
from ..context import Context
from .generation import Generation
from .requests import GenerationRequest

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks; vLLM's value

PromptLogprobs = list[dict[str, Any] | None]

encode = msgspec.json.Encoder().encode


class PromptDetails(Struct):
    cached_tokens: int = 0


class CompletionDetails(Struct):
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0
    audio_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class SpeculationMetrics(Struct):
    """vLLM's statistics of the steps that verified a draft, then those of all steps."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # [j]: steps that accepted exactly j draft tokens
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # depth of the deepest draft
    method: str
    tokens_per_step: float
    num_suspended_steps: int  # without a draft because it was not expected to pay
    suspension: dict[str, Any] | None  # why, the last time


class ResponseMetrics(Struct):
    speculative_decoding: SpeculationMetrics


class SpeculationTraceStep(Struct):
    """One forward pass of the target: the draft, and the tokens that were added to the text."""

    drafted: list[int]
    parents: list[int] | None
    drafted_text: list[str]  # the characters that each token completes
    tokens: list[int]
    text: list[str]
    accepted: int
    seconds: float  # from the end of the first step to the end of this one
    drafted_bytes: list[list[int]] | UnsetType = UNSET  # this and the next: if a token holds a part of a character
    bytes: list[list[int]] | UnsetType = UNSET
    origins: list[int] | UnsetType = UNSET  # of combined drafters: bit i is set if the i-th of `a+b` drafted the token


class SpeculationTrace(Struct):
    steps: list[SpeculationTraceStep]


@dataclass(frozen=True)
class ResponseHeader:
    """The fields that every chunk of a response begins with."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, object_name: str, model: str) -> ResponseHeader:
        return cls(prefix + uuid.uuid4().hex, object_name, int(time.time()), model)

    def encode(self, body: Struct) -> bytes:
        """Encode a whole response: the fields of the header, then those of the body."""
        return encode(self)[:-1] + b"," + encode(body)[1:]


class ChunkEncoder:
    """Encodes chunks as events. The header is encoded only once."""

    def __init__(self, header: ResponseHeader) -> None:
        self.opening = b"data: " + encode(header)[:-1] + b","

    def __call__(self, body: Struct) -> bytes:
        return self.opening + encode(body)[1:] + b"\n\n"


class ResponseBody(Struct):
    """The fields of a chunk, or of a whole response, after its header."""

    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET
    speculation: SpeculationTrace | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


@dataclass
class SentState:
    """The amount of one choice that a stream has sent."""

    text: int = 0
    tokens: int = 0
    steps: int = 0
    characters: int = 0  # of the tokens whose logprobs were sent
    begun: bool = False
    ended: bool = False

    def update(self, completion: Completion) -> None:
        """Record that all of the completion was sent."""
        self.text, self.tokens = len(completion.text), len(completion.token_ids)
        self.steps = len(completion.steps or ())
        self.begun, self.ended = True, completion.finish_reason is not None


class ResponseBuilder(Generation):
    """Builds the response of a chat or a completion, whole or as a stream. Subclasses know OpenAI's types."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    request: GenerationRequest

    def __init__(self, request: GenerationRequest, context: Context, model: str) -> None:
        super().__init__(request, context)
        self.model = model
        object_name = self.chunk_object_name if request.stream else self.object_name
        self.header = ResponseHeader.new(self.id_prefix, object_name, model)
        self.encode_chunk = ChunkEncoder(self.header)
        self.texts = context.texts
        self.sent: defaultdict[int, SentState] = defaultdict(SentState)  # by choice
        options = request.stream_options
        self.usage_at_end = bool(options and options.include_usage)
        self.usage_in_chunks = bool(options and options.continuous_usage_stats)

    @abstractmethod
    def choice(self, index: int, prompt: int, completion: Completion) -> Struct:
        """Return a finished choice of a whole response."""

    @abstractmethod
    def chunks(self, index: int, prompt: int, completion: Completion) -> Iterable[ResponseBody]:
        """Yield the chunks for the part of a choice that was not sent yet; none if there is nothing to send."""

    def add_prompt_fields(self, body: ResponseBody) -> ResponseBody:
        return body

    # ---- whole responses and streams ----

    async def whole(self) -> bytes:
        await self.finish()
        prompts = range(len(self.inputs))
        choices = [self.choice(index, prompt, completion) for index, prompt, completion in self.choices(prompts)]
        body = ResponseBody(choices, self.usage(), speculation_metrics(self.latest.values()))
        return self.header.encode(self.add_prompt_fields(body))

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.outputs()) as stream:
            async for prompt, _ in stream:
                if events := b"".join(self.new_events(prompt)):
                    yield events
        if self.usage_at_end:
            yield self.encode_chunk(ResponseBody([], self.usage(), speculation_metrics(self.latest.values())))

    def new_events(self, prompt: int) -> Iterator[bytes]:
        for index, _, completion in self.choices([prompt]):
            for body in self.chunks(index, prompt, completion):
                if self.usage_in_chunks or self.usage_at_end:
                    body.usage = self.usage() if self.usage_in_chunks else None
                yield self.encode_chunk(body)

    # ---- parts of both ----

    def usage(self) -> Usage:
        generated = sum(len(completion.token_ids) for _, _, completion in self.choices(self.latest))
        return count_usage(list(self.latest.values()), generated, self.request.prediction is not None)

    def has_new_details(self, sent: SentState, completion: Completion) -> bool:
        """Return whether new tokens have logprobs or steps to send, even if they add no text yet."""
        return len(completion.token_ids) > sent.tokens and bool(completion.logprobs or completion.steps)

    def token_ids(self, completion: Completion, start: int = 0) -> list[int] | UnsetType:
        return completion.token_ids[start:] if self.request.return_token_ids else UNSET

    def trace(self, completion: Completion, start: int = 0) -> SpeculationTrace | UnsetType:
        if completion.steps is None:
            return UNSET
        described, at = [], sum(len(step.tokens) for step in completion.steps[:start])
        for step in completion.steps[start:]:
            before, at = completion.token_ids[:at], at + len(step.tokens)
            final = completion.finish_reason is not None and at == len(completion.token_ids)
            described.append(trace_step(step, self.texts, completion.steps[0].time, before, final))
        return SpeculationTrace(described)


# ---- fields ----


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def count_usage(outputs: Sequence[Output], generated: int, has_prediction: bool) -> Usage:
    """Count the tokens of all prompts of a request; with details once all of them have finished."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    usage = Usage(prompt, generated, prompt + generated)
    finished = [output.stats for output in outputs if output.stats is not None]
    if len(finished) == len(outputs):
        usage.prompt_tokens_details = PromptDetails(sum(stats.cached_tokens for stats in finished))
        details = CompletionDetails()
        if has_prediction:
            for stats in finished:
                drafted, accepted = prediction_tokens(stats.method, stats.speculation)
                details.accepted_prediction_tokens += accepted
                details.rejected_prediction_tokens += drafted - accepted
        usage.completion_tokens_details = details
    return usage


def prediction_tokens(method: str, spec_stats: SpecStats) -> tuple[int, int]:
    """Return how many tokens were drafted from the request's `prediction`, and how many of them were accepted."""
    if stats := spec_stats.drafters.get("prediction"):
        return stats.drafted, stats.accepted
    return (spec_stats.drafted, spec_stats.accepted) if method == "prediction" else (0, 0)


def speculation_metrics(outputs: Iterable[Output]) -> ResponseMetrics | UnsetType:
    """Return the speculation statistics of finished outputs; UNSET if no method drafted for them."""
    drafted = [output.stats for output in outputs if output.stats is not None and output.stats.method]
    if not drafted:
        return UNSET
    spec_stats = SpecStats.total(stats.speculation for stats in drafted)
    steps = spec_stats.num_drafts
    at_least = [steps, *spec_stats.accepted_per_depth, 0]  # [j]: steps that accepted j draft tokens or more
    return ResponseMetrics(
        SpeculationMetrics(
            mean_acceptance_length=spec_stats.mean_acceptance_length,
            draft_acceptance_rate=spec_stats.accepted / spec_stats.drafted if spec_stats.drafted else 0.0,
            acceptance_histogram=[more - fewer for more, fewer in pairwise(at_least)],
            num_spec_steps=steps,
            num_accepted_draft_tokens=spec_stats.accepted,
            num_draft_tokens=spec_stats.drafted,
            num_spec_tokens=len(spec_stats.accepted_per_depth),
            method="+".join(dict.fromkeys(stats.method for stats in drafted)),
            tokens_per_step=spec_stats.tokens_per_step,
            num_suspended_steps=spec_stats.suspended,
            suspension=spec_stats.suspension.as_json() if spec_stats.suspension else None,
        )
    )


def trace_step(
    step: DecodeStep, texts: TokenTexts, began: float, before: list[int], final: bool
) -> SpeculationTraceStep:
    """Describe one step. began: `perf_counter` at the end of the first step; before: the answer's tokens before it."""
    draft = step.draft or Draft([])
    described = SpeculationTraceStep(
        drafted=draft.tokens,
        parents=draft.parents,
        drafted_text=texts.of_draft(draft, before),
        tokens=step.tokens,
        text=texts.of(step.tokens, before, final),
        accepted=len(draft.path(step.tokens)),
        seconds=round(step.time - began, 6),
    )
    if not all(described.drafted_text) or not all(described.text):
        described.drafted_bytes = [list(texts.spelling(token)) for token in draft.tokens]
        described.bytes = [list(texts.spelling(token)) for token in step.tokens]
    if draft.origins is not None:
        described.origins = draft.origins
    return described


def prompt_logprobs(output: Output, texts: TokenTexts) -> PromptLogprobs | UnsetType:
    """Return vLLM's format: for each prompt token but the first, the most probable tokens and the token itself."""
    if output.prompt_logprobs is None:
        return UNSET
    positions: PromptLogprobs = []
    for entry in output.prompt_logprobs:
        if entry is None:
            positions.append(None)
            continue
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)]
        if all(token != entry.token for token, _, _ in ranked):
            ranked.append((entry.token, entry.logprob, entry.rank))
        positions.append(
            {
                str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": texts.text(token)}
                for token, logprob, rank in ranked
            }
        )
    return positions


def with_sampled(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """Return the most probable tokens, and the sampled one if it is not among them."""
    included = any(token == entry.token for token, _ in entry.top)
    return list(entry.top) if included else [*entry.top, (entry.token, entry.logprob)]
