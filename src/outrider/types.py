"""Plain data that packages share: sampling parameters, drafts, outputs. No torch here."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

from .errors import UserError as UserError  # deprecated alias
from .validation import check_type

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[int, int, str], None]  # units done, units in total (0: unknown), label


def unwatched(done: int, total: int, label: str) -> None:
    """Ignore progress."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


StructuredKind = Literal["json", "json_object", "regex", "grammar", "choice"]


@dataclass(frozen=True)
class StructuredOutput:
    """A format that the output must have.

    `value` depends on `kind`: a JSON schema for `json`, nothing for `json_object`, a regular expression for `regex`, a
    Lark or GBNF grammar for `grammar`, a list of texts for `choice`. A schema or a list is stored as JSON text.
    """

    kind: StructuredKind
    value: str | Mapping[str, Any] | Sequence[str] | bool = ""

    def __post_init__(self) -> None:
        kinds = get_args(StructuredKind)
        _require(self.kind in kinds, f"`kind` of `structured` is `{self.kind}`: expected one of {', '.join(kinds)}")
        if self.kind == "json" and isinstance(self.value, Mapping | bool):
            object.__setattr__(self, "value", _json(self.value))
        elif self.kind == "choice" and isinstance(self.value, Sequence) and not isinstance(self.value, str | bytes):
            object.__setattr__(self, "value", _json(list(self.value)))
        expected = {"json": "a JSON schema, as a mapping or as JSON text", "choice": "a list of texts"}
        _require(
            isinstance(self.value, str),
            f"`value` of `structured` is {reprlib.repr(self.value)}: expected {expected.get(self.kind, 'a text')}",
        )

    @property
    def text(self) -> str:
        """Return `value`, which is stored as text."""
        assert isinstance(self.value, str)
        return self.value


def _json(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"`value` of `structured` cannot be written as JSON ({error}): correct it") from None


# Fields of SamplingParams that None leaves at their default, as vLLM's defaults do.
EMPTY_DEFAULTS: dict[str, Any] = {
    "logit_bias": {},
    "banned_token_ids": (),
    "bad_words": (),
    "stop": (),
    "stop_token_ids": (),
}


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, with vLLM's names.

    Length
        n: Number of samples; they share the prompt's pages.
        max_tokens: Limit on generated tokens.
        min_tokens: Generated tokens before the end-of-text token or a stop can end the output.
        stop: Text, or list of texts, before which the output ends.
        stop_token_ids: Tokens after which the output ends.
        include_stop_str_in_output: Leave the stop text in the output.
        ignore_eos: Continue after the end-of-text token.

    Choice of tokens
        temperature: 0 takes the argmax; below 1 sharpens the distribution.
        top_k: Sample among this many most probable tokens; 0 or -1: all.
        top_p: Of these, sample among the fewest whose probabilities sum to this.
        min_p: Of these, drop tokens below this fraction of the largest probability.
        repetition_penalty: Divide positive logits of tokens seen in prompt or output, multiply negative ones.
        presence_penalty: Subtract this from the logits of tokens in the output.
        frequency_penalty: Subtract this from them for each occurrence.
        logit_bias: Added to the logits, by token.
        allowed_token_ids: Only these tokens; None: all.
        banned_token_ids: Never these tokens.
        bad_words: Never these words.
        structured: Format that the output must have, a StructuredOutput.
        seed: The same seed gives the same output in any batch; None: derived from the engine's.

    Output
        skip_special_tokens: Leave special tokens out of the text.
        logprobs: Return the log-probabilities of the chosen token and of this many most probable ones.
        prompt_logprobs: The same for the tokens of the prompt.
        trace: Return the draft and the accepted tokens of every step.

    Speculation
        speculate: Method; None or True: the engine's; False or "none": plain decoding.
        speculate_width: Limit on drafted tokens per step; None: the method's; 0: draft nothing.
        always_draft: Draft the full width in every step, even if drafts are not expected to pay.
        prediction: Text or tokens that the output is expected to repeat, to draft from.

    Sharing
        cache_salt: Requests share cached prefixes, and answers to draft from, only with requests of the same salt.
    """

    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
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
    speculate: str | bool | None = None
    speculate_width: int | None = None
    always_draft: bool = False
    prediction: str | Sequence[int] | None = None
    structured: StructuredOutput | None = None
    trace: bool = False
    cache_salt: str = ""

    def __post_init__(self) -> None:
        for name in ("top_k", *EMPTY_DEFAULTS, "allowed_token_ids", "prediction"):
            self._normalize(name)
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not each.default and each.name not in ("speculate", "structured"):  # these are checked below
                check_type(each.name, value, str(each.type))
        self._check_counts()
        self._check_ranges()

    def _normalize(self, name: str) -> None:
        """Replace vLLM's None and -1 by our defaults, and lists by tuples, which make the value immutable in depth."""
        value = getattr(self, name)
        if value is None and name in EMPTY_DEFAULTS:
            value = copy(EMPTY_DEFAULTS[name])
        elif name == "top_k" and value == -1:  # vLLM's other value for "all tokens"
            value = 0
        elif name == "stop" and isinstance(value, str):
            value = (value,)
        elif name != "logit_bias" and isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
            value = tuple(value)
        object.__setattr__(self, name, value)

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

    def _check_ranges(self) -> None:
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
            self.structured is None or isinstance(self.structured, StructuredOutput),
            f"`structured` is {reprlib.repr(self.structured)}: expected a StructuredOutput, such as "
            '`StructuredOutput("json", schema)`',
        )
        _require(
            self.structured is None or not self.ignore_eos,
            "`ignore_eos` and `structured` exclude each other: structured output ends with an end-of-text token",
        )
        _require(self.allowed_token_ids != (), "`allowed_token_ids` is empty: no token could ever be chosen")


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-text token, stop id or stop string
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the client disconnected or aborted
    ERROR = "error"  # this request failed; others continue


