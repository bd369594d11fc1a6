"""Plain data that packages share: sampling parameters, drafts, outputs. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import Any, Literal, get_args

from .errors import UserError as UserError  # deprecated alias

Progress = Callable[[int, int, str], None]  # so much is done, of how much (0: nobody knows), and what it is


def unwatched(done: int, total: int, label: str) -> None:
    """Progress that nobody looks at."""


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


@dataclass(frozen=True)
class Draft:
    """What a drafter expects to come next: a chain of tokens, or a tree when `parents` says so."""

    tokens: list[int]
    parents: list[int] | None = None  # for each token the one before it, listed earlier; -1: the request's newest
    logits: Any = None  # [tokens, V] f32 tensor that they were drawn from, before the temperature; None: not drawn
    confidence: list[float] | None = None  # how likely each is kept if the one before it is, as its drafter says
    origins: list[int] | None = None  # of several drafters, who guessed each token: bit i is drafter i; None: only one

    def cut(self, count: int) -> Draft:
        """The first `count` tokens; parents come before their children, so what is left is whole."""
        if count >= len(self.tokens):
            return self
        parts = (self.tokens, self.parents, self.logits, self.confidence, self.origins)
        return Draft(*(None if part is None else part[:count] for part in parts))  # type: ignore[arg-type]

    def within(self, depth: int) -> Draft:
        """Return the tokens that are less than `depth` tokens deep."""
        if self.parents is None:
            return self.cut(max(depth, 0))
        kept = [place for place, own in enumerate(self.depths()) if own < depth]
        return self if len(kept) == len(self.tokens) else self.pick(kept)

    def pick(self, places: Sequence[int]) -> Draft:
        """The tokens at these places as a tree of their own; the one before each must be picked before it."""
        now = {place: number for number, place in enumerate(places)} | {-1: -1}
        before = self.before()
        return Draft(
            [self.tokens[place] for place in places],
            [now[before[place]] for place in places],
            None if self.logits is None else self.logits[places],
            None if self.confidence is None else [self.confidence[place] for place in places],
            None if self.origins is None else [self.origins[place] for place in places],
        )

    def before(self) -> Sequence[int]:
        """For each token the one that it follows; -1: the request's newest."""
        return range(-1, len(self.tokens) - 1) if self.parents is None else self.parents

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The places of the guessed tokens that these are, as far as they were guessed."""
        found: list[int] = []
        last = -1
        for token in tokens:
            following = (place for place, before in enumerate(self.before()) if before == last)
            last = next((place for place in following if self.tokens[place] == token), -1)
            if last < 0:
                break
            found.append(last)
        return found

    def depths(self) -> list[int]:
        """How many tokens stand between each and the request's newest."""
        if self.parents is None:
            return list(range(len(self.tokens)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths


@dataclass
class DrafterStats:
    """One of several drafters: tokens that it guessed, alone or with others, and of these kept."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class SpecStats:
    """What speculation gave, to a request or to a method. A step keeps `accepted` drafts and one token of its own."""

    steps: int = 0  # target passes that gave a token
    drafted: int = 0
    accepted: int = 0
    drafted_per_depth: list[int] = field(default_factory=list)  # [i]: steps that had drafted a token at depth i
    accepted_per_depth: list[int] = field(default_factory=list)  # [i]: steps that accepted it
    widths: dict[int, int] = field(default_factory=dict)  # tokens drafted -> steps that verified so many; 0: none
    drafters: dict[str, DrafterStats] = field(default_factory=dict)  # of several

    @property
    def mean_length(self) -> float:
        """Tokens a step, the one that the target adds itself included."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    @property
    def rates(self) -> list[float]:
        """How often a step that had drafted a token at depth i kept it, whatever became of those before."""
        return [kept / offered for kept, offered in zip(self.accepted_per_depth, self.drafted_per_depth, strict=True)]

    @property
    def offered(self) -> list[int]:  # deprecated alias
        return self.drafted_per_depth

    @property
    def kept(self) -> list[int]:  # deprecated alias
        return self.accepted_per_depth

    def count_plain(self, steps: int) -> None:
        """Steps that had nothing to verify."""
        self.steps += steps
        self.widths[0] = self.widths.get(0, 0) + steps

    def count(self, draft: Draft | None, kept: Sequence[int], drafters: Sequence[str] = ()) -> None:
        """A step that verified `guess` and kept these tokens of it; `drafters` as the bits of its origins name them."""
        if draft is None or not draft.tokens:
            self.count_plain(1)
            return
        self.steps += 1
        width = len(draft.tokens)
        self.widths[width] = self.widths.get(width, 0) + 1
        deepest, accepted = 1 + max(draft.depths()), len(kept)
        self.drafted += width
        self.accepted += accepted
        self._credit(draft, kept, drafters)
        for counts in (self.drafted_per_depth, self.accepted_per_depth):
            counts.extend([0] * (deepest - len(counts)))
        for depth in range(deepest):
            self.drafted_per_depth[depth] += 1
            self.accepted_per_depth[depth] += depth < accepted

    def _credit(self, draft: Draft, kept: Sequence[int], drafters: Sequence[str]) -> None:
        """Who guessed what; a token that several guessed counts for each of them."""
        if draft.origins is None:
            return
        path = draft.path(kept)
        for bit, name in enumerate(drafters):
            credit = self.drafters.setdefault(name, DrafterStats())
            credit.drafted += sum(origin >> bit & 1 for origin in draft.origins)
            credit.accepted += sum(draft.origins[place] >> bit & 1 for place in path)

    def add(self, other: SpecStats) -> None:
        self.steps += other.steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        for mine, counts in (
            (self.drafted_per_depth, other.drafted_per_depth),
            (self.accepted_per_depth, other.accepted_per_depth),
        ):
            mine.extend([0] * (len(counts) - len(mine)))
            for depth, value in enumerate(counts):
                mine[depth] += value
        for width, steps in other.widths.items():
            self.widths[width] = self.widths.get(width, 0) + steps
        for name, theirs in other.drafters.items():
            credit = self.drafters.setdefault(name, DrafterStats())
            credit.drafted += theirs.drafted
            credit.accepted += theirs.accepted


@dataclass(frozen=True)
class DecodeStep:
    """One pass of the target over a row: what it verified, and the tokens that the request went on with."""

    draft: Draft | None
    tokens: list[int]


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


def __getattr__(name: str) -> Any:
    """Resolve names that have moved to `outrider.request`."""
    if name in ("Request", "Row", "RowResult", "Step"):  # deprecated alias
        return getattr(import_module("outrider.request"), name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
