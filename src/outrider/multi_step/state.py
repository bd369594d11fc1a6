"""Rounds without the host: where requests stand on the device, and a drafter's part in a round.

A round runs each request's newest token and what was drafted after it, verifies, and drafts anew. All that passes from
one part of a round to the next lies in tensors that stay in place, each filled whole by its one owner, padding
included: so every part can be recorded, and a replay reads nothing stale. Rows that pad a recorded shape have page
tables of -1, so that their tokens stand nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..kernels import Batch, SamplingMetadata
from ..request import Request


@dataclass(frozen=True)
class DecodeState:
    """Letters: B rows, W tokens that each drafts, P pages of a table, F floats of the tapped states."""

    width: int  # W
    newest: Tensor  # [B] int32: tokens that have not run
    places: Tensor  # [B] int32: the positions of those
    limits: Tensor  # [B] int32: how long each text may become
    drafts: Tensor  # [B, W] int32: the tokens guessed after them; -1: none
    choice: SamplingMetadata  # [B] of the target; its positions are those after the newest tokens
    batch: Batch  # what the target ran: B * (W + 1) tokens, every row with its drafts
    before: Tensor  # [B] int32: positions of the tokens that were the newest then
    ends: Tensor  # [B] int32: the last token of each row, among those of the batch, that stays
    hidden: Tensor  # [B * (W + 1), F] f32: the tapped states of the batch; F is 0 without taps
    warm: bool = True  # some request may have a temperature above 0

    @property
    def rows(self) -> int:
        return self.newest.shape[0]


class Part(Protocol):
    """What a drafter does in a round, over one set of seats."""

    logits: Tensor | None  # [B * (W + 1), V] f32: what drafts[b, w] was drawn from, in row b * (W + 1) + 1 + w

    def extend(self) -> None:
        """After verification: read what stays of the batch, and the newest tokens."""
        ...

    def decode(self) -> None:
        """Fill `drafts`, and `logits` where the verification asks for them: the whole loop at once."""
        ...

    def land(self, requests: Sequence[Request], computed: Sequence[int]) -> None:
        """The host is back: of each request's text so many tokens have run. Rows are the first of the seats."""
        ...


class Unattended(Protocol):
    """A Proposer that can draft without the host; `needs.unattended` says so."""

    def ready(self, requests: Sequence[Request]) -> bool:
        """Whether all that it must know of these requests is known: they stand behind a pass that it has seen."""
        ...

    def part(self, seats: DecodeState) -> Part: ...


def rows_of(states: Tensor, places: Tensor) -> Tensor:
    """states[places], for int32 places: [R, S]."""
    return torch.index_select(states, 0, places)
