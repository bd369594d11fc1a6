"""The interface of a method: its options, what it needs of the engine, what it is given, and what it returns.

A method is a module with `Options` (a frozen dataclass that extends MethodOptions; its fields are the method's flags),
`build(options, target)` and a class with `needs`, `propose`, `accept` and `release`. The engine reads `needs`, never
the name. A method that drafts from a sampling parameter names it as `DRAFTS_FROM`: a request that sets the parameter
selects the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Protocol

from torch import Tensor

from ..cache.pages import Pages
from ..device import Device
from ..errors import UserError
from ..kernels import Kernels
from ..models import Model
from ..request import Request
from ..tokenizer import Tokenizer
from ..types import Draft


@dataclass(frozen=True)
class MethodOptions:
    """The flags that every method has. A method's own Options extend it."""

    width: int = 4  # tokens that it drafts at most


@dataclass(frozen=True)
class TreeOptions(MethodOptions):
    """The flags of a method whose drafts may branch."""

    width: int = 4  # tokens that it drafts at most, in all branches together
    branches: int = 1  # tokens that may follow each; 1: a chain
    max_depth: int | None = None  # depth of a draft at most; default: `width`, or less where the method chooses

    @property
    def levels(self) -> int | None:  # deprecated alias
        return self.max_depth

    def check_tree(self) -> None:
        """Refuse options that no tree satisfies; a method calls it when it is built."""
        for name, value in (("branches", self.branches), ("max_depth", self.max_depth)):
            if value is not None and value < 1:
                raise UserError(f"`{name}` is {value}: it must be at least 1")
        if 0 < self.width < self.branches:
            raise UserError(
                f"`branches` is {self.branches} and `width` is {self.width}: a token has at most as many tokens after "
                "it as the whole draft has, so raise `width` or lower `branches`"
            )


@dataclass(frozen=True)
class Needs:
    """What a method needs of the engine."""

    width: int  # tokens that it drafts at most
    aux_layers: tuple[int, ...] = ()  # target hidden states that it reads: entering layer i; past the last: leaving it
    has_kv: bool = False  # it keeps keys and values of its own, in the target's pages, and must see every token
    lookahead: int = 0  # positions beyond the text that it writes while drafting
    context: int | None = None  # longer texts are not drafted for; None: no limit of its own
    trees: bool = False  # its drafts may branch
    costs_time: bool = False  # drafting takes time that must pay; else it counts as free
    has_probs: bool = False  # its drafts have distributions, which they can be sampled from
    multi_step: bool = False  # it can draft without the host: it is a MultiStepDrafter (multi_step/state.py)
    stops_early: bool = False  # it drafts token by token, and ends where the next one does not pay
    suspendable: bool = False  # it may miss tokens, and be shown them later or never (drafters/kv_tracker.py)
    taps: InitVar[tuple[int, ...] | None] = None  # deprecated alias of aux_layers
    follows: InitVar[bool | None] = None  # deprecated alias of has_kv
    costs: InitVar[bool | None] = None  # deprecated alias of costs_time
    draws: InitVar[bool | None] = None  # deprecated alias of has_probs
    unattended: InitVar[bool | None] = None  # deprecated alias of multi_step
    stops: InitVar[bool | None] = None  # deprecated alias of stops_early
    lazy: InitVar[bool | None] = None  # deprecated alias of suspendable

    def __post_init__(self, *deprecated: object) -> None:
        names = ("aux_layers", "has_kv", "costs_time", "has_probs", "multi_step", "stops_early", "suspendable")
        for name, value in zip(names, deprecated, strict=True):
            if value is not None:
                object.__setattr__(self, name, value)


