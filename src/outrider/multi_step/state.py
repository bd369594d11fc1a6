"""DecodeState: the requests of a multi-step run as tensors, and the interface of a drafter that works on them.

A decode step runs each request's newest token and its draft, verifies, and drafts again. The parts of a step exchange
data in tensors with fixed addresses. Each tensor has one owner, which fills all of it in every step, padding included.
So every part can be captured as a CUDA graph, and a replay reads no stale data. Rows that pad a
captured shape have page tables of -1, so that their tokens have no slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from ..kernels import Batch, SamplingMetadata
from ..request import Request, Row

if TYPE_CHECKING:
    from ..speculation.interface import DraftContext
    from .progress import RowProgress


@dataclass(frozen=True)
class DecodeState:
    """Letters: B rows, W tokens that each drafts, F floats of the aux hidden states."""

    width: int  # W
    newest: Tensor  # [B] int32: tokens that have not run
    positions: Tensor  # [B] int32: their positions
    max_lengths: Tensor  # [B] int32: tokens that each text may have
    drafts: Tensor  # [B, W] int32: the tokens drafted after `newest`; -1: none
    sampling: SamplingMetadata  # [B] of the target
    batch: Batch  # what the target ran: B * (W + 1) tokens, each row with its draft
    ran_positions: Tensor  # [B] int32: positions of the first token of each row of `batch`
    last_accepted: Tensor  # [B] int32: index in `batch` of the last token of each row that was accepted
    hidden: Tensor  # [B * (W + 1), F] f32: the aux hidden states of `batch`; F is 0 without aux layers
    sampled: bool = True  # some request may have a temperature above 0
    estimates: Tensor | None = None  # [B, W] f32: acceptance probability of each drafted token; None: not read

    @property
    def rows(self) -> int:
        return self.newest.shape[0]


class StepDrafter(Protocol):
    """A drafter bound to one DecodeState."""

    logits: Tensor | None  # [B * (W + 1), V] f32: what drafts[b, w] was sampled from, in row b * (W + 1) + 1 + w

    def begin(self, rows: Sequence[Row]) -> None:
        """Take over from the host before a run: the requests are the first rows, the others pad."""
        ...

    def extend(self) -> None:
        """Read the accepted tokens of the batch, and the newest ones."""
        ...

    def decode(self) -> None:
        """Fill `drafts`, and `logits` if verification reads them: the whole loop at once."""
        ...

    def finish(self, requests: Sequence[Request], computed: Sequence[int]) -> None:
        """Take over on the host: `computed` tokens of each text have run. The requests are the first rows."""
        ...


@runtime_checkable
class HostSteps(Protocol):
    """A drafter bound to a DecodeState whose drafts the host finds between the steps: nothing of it is captured.

    The device waits for the drafts, but no step is scheduled, gathered or committed meanwhile.
    """

    logits: Tensor | None

    def begin(self, rows: Sequence[Row]) -> None: ...

    def draft_rows(self, texts: Sequence[RowProgress]) -> list[list[int]]:
        """Return the draft of each row, from the tokens of all steps so far; none for a text that has ended."""
        ...

    def finish(self, requests: Sequence[Request], computed: Sequence[int]) -> None: ...

    def forget(self, requests: Sequence[Request]) -> None:
        """Drop what is known of these texts: a run failed, and its tokens were not added to them."""
        ...


class MultiStepDrafter(Protocol):
    """A Proposer that can draft in multi-step runs; `needs.multi_step` says so."""

    def ready(self, requests: Sequence[Request], computed: Sequence[int] | None = None) -> bool:
        """Return whether the drafter has read each text up to the token after `computed` ones; None: as the target."""
        ...

    def read(self, contexts: Sequence[DraftContext], hidden: Tensor | None) -> None:
        """Read the texts of a step now, and draft nothing: `propose` may put that off."""
        ...

    def bind(self, state: DecodeState) -> StepDrafter | HostSteps: ...
