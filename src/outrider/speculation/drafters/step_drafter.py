"""Bind a drafter to a DecodeState: the same first pass and decode loop as in a call from the host, over tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ...multi_step.state import DecodeState
from ...request import Request
from .chain_builder import ChainBuilder, StateChains

Inputs = TypeVar("Inputs")


class StateDrafter(Protocol[Inputs]):
    """The methods of a drafter that runs on a DecodeState. `extend` and `decode` also serve calls from the host."""

    def state_inputs(self, state: DecodeState) -> Inputs:
        """Build the inputs of the first pass from the state."""
        ...

    def extend(self, inputs: Inputs) -> Tensor:
        """Run the first pass; return the states that drafts are sampled from, by depth."""
        ...

    def decode(self, chains: ChainBuilder, states: Tensor, newest: Tensor, positions: Tensor, tables: Tensor) -> None:
        """Sample the tokens of all chains, from the states of the first pass."""
        ...

    def finish(self, requests: Sequence[Request], computed: Sequence[int], latest: Tensor) -> None:
        """Update the host's state of each request; latest [B, F]: aux hidden states of the last computed token."""
        ...


class BoundDrafter(Generic[Inputs]):
    """A StepDrafter. Its buffers, `states`, `latest` and the logits of `chains`, are written inside the graphs."""

    def __init__(
        self, drafter: StateDrafter[Inputs], state: DecodeState, chains: StateChains, keeps_latest: bool = False
    ) -> None:
        """keeps_latest: the drafter continues from the target's state of the last accepted token."""
        self.drafter, self.state, self.chains, self.keeps_latest = drafter, state, chains, keeps_latest
        self.logits = chains.stored
        self.states: Tensor | None = None  # allocated by the first pass
        floats = state.hidden.shape[1] if keeps_latest else 0
        self.latest = torch.zeros(state.rows, floats, device=state.newest.device)

    def extend(self) -> None:
        states = self.drafter.extend(self.drafter.state_inputs(self.state))
        if self.states is None:
            self.states = torch.empty_like(states)
        self.states.copy_(states)
        if self.keeps_latest:
            self.latest.copy_(torch.index_select(self.state.hidden, 0, self.state.last_accepted))

    def decode(self) -> None:
        assert self.states is not None
        state = self.state
        self.chains.begin()
        self.drafter.decode(self.chains, self.states, state.newest, state.positions, state.batch.page_tables)
        self.chains.write()

    def finish(self, requests: Sequence[Request], computed: Sequence[int]) -> None:
        self.drafter.finish(requests, computed, self.latest)
