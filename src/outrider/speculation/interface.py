"""The interface of a drafting method: its options, its needs, its inputs and its drafts.

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
from ..device.graphs import Graphs
from ..errors import UserError
from ..kernels import Kernels
from ..models import Model
from ..request import Request
from ..tokenizer import Tokenizer
from ..types import Draft


@dataclass(frozen=True)
class MethodOptions:
    """The options that every method has; the Options of a method extend it."""

    width: int = 4  # tokens that it drafts at most


@dataclass(frozen=True)
class TreeOptions(MethodOptions):
    """The options of a method whose drafts may branch."""

    width: int = 4  # tokens that it drafts at most, in all branches together
    branches: int = 1  # children of a token at most; 1: a chain
    max_depth: int | None = None  # depth of a draft at most; default: `width`, or less where the method chooses

    @property
    def levels(self) -> int | None:  # deprecated alias
        return self.max_depth

    def check_tree(self) -> None:
        """Refuse options that no tree satisfies; called by `build` of a method."""
        for name, value in (("branches", self.branches), ("max_depth", self.max_depth)):
            if value is not None and value < 1:
                raise UserError(f"`{name}` is {value}: it must be at least 1")
        if 0 < self.width < self.branches:
            raise UserError(
                f"`branches` is {self.branches} and `width` is {self.width}: a token cannot have more "
                "children than the draft has tokens, so raise `width` or lower `branches`"
            )


@dataclass(frozen=True)
class Needs:
    """Properties of a method that the engine reads."""

    width: int  # tokens that it drafts at most
    aux_layers: tuple[int, ...] = ()  # target hidden states that it reads: entering layer i; past the last: leaving it
    has_kv: bool = False  # it has KV of its own, in the target's pages, and must read every token
    lookahead: int = 0  # positions beyond the text that it writes while drafting
    context: int | None = None  # longer texts are not drafted for; None: no limit beside the target's
    trees: bool = False  # its drafts may branch
    costs_time: bool = False  # drafting takes time, which must pay; False: it counts as free
    has_probs: bool = False  # its drafts have distributions, which they can be sampled from
    multi_step: bool = False  # it can draft in multi-step runs: it is a MultiStepDrafter (multi_step/state.py)
    on_host: bool = False  # in multi-step runs it drafts on the host, between the steps
    stops_early: bool = False  # it drafts token by token, and stops when the next one does not pay
    suspendable: bool = False  # it may miss tokens, and read them later or never (drafters/kv_tracker.py)
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
    min_acceptance: float = 0.0  # a token with a lower acceptance probability does not pay: drafting may stop
    tokens_per_second: float = 0.0  # of the request at present: the value of a second
    min_continuation: float = 0.0  # after a token with a lower acceptance probability another one does not pay

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
        if start >= known:
            return self.new_tokens[start - known : stop - known]
        new = self.new_tokens[max(start - known, 0) : max(stop - known, 0)]
        return self.request.tokens(start, min(stop, known)) + new


Ids = Tensor | Sequence[Sequence[int]]  # [B, W] int32 on the device, or a list for each row from the host


@dataclass(frozen=True)
class DraftBatch:
    """The drafts for all rows of one call.

    A tree lists parents first and the most probable paths first, so that its first n tokens are the best tree of n.
    """

    tokens: Ids
    lengths: Sequence[int] | None = None  # [B]: valid tokens of each row; None: all
    parents: Ids | None = None  # index of each token's parent; -1: the newest token. None: chains
    logits: Tensor | None = None  # [B, W, V] f32 that tokens were sampled from, before temperature; None: argmax
    confidence: Sequence[Sequence[float]] | None = None  # acceptance probability given the parent; None: unknown
    origins: Sequence[Sequence[int]] | None = None  # combined drafters of each token, as in Draft
    reached: int | None = None  # depth at which drafting stopped, if it stopped early; None: as requested
    recorded: bool = False  # the call recorded its kernels, and took longer than the replays that follow

    def drafts(self) -> list[Draft]:
        """Return the draft for each row, its tokens on the host."""
        tokens = self.rows(self.tokens)
        parents = None if self.parents is None else self.rows(self.parents)
        drafts = []
        for row, row_tokens in enumerate(tokens):
            count = len(row_tokens)
            draft = Draft(
                row_tokens,
                None if parents is None else parents[row][:count],
                None if self.logits is None else self.logits[row, :count],
                None if self.confidence is None else list(self.confidence[row][:count]),
                None if self.origins is None else list(self.origins[row][:count]),
            )
            drafts.append(draft)
        return drafts

    def rows(self, ids: Ids) -> list[list[int]]:
        """Return the valid part of `tokens` or `parents`, on the host."""
        listed: Sequence[Sequence[int]] = ids.tolist() if isinstance(ids, Tensor) else ids
        if self.lengths is None:
            return [list(row) for row in listed]
        return [list(row[:length]) for row, length in zip(listed, self.lengths, strict=True)]


class Proposer(Protocol):
    needs: Needs

    def propose(self, contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        """Draft at most context.num_draft_tokens tokens after the text of each context.

        last [B] int32: the token at position context.computed, the first that has not run; empty without `has_kv`.
        hidden [T, aux layers * E] f32: the aux hidden states of all tokens of the step; None without `aux_layers`.
        """
        ...

    def accept(self, requests: Sequence[Request], accepted: Sequence[int]) -> None:
        """Rewind the drafter's state: `accepted` tokens of the last draft for each request were accepted."""
        ...

    def release(self, requests: Sequence[Request]) -> None:
        """Free the state of these requests, which have ended."""
        ...


@dataclass(frozen=True)
class Target:
    """The model that a method drafts for, and the engine's configuration."""

    model: Model
    tokenizer: Tokenizer
    ops: Kernels
    device: Device
    page_size: int
    max_context: int
    kv_dtype: str
    sampled: bool = False  # drafts are sampled at the request's temperature; else they are the argmax
    coupled: bool = True  # sampled with the target's noise (exact match); else with other noise, and logits are kept
    replacement: bool = False  # siblings are sampled with replacement; else all differ
    can_suspend: bool = False  # drafters that do not pay are not called, and catch up with the text later
    quantize: str | None = None
    source: str = ""  # name or path of the model
    graphs: Graphs | None = None  # CUDA graphs of the engine; None: drafters run without
    storages: list[Pages] = field(default_factory=list)

    def storage(self, layers: int, kv_heads: int, head_dim: int, dtype: str, states: int = 0) -> Pages:
        """Return pages for a method's own KV, with the target's page numbers; allocated when the engine starts.

        states: floats to store with each page, for the hidden state of its last token.
        """
        pages = Pages(layers, kv_heads, self.page_size, head_dim, dtype, states)
        self.storages.append(pages)
        return pages
