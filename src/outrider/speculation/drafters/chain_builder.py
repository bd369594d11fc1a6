"""Build chains of draft tokens depth by depth, for a call from the host or for a decode step on the device.

Sampled tokens stay on the device. On the host the rows of a call have different widths, and end where the next token
does not pay; on the device all rows have the same width and nothing is read back. A BoundDrafter runs the first pass
and the decode loop of a drafter on a DecodeState, the same code as in a call from the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ...device import Device
from ...kernels import SamplingMetadata
from ...multi_step.state import DecodeState
from ...request import Request, Row
from ..interface import DraftBatch, DraftContext
from .draft_sampler import DraftSampler

Inputs = TypeVar("Inputs")


class DraftPlan(Protocol):
    """The part of a plan that the builders read."""

    @property
    def row(self) -> int: ...  # index of the context

    @property
    def context(self) -> DraftContext: ...

    @property
    def width(self) -> int: ...


class ChainBuilder:
    """The chains of one call: samples a token a row at each depth, and keeps the logits if verification reads them."""

    def __init__(self, sampler: DraftSampler, width: int, logits: Tensor | None) -> None:
        """logits [B, W, V] f32: storage for what the tokens are sampled from; None: verification does not read it."""
        self.sampler, self.width, self.logits = sampler, width, logits
        self.ids: Tensor | None = None  # [U] int32: the logits to come are of these tokens; None: of all
        self.reads_confidence = False  # a network that estimates acceptance itself passes that to `put`
        self._sampling: SamplingMetadata | None = None  # of the rows that are still drafted
        self._tokens: list[Tensor] = []  # by depth: [R] int32

    @property
    def counts(self) -> list[int]:
        """Return the number of rows that reach each depth, before any of them ends early."""
        raise NotImplementedError

    def put(self, depth: int, logits: Tensor, confidence: Tensor | None = None) -> Tensor:
        """Sample a token for each row from logits [R, V or U], and return them [R].

        confidence [R]: acceptance probability, if the network estimates it before a token is sampled.
        """
        assert self._sampling is not None
        tokens = self._sample(depth, logits, self._sampling, confidence)
        if self.ids is not None:
            tokens = self.ids.index_select(0, tokens)
        if self.logits is not None:
            self._store(depth, logits)
        self._tokens.append(tokens)
        return tokens

    def advance(self, depth: int, paid: bool = False, drop: bool = True) -> list[int] | None:
        """End the rows that need no further token; return the indices of the others among the present rows.

        None: all go on. paid: deeper tokens cost nothing more. drop: rows that do not pay end, else they are only cut.
        """
        return None

    def index(self, depth: int) -> list[int] | None:
        """Return the indices of the present rows among all that reach this depth; None: they are the same."""
        return None

    def _sample(self, depth: int, logits: Tensor, sampling: SamplingMetadata, confidence: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _store(self, depth: int, logits: Tensor) -> None:
        assert self.logits is not None
        self.logits[:, depth] = logits


class StateChains(ChainBuilder):
    """Chains of a DecodeState: `begin`, then `put` at every depth, then `write`. All of it can be captured."""

    def __init__(
        self, sampler: DraftSampler, state: DecodeState, vocabulary: int, context: int | None, ids: Tensor | None
    ) -> None:
        """context: longer texts are not drafted for. ids [U]: tokens that the drafter knows; None: all."""
        device, rows, width = state.newest.device, state.rows, state.width
        # Written here at every depth, read by the next verification: [B * (W + 1), V], with a row for `newest`.
        self.stored = sampler.logit_storage(rows * (width + 1), vocabulary) if sampler.keeps_logits else None
        stored = None if self.stored is None else self.stored.view(rows, width + 1, -1)[:, 1:]
        super().__init__(sampler, width, stored)
        self.state = state
        # Without noise, which goes by the target's ids, the argmax is found among the tokens that the drafter knows.
        sampled = sampler.keeps_logits or (sampler.sampled and state.sampled)
        self.ids = None if sampled or ids is None else ids.to(torch.int32)
        self.reads_confidence = sampled and state.estimates is not None
        self.depths = torch.arange(width, dtype=torch.int32, device=device)
        self.longest = torch.iinfo(torch.int32).max if context is None else context + 1

    @property
    def counts(self) -> list[int]:
        return [self.state.rows] * self.width

    def begin(self) -> None:
        """Take the noise of the texts as they are now."""
        self._tokens = []
        lengths = self.state.positions + 1
        self._sampling = self.sampler.adapt(replace(self.state.sampling, positions=lengths), lengths)

    def _sample(self, depth: int, logits: Tensor, sampling: SamplingMetadata, confidence: Tensor | None) -> Tensor:
        estimates = self.state.estimates
        if estimates is None:
            return self.sampler.sample(logits, sampling, depth)
        if confidence is None:
            tokens, confidence = self.sampler.sample_with_confidence(logits, sampling, depth)
        else:
            tokens = self.sampler.sample(logits, sampling, depth)
        estimates[:, depth] = confidence
        return tokens

    def write(self) -> None:
        """Write the drafts to the state; -1 for tokens beyond the text's limit or the drafter's context."""
        state = self.state
        torch.stack(self._tokens, 1, out=state.drafts)
        remaining = state.max_lengths.clamp(max=self.longest) - state.positions - 2  # [B]
        state.drafts.masked_fill_(self.depths >= remaining[:, None], -1)


class CallChains(ChainBuilder):
    """Chains of a call from the host: rows have widths of their own, and may end early."""

    def __init__(
        self,
        sampler: DraftSampler,
        device: Device,
        contexts: Sequence[DraftContext],
        plans: Sequence[DraftPlan],
        vocabulary: int,
        ids: Tensor | None,
    ) -> None:
        """plans: those that draft at least one token. ids [U] int32: tokens that the drafter knows; None: all."""
        width = max((plan.width for plan in plans), default=0)
        # Allocated for each call: a draft may be verified some steps later, beside newer ones.
        shape = len(contexts), width, vocabulary
        logits = torch.zeros(*shape, device=device.torch_device) if sampler.keeps_logits else None
        super().__init__(sampler, width, logits)
        self.device, self.contexts, self.plans = device, contexts, plans
        drafting = [plan.context for plan in plans]
        greedy = sampler.is_greedy(drafting)
        self.ids = ids if greedy else None
        self.reads_confidence = not greedy
        self._sampling = sampler.sampling(drafting)
        self._present = list(range(len(plans)))  # indices of the plans that are still drafted
        self._lengths = [0] * len(contexts)
        for plan in plans:
            self._lengths[plan.row] = plan.width
        self._rows: list[list[int]] = []  # by depth: rows of the contexts
        self._estimates: list[Tensor | None] = []  # by depth: acceptance probability [R]
        self._read: list[list[float]] = []  # by depth: the same on the host, as far as it was read
        self._path = [1.0] * len(contexts)  # acceptance probability of all tokens that were read
        self._has_estimates = logits is None

    @property
    def counts(self) -> list[int]:
        return [sum(plan.width > depth for plan in self.plans) for depth in range(self.width)]

    def advance(self, depth: int, paid: bool = False, drop: bool = True) -> list[int] | None:
        plans = [self.plans[index] for index in self._present]
        pays = self._pays(plans, depth, paid)
        going = [index for index, plan in enumerate(plans) if plan.width > depth + 1 and (pays[index] or not drop)]
        if len(going) == len(plans):
            return None
        self._present = [self._present[index] for index in going]
        if going:
            self._sampling = self.sampler.sampling([plans[index].context for index in going])
        return going

    def index(self, depth: int) -> list[int] | None:
        reaching = [index for index, plan in enumerate(self.plans) if plan.width > depth]
        return None if reaching == self._present else [reaching.index(index) for index in self._present]

    def _sample(self, depth: int, logits: Tensor, sampling: SamplingMetadata, confidence: Tensor | None) -> Tensor:
        if confidence is None and self.logits is None:
            tokens, confidence = self.sampler.sample_with_confidence(logits, sampling, depth)
        else:
            tokens, self._has_estimates = self.sampler.sample(logits, sampling, depth), confidence is not None
        self._rows.append([self.plans[index].row for index in self._present])
        self._estimates.append(confidence)
        return tokens

    def _store(self, depth: int, logits: Tensor) -> None:
        assert self.logits is not None
        self.logits[self.device.upload(self._rows[-1], torch.int64), depth] = logits

    def _pays(self, plans: Sequence[DraftPlan], depth: int, paid: bool) -> list[bool]:
        """Return whether another token pays for each plan; cut a draft before a token that does not pay."""
        if self.logits is not None or not any(plan.context.min_acceptance for plan in plans):
            return [True] * len(plans)
        pays = []
        for plan, probability in zip(plans, self._read_estimates(depth), strict=True):
            row, least = plan.row, plan.context.min_acceptance
            path = self._path[row] = self._path[row] * probability
            if path < least:
                self._lengths[row] = min(self._lengths[row], depth)
            pays.append(path >= (least if paid else max(least, plan.context.min_continuation)))
        return pays

    def _read_estimates(self, depth: int) -> list[float]:
        """Read the acceptance probabilities of a depth, and of all before it."""
        for rows, estimates in list(zip(self._rows, self._estimates, strict=True))[len(self._read) : depth + 1]:
            self._read.append([1.0] * len(rows) if estimates is None else estimates.tolist())
        return self._read[depth]

    def draft(self) -> DraftBatch:
        """Return the drafts, their tokens read back from the device."""
        tokens: list[list[int]] = [[] for _ in self.contexts]
        estimates: list[list[float]] = [[] for _ in self.contexts]
        if self._tokens:
            listed = iter(torch.cat(self._tokens).tolist())
            self._read_estimates(len(self._tokens) - 1)
            for rows, probabilities in zip(self._rows, self._read, strict=True):
                for row, probability in zip(rows, probabilities, strict=True):
                    tokens[row].append(next(listed))
                    estimates[row].append(probability)
        lengths = [min(length, len(row)) for length, row in zip(self._lengths, tokens, strict=True)]
        # Tokens may not be selected by their probability if the distribution of the text depends on the drafts.
        confidence = [row[:length] for row, length in zip(estimates, lengths, strict=True)]
        return DraftBatch(
            tokens,
            lengths,
            logits=self.logits,
            confidence=confidence if self._has_estimates else None,
            reached=len(self._tokens),
        )


class StateDrafter(Protocol[Inputs]):
    """The methods of a drafter that runs on a DecodeState. `extend` also serves calls from the host."""

    def state_inputs(self, state: DecodeState) -> Inputs:
        """Build the inputs of the first pass from the state."""
        ...

    def extend(self, inputs: Inputs) -> Tensor:
        """Run the first pass; return the states that drafts are sampled from, by depth."""
        ...

    def decode_state(self, chains: ChainBuilder, states: Tensor, state: DecodeState) -> None:
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

    def begin(self, rows: Sequence[Row]) -> None:
        """Do nothing: `ready` says that the drafter has read the texts."""

    def extend(self) -> None:
        states = self.drafter.extend(self.drafter.state_inputs(self.state))
        if self.states is None:
            self.states = torch.empty_like(states)
        self.states.copy_(states)
        if self.keeps_latest:
            self.latest.copy_(torch.index_select(self.state.hidden, 0, self.state.last_accepted))

    def decode(self) -> None:
        assert self.states is not None
        self.chains.begin()
        self.drafter.decode_state(self.chains, self.states, self.state)
        self.chains.write()

    def finish(self, requests: Sequence[Request], computed: Sequence[int]) -> None:
        self.drafter.finish(requests, computed, self.latest)
