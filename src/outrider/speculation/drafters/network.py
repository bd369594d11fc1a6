"""What a drafter that runs a network of its own knows: the network, what it holds of a request, a request's pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...cache.pages import Pages
from ...kernels import Batch
from ..interface import DraftContext
from .kv_tracker import TrackedKv


class Network(Protocol):
    """A small model that continues a text. Letters: F floats of `features`, S of its states, T tokens, R rows."""

    pages: Pages  # its own keys and values, in the target's page numbers
    context: int  # positions that it can serve
    features: int  # floats of the target's state that it reads beside each token; 0: none
    parallel: bool  # it drafts all tokens in one pass, over mask tokens
    mask: int  # the mask token; -1: none
    weight_bytes: int  # of the weights that every step reads

    @property
    def ids(self) -> Tensor | None:
        """The target's ids of the tokens that it can say, rising: [U]; None: all."""
        ...

    def absorb(self, features: Tensor) -> Tensor:
        """The target's states [T, F] as it reads them [T, H]: alike what `feedback` gives for its own."""
        ...

    @property
    def beside_mask(self) -> Tensor | None:
        """What it reads beside each mask token in place of a state that is not there yet: [1, H]; None: nothing."""
        ...

    def run(self, batch: Batch, features: Tensor | None) -> Tensor:
        """States [T, S] of a batch in the target's ids. features: what `absorb` or `feedback` gave."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """[R, V] f32 over the target's ids; -inf for those that it cannot say."""
        ...

    def scores(self, states: Tensor) -> Tensor:
        """The same over `ids` alone: [R, U]."""
        ...

    def feedback(self, states: Tensor) -> Tensor | None:
        """What it reads beside the token that it drew from each of `states` [R, S]; None without features."""
        ...


@dataclass(frozen=True)
class Run:
    """A request's part of a pass: the entries [begin, stop) are computed, then `width` tokens are drafted."""

    row: int  # among the contexts
    context: DraftContext
    trail: TrackedKv
    begin: int
    stop: int
    width: int
    pages: list[int]  # those of the request that the network sees
    shift: int  # how many positions earlier it sees the entries
