"""What clients get, in OpenAI's shapes with vLLM's additions, and how an output becomes one."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ..tokenizer import Tokenizer
from ..types import DecodeStep, Output, SpecStats, TokenLogprobs

LOWEST = -9999.0  # JSON has no minus infinity
KNOWN_TOKENS = 2**16

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


class Speculation(Struct):
    """As vLLM reports it: of the steps that verified a draft."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # [j]: steps that kept exactly j drafted tokens
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # the deepest draft
    method: str


class Metrics(Struct):
    speculative_decoding: Speculation


class TraceStep(Struct):
    """One pass of the target: what was drafted, and the tokens that the text went on with."""

    drafted: list[int]
    parents: list[int] | None
    drafted_text: list[str]
    tokens: list[int]
    text: list[str]
    accepted: int


class Trace(Struct):
    steps: list[TraceStep]


@dataclass(frozen=True)
class Header:
    """What all chunks of a reply begin with."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, kind: str, model: str) -> Header:
        return cls(prefix + uuid.uuid4().hex, kind, int(time.time()), model)

    def whole(self, body: Struct) -> bytes:
        """The fields of the header, then those of the body."""
        return encode(self)[:-1] + b"," + encode(body)[1:]


class Framer:
    """Chunks as events. The header is encoded once."""

    def __init__(self, header: Header) -> None:
        self.opening = b"data: " + encode(header)[:-1] + b","

    def __call__(self, body: Struct) -> bytes:
        return self.opening + encode(body)[1:] + b"\n\n"


class Texts:
    """Tokens as they read, remembered: the same few thousand come again and again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text: Callable[[int], str] = functools.lru_cache(KNOWN_TOKENS)(tokenizer.token_text)
        self.spellings = functools.cache(tokenizer.spellings)

    def bytes(self, token: int) -> list[int]:
        known = self.spellings()
        return list(known[token]) if token < len(known) else []  # models may have more rows than there are tokens

    def of(self, tokens: Sequence[int]) -> list[str]:
        return [self.text(token) for token in tokens]


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def usage(outputs: Sequence[Output], generated: int, predicted: bool) -> Usage:
    """Of all prompts of a request; details once they have ended."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    told = Usage(prompt, generated, prompt + generated)
    stats = [output.stats for output in outputs if output.stats is not None]
    if len(stats) == len(outputs):
        told.prompt_tokens_details = PromptDetails(sum(each.cached_tokens for each in stats))
        details = CompletionDetails()
        if predicted:
            for each in stats:
                drafted, accepted = from_prediction(each.method, each.speculation)
                details.accepted_prediction_tokens += accepted
                details.rejected_prediction_tokens += drafted - accepted
        told.completion_tokens_details = details
    return told


def from_prediction(method: str, spec_stats: SpecStats) -> tuple[int, int]:
    """Tokens that were drafted from the request's prediction, and of these kept."""
    if credit := spec_stats.drafters.get("prediction"):
        return credit.drafted, credit.accepted
    return (spec_stats.drafted, spec_stats.accepted) if method == "prediction" else (0, 0)


def speculation(outputs: Iterable[Output]) -> Metrics | UnsetType:
    """What drafting gave; nothing where nobody drafted."""
    spec_stats, methods = SpecStats(), []
    for output in outputs:
        if output.stats is not None and output.stats.method:
            spec_stats.add(output.stats.speculation)
            methods.append(output.stats.method)
    if not methods:
        return UNSET
    steps = spec_stats.steps - spec_stats.widths.get(0, 0)
    at_least = [steps, *spec_stats.kept, 0]
    return Metrics(
        Speculation(
            mean_acceptance_length=1 + spec_stats.accepted / steps if steps else 1.0,
            draft_acceptance_rate=spec_stats.accepted / spec_stats.drafted if spec_stats.drafted else 0.0,
            acceptance_histogram=[more - fewer for more, fewer in pairwise(at_least)],
            num_spec_steps=steps,
            num_accepted_draft_tokens=spec_stats.accepted,
            num_draft_tokens=spec_stats.drafted,
            num_spec_tokens=len(spec_stats.kept),
            method="+".join(dict.fromkeys(methods)),
        )
    )


def trace_step(step: DecodeStep, texts: Texts) -> TraceStep:
    drafted = step.draft.tokens if step.draft is not None else []
    return TraceStep(
        drafted=drafted,
        parents=step.draft.parents if step.draft is not None else None,
        drafted_text=texts.of(drafted),
        tokens=step.tokens,
        text=texts.of(step.tokens),
        accepted=len(step.draft.path(step.tokens)) if step.draft is not None else 0,
    )


def prompt_logprobs(output: Output, texts: Texts) -> PromptLogprobs | UnsetType:
    """vLLM's shape: for each token of the prompt but the first, the likeliest and the one that stands there."""
    if output.prompt_logprobs is None:
        return UNSET
    found: PromptLogprobs = [None]
    for entry in output.prompt_logprobs:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)]
        if all(token != entry.token for token, _, _ in ranked):
            ranked.append((entry.token, entry.logprob, entry.rank))
        found.append(
            {
                str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": texts.text(token)}
                for token, logprob, rank in ranked
            }
        )
    return found


def with_chosen(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """The likeliest tokens, and the chosen one if it is not among them."""
    among = any(token == entry.token for token, _ in entry.top)
    return list(entry.top) if among else [*entry.top, (entry.token, entry.logprob)]