Ending = tuple[FinishReason, int | None]  # reason, and the stop id if one matched


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a chosen token and of the top-k tokens, under the unprocessed model distribution."""

    token: int
    logprob: float
    rank: int  # 1: the argmax
    top: tuple[tuple[int, float], ...]  # (token, logprob), most probable first


@dataclass(frozen=True)
class Draft:
    """Tokens proposed for one request: a chain, or a tree if `parents` is given."""

    tokens: list[int]
    parents: list[int] | None = None  # index of each token's parent, which is listed before it; -1: the newest token
    logits: Tensor | None = None  # [tokens, V] f32 that the tokens were sampled from, before temperature; None: argmax
    confidence: list[float] | None = None  # estimated probability that a token is accepted if its parent is
    origins: list[int] | None = None  # combined drafters that proposed each token, as a bit mask; None: only one

    def cut(self, count: int) -> Draft:
        """Return the first `count` tokens. Parents precede their children, so the tree stays whole."""
        if count >= len(self.tokens):
            return self
        parts = (self.tokens, self.parents, self.logits, self.confidence, self.origins)
        return Draft(*(None if part is None else part[:count] for part in parts))  # type: ignore[arg-type]

    def within(self, depth: int) -> Draft:
        """Return the tokens that are less than `depth` tokens deep."""
        if self.parents is None:
            return self.cut(max(depth, 0))
        kept = [index for index, own_depth in enumerate(self.depths()) if own_depth < depth]
        return self if len(kept) == len(self.tokens) else self.pick(kept)

    def pick(self, indices: Sequence[int]) -> Draft:
        """Return the tokens at these indices as a tree. A token's parent must be picked before it."""
        renumbered = {index: number for number, index in enumerate(indices)} | {-1: -1}
        parents = self.parent_indices()
        return Draft(
            [self.tokens[index] for index in indices],
            [renumbered[parents[index]] for index in indices],
            None if self.logits is None else self.logits[indices],
            None if self.confidence is None else [self.confidence[index] for index in indices],
            None if self.origins is None else [self.origins[index] for index in indices],
        )

    def parent_indices(self) -> Sequence[int]:
        """Return the index of each token's parent, for chains too; -1: the request's newest token."""
        return range(-1, len(self.tokens) - 1) if self.parents is None else self.parents

    def path(self, tokens: Sequence[int]) -> list[int]:
        """Return the indices along which the draft spells `tokens`, up to the first that was not drafted."""
        if self.parents is None:
            count = 0
            for token, drafted in zip(tokens, self.tokens, strict=False):
                if token != drafted:
                    break
                count += 1
            return list(range(count))
        indices: list[int] = []
        last = -1
        for token in tokens:
            children = (index for index, parent in enumerate(self.parent_indices()) if parent == last)
            last = next((index for index in children if self.tokens[index] == token), -1)
            if last < 0:
                break
            indices.append(last)
        return indices

    def depths(self) -> list[int]:
        """Return how many drafted tokens precede each token on its path."""
        if self.parents is None:
            return list(range(len(self.tokens)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths


@dataclass
class DrafterStats:
    """Tokens that one of several combined drafters proposed, alone or with others, and how many were accepted."""

    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Suspension:
    """Why drafts are suspended: the best step with a draft costs more than it yields, by measured latency and rates."""

    batch_size: int  # requests in the step, each with one row
    rows: int  # rows of the best step in which this request has a draft
    cost: float  # its seconds with drafting, divided by those of the step without a draft
    drafting: float  # the part of `cost` that is drafting
    tokens: float  # its expected tokens, divided by those of the step without a draft
    acceptance_rate: float  # expected of the first drafted token
    reading: float = 0.0  # plain steps that the drafter would read the prompt for, if drafts save less; else 0

    def as_json(self) -> dict[str, Any]:
        """Return the fields, and the sentence that they make as `reason`."""
        return {**asdict(self), "reason": str(self)}

    def __str__(self) -> str:
        one = "one row" if self.batch_size == 1 else f"{self.batch_size} rows"
        drafting = f", {self.drafting:.1f}x of it for drafting" if self.drafting >= 0.05 else ""
        reading = f"; reading the prompt first takes as long as {self.reading:.0f} steps" if self.reading else ""
        return (
            f"a step with {self.rows} rows costs {self.cost:.2f}x of {one} here{drafting}, and yields "
            f"{self.tokens:.2f}x the tokens at acceptance rate {self.acceptance_rate:.2f}{reading}"
        )


@dataclass
class SpecStats:
    """Speculation counters of a request or a method. A step yields its accepted tokens and one from the target."""

    steps: int = 0  # target passes that gave a token
    drafted: int = 0
    accepted: int = 0
    drafted_per_depth: list[int] = field(default_factory=list)  # [i]: steps with a drafted token at depth i
    accepted_per_depth: list[int] = field(default_factory=list)  # [i]: steps that accepted it
    widths: dict[int, int] = field(default_factory=dict)  # drafted tokens -> steps that verified that many; 0: none
    drafters: dict[str, DrafterStats] = field(default_factory=dict)  # by name, where drafters are combined
    suspended: int = 0  # steps without a draft because it was not expected to pay
    suspension: Suspension | None = None  # why, the last time
    nonfinite: int = 0  # drafted tokens that verification ignored: sampled from NaN, +inf or nothing but -inf

    @property
    def num_drafts(self) -> int:
        """Return the number of steps that verified a draft."""
        return self.steps - self.widths.get(0, 0)

    @property
    def mean_acceptance_length(self) -> float:
        """Return the tokens per step that verified a draft, as vLLM counts them: with the one that the target adds."""
        return 1 + self.accepted / self.num_drafts if self.num_drafts else 1.0

    @property
    def tokens_per_step(self) -> float:
        """Return the tokens per step over all steps; 1 is plain decoding."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    @property
    def mean_length(self) -> float:  # deprecated alias
        return self.tokens_per_step

    @property
    def rates(self) -> list[float]:
        """Return the share of steps with a token drafted at depth i that accepted it."""
        counts = zip(self.accepted_per_depth, self.drafted_per_depth, strict=True)
        return [accepted / drafted for accepted, drafted in counts]

    @property
    def offered(self) -> list[int]:  # deprecated alias
        return self.drafted_per_depth

    @property
    def kept(self) -> list[int]:  # deprecated alias
        return self.accepted_per_depth

    def suspend(self, reason: Suspension, steps: int = 1) -> None:
        """Count steps without a draft that would not have paid."""
        self.suspended += steps
        self.suspension = reason

    def count_plain(self, steps: int) -> None:
        """Count steps that had no draft to verify."""
        self.steps += steps
        self.widths[0] = self.widths.get(0, 0) + steps

    def count(self, draft: Draft | None, accepted: Sequence[int], drafters: Sequence[str] = ()) -> None:
        """Count a step that verified `draft` and accepted these tokens of it.

        `drafters` names the bits of the draft's origins.
        """
        if draft is None or not draft.tokens:
            self.count_plain(1)
            return
        self.steps += 1
        width = len(draft.tokens)
        self.widths[width] = self.widths.get(width, 0) + 1
        depths, count = width if draft.parents is None else 1 + max(draft.depths()), len(accepted)
        self.drafted += width
        self.accepted += count
        self._count_drafters(draft, accepted, drafters)
        for counts in (self.drafted_per_depth, self.accepted_per_depth):
            counts.extend([0] * (depths - len(counts)))
        for depth in range(depths):
            self.drafted_per_depth[depth] += 1
            self.accepted_per_depth[depth] += depth < count

    def _count_drafters(self, draft: Draft, accepted: Sequence[int], drafters: Sequence[str]) -> None:
        """Count for each combined drafter; a token that several proposed counts for each of them."""
        if draft.origins is None:
            return
        path = draft.path(accepted)
        for bit, name in enumerate(drafters):
            stats = self.drafters.setdefault(name, DrafterStats())
            stats.drafted += sum(origin >> bit & 1 for origin in draft.origins)
            stats.accepted += sum(draft.origins[index] >> bit & 1 for index in path)

    @classmethod
    def total(cls, parts: Iterable[SpecStats]) -> SpecStats:
        """Return the sum of these counters."""
        total = cls()
        for part in parts:
            total.add(part)
        return total

    def add(self, other: SpecStats) -> None:
        self.steps += other.steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        for totals, counts in (
            (self.drafted_per_depth, other.drafted_per_depth),
            (self.accepted_per_depth, other.accepted_per_depth),
        ):
            totals.extend([0] * (len(counts) - len(totals)))
            for depth, value in enumerate(counts):
                totals[depth] += value
        for width, steps in other.widths.items():
            self.widths[width] = self.widths.get(width, 0) + steps
        for name, theirs in other.drafters.items():
            stats = self.drafters.setdefault(name, DrafterStats())
            stats.drafted += theirs.drafted
            stats.accepted += theirs.accepted
        self.suspended += other.suspended
        self.suspension = other.suspension or self.suspension
        self.nonfinite += other.nonfinite


@dataclass(frozen=True)
class DecodeStep:
    """One decode step of a request: the draft that it verified, and the tokens that it appended."""

    draft: Draft | None
    tokens: list[int]
    time: float = field(default=0.0, compare=False)  # `perf_counter` at its end, under SamplingParams.trace


@dataclass(frozen=True)
class Completion:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    steps: list[DecodeStep] | None = None  # under SamplingParams.trace
    reasoning: str = (
        ""  # of `chat` with a model that answers in channels (gpt-oss): `analysis`, which `text` leaves out
    )


@dataclass(frozen=True)
class Stats:
    """Statistics of a finished request. `steps` counts target passes that gave it a token."""

    steps: int
    seconds: float
    first_token_seconds: float
    tokens_per_second: float
    cached_tokens: int
    preemptions: int
    speculation: SpecStats = field(default_factory=SpecStats)
    method: str = ""
    queue_seconds: float = 0.0  # before its first step; a preempted request does not count as queued again
    time_per_output_token: float = 0.0  # seconds, mean of the tokens after the first of each sample

    @property
    def prefill_seconds(self) -> float:
        """Return the time from the first step to the first token."""
        return self.first_token_seconds - self.queue_seconds

    @property
    def decode_seconds(self) -> float:
        """Return the time from the first token to the last."""
        return self.seconds - self.first_token_seconds


@dataclass(frozen=True)
class Output:
    """The output of a request so far: one completion per sample."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    finished: bool
    # One entry per prompt token; None for the first, which nothing precedes.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stats: Stats | None = None

    @property
    def outputs(self) -> list[Completion]:
        """Return `completions` under vLLM's name."""
        return self.completions


def __getattr__(name: str) -> Any:
    """Resolve names that have moved to `outrider.request`."""
    if name in ("Request", "Row", "RowResult", "Step"):  # deprecated alias
        return getattr(import_module("outrider.request"), name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