@dataclass(frozen=True)
class DraftContext:
    """One request after a step, as a drafter sees it. Its text is request.tokens(...), then `new_tokens`."""

    request: Request
    start: int  # position of the first token that the step ran
    computed: int  # tokens of the text whose hidden states and KV are final; the text may be longer
    new_tokens: list[int]  # tokens that the step added: `request` does not have them yet; empty inside a prompt
    num_draft_tokens: int  # tokens that may be drafted now; 0: only update the drafter's own state
    first_row: int  # row of `hidden` of the token at `start`; those up to `computed` follow
    min_acceptance: float = 0.0  # a token less likely to be accepted than this does not pay: drafting may end there
    tokens_per_second: float = 0.0  # that the request makes at present: the value of time
    min_continuation: float = 0.0  # after a token less likely to be accepted than this, another one does not pay

    @property
    def length(self) -> int:
        return self.request.length + len(self.new_tokens)

    @property
    def fresh(self) -> list[int]:  # deprecated alias
        return self.new_tokens

    @property
    def width(self) -> int:  # deprecated alias
        return self.num_draft_tokens

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return tokens [start, stop) of the text."""
        known = self.request.length
        new = self.new_tokens[max(start - known, 0) : max(stop - known, 0)]
        return self.request.tokens(start, min(stop, known)) + new


Ids = Tensor | Sequence[Sequence[int]]  # [B, W] int32 on the device, or a list for each row where the host found them


@dataclass(frozen=True)
class DraftBatch:
    """The guesses for all rows of one call. A tree lists its tokens so that any beginning of it is a tree, and the best
    of its size: parents first, and by how likely all of the path to a token is kept.
    """

    tokens: Ids
    lengths: Sequence[int] | None = None  # [B], how many count of each row; None: all
    parents: Ids | None = None  # the token before each; -1: the request's newest. None: chains
    logits: Tensor | None = None  # [B, W, V] f32 that tokens were drawn from, before the temperature; None: not drawn
    confidence: Sequence[Sequence[float]] | None = None  # how likely each is kept if its parent is; None: unknown
    origins: Sequence[Sequence[int]] | None = None  # of several drafters, who guessed each token: as in Guess
    reached: int | None = None  # how deep it drafted, where it ended when going on did not pay; None: as deep as asked

    def drafts(self) -> list[Draft]:
        """The guess for each row, its tokens on the host."""
        tokens = self.rows(self.tokens)
        parents = None if self.parents is None else self.rows(self.parents)
        return [
            Draft(
                own,
                None if parents is None else parents[row][: len(own)],
                None if self.logits is None else self.logits[row, : len(own)],
                None if self.confidence is None else list(self.confidence[row][: len(own)]),
                None if self.origins is None else list(self.origins[row][: len(own)]),
            )
            for row, own in enumerate(tokens)
        ]

    def rows(self, ids: Ids) -> list[list[int]]:
        """`tokens` or `parents` on the host, as long as they count."""
        listed: Sequence[Sequence[int]] = ids.tolist() if isinstance(ids, Tensor) else ids
        lengths = self.lengths if self.lengths is not None else map(len, listed)
        return [list(row[:length]) for row, length in zip(listed, lengths, strict=True)]


class Proposer(Protocol):
    needs: Needs

    def propose(self, contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        """Guess what comes after each context's text, at most context.num_draft_tokens tokens.

        last [B] int32: the token at position context.computed, the first that has not run; empty where the method does
        not follow. hidden [T, aux layers * E] f32: the aux hidden states of all tokens of the step, side by side; None
        without `needs.aux_layers`.
        """
        ...

    def accept(self, requests: Sequence[Request], accepted: Sequence[int]) -> None:
        """Of the last draft for each request so many tokens were kept: rewind own state to that."""
        ...

    def release(self, requests: Sequence[Request]) -> None:
        """These requests are gone."""
        ...


@dataclass(frozen=True)
class Target:
    """What a method may know of the model that it drafts for."""

    model: Model
    tokenizer: Tokenizer
    ops: Kernels
    device: Device
    page_size: int
    max_context: int
    kv_dtype: str
    sampled: bool = False  # drafts are drawn at the request's temperature; else they are the likeliest tokens
    coupled: bool = True  # drawn with the target's own noise (exact match); else with noise of their own, logits kept
    replacement: bool = False  # siblings with noise of their own are drawn independently; else all differ
    can_suspend: bool = False  # drafters that do not pay are not called, and catch up with the text later
    quantize: str | None = None
    source: str = ""  # where the model comes from: a name or a path
    storages: list[Pages] = field(default_factory=list)

    def storage(self, layers: int, kv_heads: int, head_dim: int, dtype: str, states: int = 0) -> Pages:
        """Pages for a method's own keys and values, numbered as the target's; they are there once the engine runs.

        `states`: floats to keep beside each page, for what must be known of its last token.
        """
        pages = Pages(layers, kv_heads, self.page_size, head_dim, dtype, states)
        self.storages.append(pages)
        return pages
