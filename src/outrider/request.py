"""Requests, and the steps that move them on: plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .types import DecodeStep, Draft, Ending, FinishReason, SamplingParams, SpecStats, TokenLogprobs


@dataclass(eq=False)
class Request:
    """One sequence being generated. Owned by the scheduler; everyone else reads."""

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    end_tokens: frozenset[int] = frozenset()  # the model's end-of-text ids, empty under ignore_eos
    max_length: int = 0  # prompt + output may not grow beyond this many tokens
    index: int = 0  # which of the `n` samples
    parent_id: str = ""  # the id that the `n` samples of one prompt share
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # for prompt tokens 1, 2, ...
    computed: int = 0  # tokens whose keys and values lie in the cache
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens that the prefix cache supplied
    method: str = ""  # who drafts for it; empty: nobody
    drafters: tuple[str, ...] = ()  # the same one by one, where several draft together
    width: int = 0  # tokens that may be drafted at once; 0: none, or none any more
    lookahead: int = 0  # positions beyond its text that the drafter writes
    kv_method: str = ""  # whose keys and values lie in its pages beside the target's; empty: nobody's
    multi_step: bool = False  # decoding it needs the host for nothing but to see where it ends
    prediction: list[int] = field(default_factory=list)  # params.prediction as tokens
    grammar: Any = None  # grammar.Follower of its output, where params.structured asks for a shape
    draft: Draft | None = None  # what the next step verifies
    spec_stats: SpecStats = field(default_factory=SpecStats)
    trace: list[DecodeStep] = field(
        default_factory=list
    )  # one for each pass that gave a token, where params.trace asks

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def goes_on(self, tokens: Sequence[int]) -> bool:
        """Whether surely none of these, added to the output, ends the request."""
        count = len(self.output) + len(tokens)
        if count >= self.params.max_tokens or len(self.prompt) + count >= self.max_length:
            return False
        return self.end_tokens.isdisjoint(tokens) and not any(stop in tokens for stop in self.params.stop_token_ids)

    def ending(self, count: int, token: int) -> Ending | None:
        """Whether `token` as number `count` of the output ends the request, and which stop id did it."""
        if count > self.params.min_tokens:
            if token in self.end_tokens:
                return FinishReason.STOP, None
            if token in self.params.stop_token_ids:
                return FinishReason.STOP, token
        elif self.grammar is not None and token in self.end_tokens:  # nothing else was allowed, however early it is
            return FinishReason.STOP, None
        if count >= self.params.max_tokens or len(self.prompt) + count >= self.max_length:
            return FinishReason.LENGTH, None
        return None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output, without joining the two lists."""
        split = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(start - split, 0) : max(stop - split, 0)]


@dataclass(frozen=True)
class Row:
    """A request's part of one step: run `tokens`, which stand at `start`, `start + 1`, ..."""

    request: Request
    start: int
    tokens: list[int]
    sample: bool  # the last token's logits choose the next token; false inside a chunked prompt
    draft: Draft | None = None  # drafted tokens that run after `tokens`, to be verified

    @property
    def size(self) -> int:
        """Tokens that the row takes of a step."""
        return len(self.tokens) + (len(self.draft.tokens) if self.draft is not None else 0)


@dataclass(frozen=True)
class Step:
    """What the scheduler asks of the runner."""

    rows: list[Row]
    decode_steps: int = 1  # passes of the target that there are pages for; more than one where all rows decode


@dataclass(frozen=True)
class RowResult:
    """What the runner answers for one row: no token inside a prompt, one in plain decoding, more with a draft."""

    tokens: list[int]  # of all rounds
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    draft: Draft | None = None  # what the drafter expects after `tokens`
    dropped: bool = False  # the drafter failed on it: the request goes on without
    decode_steps: Sequence[DecodeStep] = ()  # where there were several, with drafts
    passes: int = 1  # of the target; without drafts each of several gave one of the tokens
