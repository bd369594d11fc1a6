"""The base of every drafter that runs a network of its own: it follows the text in the target's pages, and drafts.

The network keeps one entry (keys and values) a position. That of position q comes from token q, and, for a network
that reads the target's states, from the state of position q - 1. So the entries of a full page depend on nothing but
the tokens up to its end: pages are shared between prompts as the target's are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...cache.pages import slots_of
from ...kernels import Batch
from ...multi_step.state import DecodeState
from ...request import Request
from ..interface import DraftBatch, DraftContext, Needs, Target
from .chain_decoding import Growth
from .chain_part import ChainPart
from .kv_tracker import Trail, Trails
from .network import Network, Run, page_tables


class Autoregressive:
    """A Proposer over a Network. A request's draft depends on its own text alone."""

    def __init__(
        self,
        network: Network,
        target: Target,
        width: int,
        taps: tuple[int, ...] = (),
        branches: int = 1,
        levels: int | None = None,
        lazy: bool = True,
    ) -> None:
        """`width`, `branches` and `levels` as in TreeOptions. lazy: the network can do without parts of the text."""
        self.growth = Growth(network, target, width, branches, levels)
        width = self.growth.width
        # What runs of a tree at once is part of the best that was found, and the last of that never runs.
        self.needs = Needs(
            width,
            taps,
            has_kv=True,
            lookahead=width,
            context=network.context,
            trees=branches > 1,
            costs_time=True,
            has_probs=True,
            multi_step=branches == 1,
            stops_early=not network.parallel,
            suspendable=lazy,
        )
        self.network, self.ops, self.device = network, target.ops, target.device
        self.page_size = target.page_size
        self._trails = Trails(target.page_size, target.lazy and lazy)
        self._first = 1 if network.features else 0  # no state comes before the first token

    def propose(self, contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        hidden = hidden if self.network.features else None
        trails = [self._trails.of(context, self._first) for context in contexts]
        planned = [
            self._plan(row, context, trail) for row, (context, trail) in enumerate(zip(contexts, trails, strict=True))
        ]
        runs = [run for run in planned if run is not None]
        draft = DraftBatch([[] for _ in contexts])
        if runs:
            batch, places, sources = (self._gather_masked if self.network.parallel else self._gather)(runs, last)
            features = None if hidden is None else self._features(runs, hidden, sources, batch.tokens.shape[0])
            states = self.network.run(batch, features)  # [T, S]
            draft = self.growth.draft(contexts, runs, states, places)
        if hidden is not None:
            self._keep_states(contexts, trails, hidden)
        for trail in trails:
            trail.drafted = 0
        for run in runs:
            run.trail.known, run.trail.drafted = run.stop, self.growth.entries(run, draft)
            self._trails.label(run.context, run.trail)
        return draft

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the drafter's weights."""
        return self.network.weight_bytes

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        for request, count in zip(requests, kept, strict=True):
            trail = self._trails.get(request)
            if trail is not None:
                trail.known += min(count, trail.drafted)
                trail.drafted = 0

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._trails.pop(request, None)

    def ready(self, requests: Sequence[Request]) -> bool:
        return all(self._is_ready(request) for request in requests)

    def part(self, seats: DecodeState) -> ChainPart:
        return ChainPart(self.network, self.ops, self.growth.drawer, seats, self._trails, self.growth.vocabulary)

    def _is_ready(self, request: Request) -> bool:
        trail = self._trails.get(request)
        if trail is None or trail.preemptions != request.preemptions:
            return False
        return trail.known == min(request.computed + 1, self.network.context)

    def _plan(self, row: int, context: DraftContext, trail: Trail) -> Run | None:
        """None where nothing can be done: no page yet for the next entry, no room in the context, no state for it."""
        room = min(len(context.request.pages) * self.page_size, self.network.context)
        # The entry of the newest token is wanted again where a step is repeated: its state is what drafts begin with.
        begin, stop = self._trails.begin(context, trail, self._first), min(context.computed + 1, room)
        if begin is None or begin >= stop or (self.network.features and not self._has_states(context, trail, begin)):
            return None
        width = (
            max(self.growth.within(context.num_draft_tokens, room - context.computed), 0) if context.new_tokens else 0
        )
        if not width and context.new_tokens and self._can_wait(context, trail):
            return None
        return Run(row, context, trail, begin, stop, width, trail.pages(context.request), trail.shift(self.page_size))

    def _can_wait(self, context: DraftContext, trail: Trail) -> bool:
        """Whether the text may be read later, several tokens at once. States do not wait, and a full page is shared;
        whoever may rest is not asked in vain, and would take what is read later for missed.
        """
        if self.network.features or self._trails.lazy:
            return False
        return context.computed < (trail.known // self.page_size + 1) * self.page_size

    def _gather(self, runs: list[Run], last: Tensor) -> tuple[Batch, Tensor, Tensor]:
        """The entries of all runs side by side; where the states to draw from will be [R, 1]; and, as below, where the
        state goes that stands before each entry.
        """
        width = max(len(run.pages) for run in runs)
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        tables: list[int] = []
        starts = [0]
        for run in runs:
            tokens += run.context.tokens(run.begin, run.stop)
            positions += range(run.begin - run.shift, run.stop - run.shift)
            slots += slots_of(run.context.request.pages, range(run.begin, run.stop), self.page_size)
            starts.append(len(tokens))
            tables += run.pages + [0] * (width - len(run.pages))
        # One upload for all of it: each costs as much as what it carries.
        count, rows = len(tokens), len(runs)
        parts = [count, count, count, rows + 1, rows * width, rows]
        ends = [start - 1 for start in starts[1:]]
        packed = self.device.upload(tokens + positions + slots + starts + tables + ends, torch.int32)
        ids, where, written, begins, table, places = torch.split(packed, parts)
        return Batch(ids, where, written, begins, table.view(rows, width)), places.view(rows, 1), places

    def _gather_masked(self, runs: list[Run], last: Tensor) -> tuple[Batch, Tensor, Tensor]:
        """The same with mask tokens after each run's entries; where the states to draw from will be [R, masks + 1]; and
        where the state goes that stands before each entry [entries].
        """
        upload = self.device.upload
        extra = max([run.width for run in runs] + [1])
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for run in runs:
            # A row starts one token early, as the op joins each state to the token after it.
            tokens += [0, *run.context.tokens(run.begin, run.stop - 1)]
            positions += range(run.begin - run.shift, run.stop - run.shift)
            starts.append(len(tokens))
            masks = max(run.width - 1, 0)
            slots += slots_of(run.context.request.pages, range(run.begin, run.stop + masks), self.page_size)
            slots += [-1] * (extra - 1 - masks)
        inputs = self.ops.draft_inputs(
            upload(tokens, torch.int32),
            upload(positions, torch.int32),
            upload(starts, torch.int32),
            upload([start - 1 for start in starts[1:]], torch.int32),
            self._newest(runs, last),
            extra,
            True,
            self.network.mask,
        )
        written = upload(slots, torch.int32)
        # Mask tokens that a row has no use for stand nowhere; a position beyond the context may not be asked for.
        where = inputs.positions if extra == 1 else torch.where(written >= 0, inputs.positions, 0)
        tables = page_tables([run.pages for run in runs], self.device)
        batch = Batch(inputs.tokens, where, written, inputs.query_starts, tables)
        return batch, inputs.samples.view(len(runs), extra), inputs.sources

    def _newest(self, runs: list[Run], last: Tensor) -> Tensor:
        """The token of each run's last entry [R]: the request's newest, unless that has no place yet."""
        newest = last[[run.row for run in runs]]
        early = [place for place, run in enumerate(runs) if run.stop <= run.context.computed]
        if early:
            tokens = [runs[place].context.tokens(runs[place].stop - 1, runs[place].stop)[0] for place in early]
            newest[early] = self.device.upload(tokens, torch.int32)
        return newest

    def _has_states(self, context: DraftContext, trail: Trail, begin: int) -> bool:
        return begin > context.start or (begin == context.start and self._before(context, trail) is not None)

    def _before(self, context: DraftContext, trail: Trail) -> Tensor | None:
        """The target's state [F] of the position before those that the step ran, if anyone kept it."""
        position = context.start - 1
        if trail.state_at == position:
            return trail.state
        if trail.state is None and context.start % self.page_size == 0:  # the prefix cache supplied what comes before
            return self.network.pages.states[context.request.pages[position // self.page_size]]
        return None

    def _features(self, runs: list[Run], hidden: Tensor, sources: Tensor, count: int) -> Tensor:
        """What the network reads beside each token of its first pass, mask tokens included: [count, H]."""
        rows: list[int] = []
        carried: dict[int, Tensor] = {}
        for run in runs:
            context = run.context
            if run.begin == context.start and (state := self._before(context, run.trail)) is not None:
                carried[len(rows)] = state
            rows += [max(context.first_row + entry - 1 - context.start, 0) for entry in range(run.begin, run.stop)]
        plain = rows == list(range(rows[0], rows[0] + len(rows)))
        states = hidden[rows[0] : rows[0] + len(rows)] if plain else hidden[rows]  # [entries, F]
        if carried and plain:
            states = states.clone()
        for place, state in carried.items():
            states[place] = state
        absorbed = self.network.absorb(states)  # [entries, H]
        if len(rows) == count:
            return absorbed
        assert self.network.beside_mask is not None
        features = self.network.beside_mask.repeat(count, 1)
        features[sources.long()] = absorbed
        return features

    def _keep_states(self, contexts: Sequence[DraftContext], trails: list[Trail], hidden: Tensor) -> None:
        """Keep the state of the last position of each context, and that of every page which the step filled."""
        size = self.page_size
        pages: list[int] = []
        rows: list[int] = []
        for context in contexts:
            for end in range(context.start // size * size + size, context.computed + 1, size):
                pages.append(context.request.pages[end // size - 1])
                rows.append(context.first_row + end - 1 - context.start)
        if pages:
            self.network.pages.states[pages] = hidden[rows]
        latest = hidden[[context.first_row + context.computed - 1 - context.start for context in contexts]]  # [B, F]
        for context, trail, state in zip(contexts, trails, latest, strict=True):
            trail.state, trail.state_at = state, context.computed - 1
