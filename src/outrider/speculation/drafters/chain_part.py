"""A network's part in rounds without the host: chains, token by token or all at once. See seats.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...kernels import Batch, Kernels
from ...multi_step.state import DecodeState, rows_of
from ...request import Request
from .draft_sampler import DraftSampler
from .kv_tracker import Trail
from .network import Network
from .slate import Slate


class ChainPart:
    """Shapes do not depend on what was kept: rejected tokens stay in the pass over the text, and stand nowhere."""

    def __init__(
        self,
        network: Network,
        ops: Kernels,
        drawer: DraftSampler,
        seats: DecodeState,
        trails: Mapping[Request, Trail],
        words: int,
    ) -> None:
        """words: how many tokens the target knows."""
        self.network, self.ops, self.seats, self.trails = network, ops, seats, trails
        self.slate = Slate(drawer, seats, words, network.context, network.ids)
        self.logits = self.slate.logits
        self.extra = max(seats.width, 1) if network.parallel else 1  # the newest token, and masks after it
        place, rows = seats.newest.device, seats.rows
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=place)
        self.order = torch.arange(rows * (seats.width + 1), dtype=torch.int32, device=place).view(rows, -1)
        self.latest = torch.zeros(rows, network.features, device=place)  # [B, F]: the target's state before the newest
        self.states: Tensor | None = (
            None  # [extra * B, S]: what drafts are drawn from, by depth; there from the first pass
        )

    def extend(self) -> None:
        seats, network, tables = self.seats, self.network, self.seats.batch.page_tables
        batch, size = seats.batch, network.pages.page_size
        inputs = self.ops.draft_inputs(
            batch.tokens, batch.positions, batch.query_starts, seats.ends, seats.newest, self.extra, True, network.mask
        )
        at, slots = self.ops.next_slots(seats.before, tables, size, network.context, seats.width + self.extra)
        gone = inputs.rejected > 0  # [X]
        read = Batch(inputs.tokens, at.masked_fill(gone, 0), slots.masked_fill(gone, -1), inputs.query_starts, tables)
        states = network.run(read, self._features(inputs.sources, read.tokens.shape[0]))  # [X, S]
        by_depth = inputs.samples.view(-1, self.extra).t().flatten()
        found = rows_of(states, by_depth)
        if self.states is None:
            self.states = torch.empty_like(found)
        self.states.copy_(found)
        if network.features:
            self._keep_states()

    def decode(self) -> None:
        assert self.states is not None
        network, seats, width = self.network, self.seats, self.seats.width
        self.slate.begin()
        if network.parallel:
            for depth, logits in enumerate(self._say(self.states).view(width, seats.rows, -1)):
                self.slate.put(depth, logits)
        else:
            self._in_turn(self.states)
        self.slate.end()

    def _say(self, states: Tensor) -> Tensor:
        return self.network.logits(states) if self.slate.ids is None else self.network.scores(states)

    def _in_turn(self, state: Tensor) -> None:
        """One token at a time, each read before the next is drawn. state: [B, S]."""
        network, seats, width = self.network, self.seats, self.seats.width
        tables = seats.batch.page_tables
        ahead = self.ops.next_slots(seats.places, tables, network.pages.page_size, network.context, max(width - 1, 1))
        positions, slots = (each.view(seats.rows, -1).t().contiguous() for each in ahead)  # [W - 1, B]
        for depth in range(width):
            drawn = self.slate.put(depth, self._say(state))
            if depth + 1 < width:
                batch = Batch(drawn, positions[depth], slots[depth], self.starts, tables)
                state = network.run(batch, network.feedback(state))

    def land(self, requests: Sequence[Request], computed: Sequence[int]) -> None:
        latest = self.latest.clone()
        for row, (request, done) in enumerate(zip(requests, computed, strict=True)):
            trail = self.trails[request]
            trail.known, trail.drafted = min(done + 1, self.network.context), 0
            if self.network.features:
                trail.state, trail.state_at = latest[row], done - 1

    def _features(self, sources: Tensor, count: int) -> Tensor | None:
        """What the network reads beside each of `count` tokens: [count, H]."""
        network, seats = self.network, self.seats
        if not network.features:
            return None
        absorbed = network.absorb(seats.hidden)  # [T, H]
        if self.extra == 1:
            return absorbed
        assert network.beside_mask is not None
        features = network.beside_mask.repeat(count + 1, 1)  # the last is for states of rejected tokens
        stays = self.order <= seats.ends[:, None]  # [B, W + 1]
        features[torch.where(stays.flatten(), sources, count).long()] = absorbed
        return features[:count]

    def _keep_states(self) -> None:
        """Keep the state of the last position of each row, and that of every page which the round filled."""
        seats, pages = self.seats, self.network.pages
        self.latest.copy_(rows_of(seats.hidden, seats.ends))
        slots = seats.batch.slots  # [T]
        stays = (self.order <= seats.ends[:, None]).flatten() & (slots >= 0) & ((slots + 1) % pages.page_size == 0)
        pages.states[torch.where(stays, slots // pages.page_size, pages.count).long()] = seats.hidden
