"""Plain data that travels between the rooms: requests, steps, outputs. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args

from .drafts import Draft as Draft
from .drafts import DrafterStats as DrafterStats
from .drafts import SpecStats as SpecStats

Progress = Callable[[int, int, str], None]  # so much is done, of how much (0: nobody knows), and what it is


def unwatched(done: int, total: int, label: str) -> None:
    """Progress that nobody looks at."""


LONGEST_SENTENCE = 1000  # characters of a refusal: what it quotes may come from a hostile file


class UserError(ValueError):
    """The user asked for something impossible. The message is one sentence that says what to do."""

    def __init__(self, message: str) -> None:
        text = "".join(each if each.isprintable() else " " if each.isspace() else "?" for each in message)
        if len(text) > LONGEST_SENTENCE:  # the culprit stands at its beginning, the remedy at its end
            text = f"{text[: LONGEST_SENTENCE // 2]} ... {text[-LONGEST_SENTENCE // 3 :]}"
        super().__init__(text)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


StructuredKind = Literal["json", "json_object", "regex", "grammar", "choice"]


@dataclass(frozen=True)
class StructuredOutput:
    """The shape that an answer must have."""

    kind: StructuredKind
    value: str = ""  # a JSON schema, nothing, a regular expression, a Lark or GBNF grammar, a JSON list of texts

    def __post_init__(self) -> None:
        kinds = get_args(StructuredKind)
        _require(self.kind in kinds, f"`kind` of `structured` is `{self.kind}`: expected one of {', '.join(kinds)}")
        _require(isinstance(self.value, str), "`value` of `structured` is no text: pass JSON as text")


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens. The names are vLLM's."""

    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: every token
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculate: str | bool | None = None  # a method's name; None or True: the engine's; False or "none": plain decoding
    speculate_width: int | None = None  # tokens to draft at most; None: the method's own
    prediction: str | Sequence[int] | None = None  # the text, or the tokens, that the answer is expected to repeat
    structured: StructuredOutput | None = None  # the shape that the answer must have, whatever else is asked
    trace: bool = False  # keep what every step drafted, and what became of it

    def __post_init__(self) -> None:
        # Tuples, so that a frozen value is frozen all the way down.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name in ("banned_token_ids", "bad_words", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.prediction is not None and not isinstance(self.prediction, str):
            object.__setattr__(self, "prediction", tuple(self.prediction))
        if self.top_k == -1:  # vLLM's other spelling of "every token"
            object.__setattr__(self, "top_k", 0)
        self._check_counts()
        self._check_shape()

    def _check_counts(self) -> None:
        _require(self.n >= 1, f"`n` is {self.n}: it must be at least 1")
        _require(self.max_tokens >= 1, f"`max_tokens` is {self.max_tokens}: it must be at least 1")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            f"`min_tokens` is {self.min_tokens}: it must lie between 0 and `max_tokens` ({self.max_tokens})",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or 0 <= value <= 100, f"`{name}` is {value}: it must lie between 0 and 100")
        _require(
            self.speculate is None or isinstance(self.speculate, str | bool),
            f"`speculate` is {self.speculate!r}: name a method, or pass False for plain decoding",
        )
        _require(
            self.speculate_width is None or self.speculate_width >= 0,
            f"`speculate_width` is {self.speculate_width}: it must be 0 (draft nothing) or more",
        )
        _require(self.seed is None or 0 <= self.seed < 2**63, f"`seed` is {self.seed}: it must lie in [0, 2^63)")

    def _check_shape(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _require(math.isfinite(getattr(self, name)), f"`{name}` is {getattr(self, name)}: it must be finite")
        _require(self.temperature >= 0, f"`temperature` is {self.temperature}: it must be 0 (greedy) or more")
        _require(self.top_k >= 0, f"`top_k` is {self.top_k}: it must be 0 (every token) or more")
        _require(0 < self.top_p <= 1, f"`top_p` is {self.top_p}: it must lie in (0, 1]")
        _require(0 <= self.min_p <= 1, f"`min_p` is {self.min_p}: it must lie in [0, 1]")
        _require(self.repetition_penalty > 0, f"`repetition_penalty` is {self.repetition_penalty}: it must be above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(abs(getattr(self, name)) <= 2, f"`{name}` is {getattr(self, name)}: it must lie in [-2, 2]")
        _require(all(self.stop), "`stop` holds an empty string: every stop string needs at least one character")
        _require(all(self.bad_words), "`bad_words` holds an empty string: every word needs at least one character")
        _require(
            self.structured is None or not self.ignore_eos,
            "`ignore_eos` and `structured` exclude each other: an answer that has its shape must end",
        )
        _require(self.allowed_token_ids != (), "`allowed_token_ids` is empty: no token could ever be chosen")


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-text token, stop id or stop string
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the client went away
    ERROR = "error"  # this request failed; the others go on


Ending = tuple[FinishReason, int | None]  # why a token ended a request, and which stop id it was


@dataclass(frozen=True)
class TokenLogprobs:
    """The chosen token's log-probability, and the likeliest tokens beside it (raw model distribution)."""

    token: int
    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...]  # (token, logprob), likeliest first


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
    family: str = ""  # the id that the `n` samples of one prompt share
    bad_words: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # for prompt tokens 1, 2, ...
    computed: int = 0  # tokens whose keys and values lie in the cache
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    preemptions: int = 0
    cached: int = 0  # prompt tokens that the prefix cache supplied
    method: str = ""  # who drafts for it; empty: nobody
    drafters: tuple[str, ...] = ()  # the same one by one, where several draft together
    width: int = 0  # tokens that may be drafted at once; 0: none, or none any more
    lookahead: int = 0  # positions beyond its text that the drafter writes
    followed: str = ""  # whose keys and values lie in its pages beside the target's; empty: nobody's
    steady: bool = False  # decoding it needs the host for nothing but to see where it ends
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
    rounds: int = 1  # passes of the target that there are pages for; more than one where all rows decode


@dataclass(frozen=True)
class DecodeStep:
    """One pass of the target over a row: what it verified, and the tokens that the request went on with."""

    draft: Draft | None
    tokens: list[int]


@dataclass(frozen=True)
class RowResult:
    """What the runner answers for one row: no token inside a prompt, one in plain decoding, more with a draft."""

    tokens: list[int]  # of all rounds
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    draft: Draft | None = None  # what the drafter expects after `tokens`
    deserted: bool = False  # the drafter failed on it: the request goes on without
    rounds: Sequence[DecodeStep] = ()  # where there were several, with drafts
    passes: int = 1  # of the target; without drafts each of several gave one of the tokens


@dataclass(frozen=True)
class Completion:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    steps: list[DecodeStep] | None = None  # where SamplingParams.trace asks: what each drafted, and the tokens it gave


@dataclass(frozen=True)
class Stats:
    """What a finished request cost. `steps` counts target passes that gave it a token."""

    steps: int
    seconds: float
    first_token_seconds: float
    tokens_per_second: float
    cached_tokens: int
    preemptions: int
    speculation: SpecStats = field(default_factory=SpecStats)
    method: str = ""


@dataclass(frozen=True)
class Output:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    finished: bool
    prompt_logprobs: list[TokenLogprobs] | None = None
    stats: Stats | None = None
