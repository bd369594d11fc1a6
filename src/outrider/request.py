"""Requests, and the steps that advance them: plain data, no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .types import DecodeStep, Draft, Ending, FinishReason, SamplingParams, SpecStats, TokenLogprobs

if TYPE_CHECKING:
    from .adapters import Adapter
    from .cache.prefix import Snapshot
    from .sampler import LogitTable
    from .structured_output.matcher import GrammarMatcher


@dataclass(eq=False)
class RequestInput:
    """What was asked: fixed when the request is made."""

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    end_tokens: frozenset[int] = frozenset()  # the model's end-of-text ids; empty under ignore_eos
    max_length: int = 0  # limit on prompt and output together, in tokens
    index: int = 0  # which of the parent's `n` samples
    parent_id: str = ""  # id that the `n` samples of one prompt share
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    prediction: list[int] = field(default_factory=list)  # params.prediction as token ids
    grammar: GrammarMatcher | None = None  # for params.structured
    adapter: Adapter | None = None  # None: the model itself
    logit_table: LogitTable | None = None  # of params.logit_bias and such; made when the sampler first needs it


@dataclass(eq=False)
class GenerationState:
    """What was generated."""

    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # for prompt tokens 1, 2, ...
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    trace: list[DecodeStep] = field(default_factory=list)  # one entry per decode step, under params.trace


@dataclass(eq=False)
class CacheState:
    """Where the request stands in the queue and in the key/value cache."""

    admitted: float | None = None  # `perf_counter` when it first left the queue
    computed: int = 0  # tokens whose keys and values are in the cache
    pages: list[int] = field(default_factory=list)
    state_slot: int = 0  # slot of its states in recurrent layers
    next_state_slot: int = -1  # slot that its step writes them to; -1: the same
    snapshot: Snapshot | None = None  # the latest one of its states, if a later one takes its place
    branch: int = 0  # tokens that it shares with another text: the states after them are kept; 0: none
    passed: int = 0  # leading pages whose window pages were given back: no layer's window reaches them any more
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens that the prefix cache supplied


@dataclass(eq=False)
class SpeculationState:
    """How the request is drafted for. The first five fields come from SpeculationManager.assign."""

    method: str = ""  # speculation method; empty: plain decoding
    drafters: tuple[str, ...] = ()  # the methods by themselves, where several are combined
    width: int = 0  # limit on drafted tokens per step; 0 also after the drafter was dropped
    lookahead: int = 0  # positions beyond the text that the drafter writes
    kv_method: str = ""  # method whose keys and values lie in the pages beside the target's; empty: none
    multi_step: bool = False  # can be decoded for several steps without the host
    draft: Draft | None = None  # for the next step to verify
    spec_stats: SpecStats = field(default_factory=SpecStats)


@dataclass(eq=False)
class Request(SpeculationState, CacheState, GenerationState, RequestInput):
    """One sequence being generated. The scheduler owns it; other modules read it."""

    @property
    def cache_salt(self) -> str | tuple[int, str]:
        """Return what else than its tokens a prefix must share with this request, to be reused."""
        salt = self.params.cache_salt
        return salt if self.adapter is None else (self.adapter.number, salt)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return True for the first sample alone: the others would compute the same."""
        return self.params.prompt_logprobs is not None and self.index == 0

    def continues_after(self, tokens: Sequence[int]) -> bool:
        """Return True if appending these tokens certainly does not end the request."""
        count = len(self.output) + len(tokens)
        if count >= self.params.max_tokens or len(self.prompt) + count >= self.max_length:
            return False
        stops = self.params.stop_token_ids
        return self.end_tokens.isdisjoint(tokens) and (not stops or not any(stop in tokens for stop in stops))

    def ending(self, count: int, token: int) -> Ending | None:
        """Return why `token`, as output token number `count`, ends the request; None if it does not."""
        if count > self.params.min_tokens:
            if token in self.end_tokens:
                return FinishReason.STOP, None
            if token in self.params.stop_token_ids:
                return FinishReason.STOP, token
        elif self.grammar is not None and token in self.end_tokens:  # the grammar allowed no other token
            return FinishReason.STOP, None
        if count >= self.params.max_tokens or len(self.prompt) + count >= self.max_length:
            return FinishReason.LENGTH, None
        return None

    def append(self, draft: Draft | None, result: RowResult) -> Ending | None:
        """Append the tokens of all decode steps of a row; return why one of them ends the request, if one does.

        draft: verified by the first of these steps.
        """
        steps = result.decode_steps
        if result.passes == 1 and not steps:
            steps = [DecodeStep(draft, result.tokens)]
        if self.continues_after(result.tokens) and not self.params.trace:  # the common case, for thousands of requests
            self.output += result.tokens
            self.logprobs += result.logprobs
            if not steps:
                self.spec_stats.count_plain(len(result.tokens))
            for step in steps:
                if step.tokens:  # the last one is the target's
                    self.spec_stats.count(step.draft, step.tokens[:-1], self.drafters)
            return None
        first = 0
        for step in steps or [DecodeStep(None, [token]) for token in result.tokens]:
            ending = self._append_step(step, result.logprobs[first : first + len(step.tokens)])
            if ending is not None:
                return ending
            first += len(step.tokens)
        return None

    def _append_step(self, step: DecodeStep, logprobs: Sequence[TokenLogprobs]) -> Ending | None:
        """Append the tokens of a decode step up to the one that ends the request, if any."""
        ending = None
        for index, token in enumerate(step.tokens):
            self.output.append(token)
            if logprobs:
                self.logprobs += logprobs[index : index + 1]
            ending = self.ending(len(self.output), token)
            if ending is not None:
                break
        if step.tokens:  # the last one is the target's
            self.spec_stats.count(step.draft, step.tokens[:index], self.drafters)
            if self.params.trace:
                traced = None if step.draft is None else replace(step.draft, logits=None)
                self.trace.append(DecodeStep(traced, step.tokens[: index + 1], time.perf_counter()))
        return ending

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return tokens [start, stop) of prompt and output, without joining the two lists."""
        split = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(start - split, 0) : max(stop - split, 0)]


@dataclass(frozen=True)
class Row:
    """A request's part of one step: `tokens` run at positions `start`, `start + 1`, ..."""

    request: Request
    start: int
    tokens: list[int]
    sample: bool  # choose the next token from the last token's logits; False inside a chunked prompt
    draft: Draft | None = None  # drafted tokens that run after `tokens`, to be verified
    unread: int = 1  # last ones of `tokens` that the states of recurrent layers leave to the next step

    @property
    def size(self) -> int:
        """Return the tokens that the row adds to a step."""
        return len(self.tokens) + (len(self.draft.tokens) if self.draft is not None else 0)

    @property
    def states(self) -> tuple[int, int, int]:
        """Return the row of Batch.states. The newest token is left to the next step: then this one can be repeated."""
        source, target = self.request.state_slot, self.request.next_state_slot
        return source, source if target < 0 else target, len(self.tokens) - self.unread


@dataclass(frozen=True)
class Step:
    """The scheduler's order to the runner."""

    rows: list[Row]
    decode_steps: int = 1  # decode steps to run without the host; pages for all of them are allocated
    window_pages: Mapping[int, int] = field(default_factory=dict)  # new window pages, by page (cache/window_pages.py)


@dataclass(frozen=True)
class RowResult:
    """The runner's result for one row: no token inside a prompt, one in plain decoding, more with a draft."""

    tokens: list[int]  # of all decode steps
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    draft: Draft | None = None  # to follow `tokens`
    dropped: bool = False  # the request continues without its drafter, which failed or does not pay
    decode_steps: Sequence[DecodeStep] = ()  # draft and tokens of each decode step, where several verified drafts
    passes: int = 1  # forward passes of the target; without drafts, each of several gave one token
