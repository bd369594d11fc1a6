"""The base of every drafter that runs a network of its own: it follows the text in the target's pages, and drafts.

The network keeps one entry (keys and values) a position. That of position q comes from token q, and, for a network
that reads the target's states, from the state of position q - 1. So the entries of a full page depend on nothing but
the tokens up to its end: pages are shared between prompts as the target's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..cache.pages import Pages
from ..kernels import Batch
from ..types import Request
from . import Draft, Needs, Target, Turn
from .draw import Drawer


class Network(Protocol):
    """A small model that continues a text. Letters: F floats of `features`, S of its states, T tokens, R rows."""

    pages: Pages  # its own keys and values, in the target's page numbers
    context: int  # positions that it can serve
    features: int  # floats of the target's state that it reads beside each token; 0: none
    parallel: bool  # it drafts all tokens in one pass, over mask tokens
    mask: int  # the mask token; -1: none

    def absorb(self, features: Tensor) -> Tensor:
        """The target's states [T, F], 0 beside masks, as it reads them: alike what `feedback` gives for its own."""
        ...

    def run(self, batch: Batch, features: Tensor | None) -> Tensor:
        """States [T, S] of a batch in the target's ids. features: what `absorb` or `feedback` gave."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """[R, V] f32 over the target's ids; -inf for those that it cannot say."""
        ...

    def feedback(self, states: Tensor) -> Tensor | None:
        """What it reads beside the token that it drew from each of `states` [R, S]; None without features."""
        ...


@dataclass
class Trail:
    """What the network holds of one request."""

    known: int  # entries [0, known) are those of the text
    preemptions: int  # the request's, when it was last seen: more of them, and its pages are others
    drafted: int = 0  # entries from `known` on that come from drafted tokens
    state: Tensor | None = None  # [F], the target's at position `state_at`, the last that it had computed
    state_at: int = -1


@dataclass(frozen=True)
class Run:
    """A request's part of a pass: the entries [begin, stop) are computed, then `width` tokens are drafted."""

    row: int  # among the turns
    turn: Turn
    trail: Trail
    begin: int
    stop: int
    width: int


class Autoregressive:
    """A Proposer over a Network. A request's draft depends on its own text alone."""

    def __init__(self, network: Network, target: Target, width: int, taps: tuple[int, ...] = ()) -> None:
        self.needs = Needs(width, taps, follows=True, lookahead=width, context=network.context)
        self.network, self.ops, self.device = network, target.ops, target.device
        self.page_size, self.vocabulary = target.page_size, target.model.config.vocabulary
        self.drawer = Drawer(target)
        self._trails: dict[Request, Trail] = {}

    def propose(self, turns: Sequence[Turn], last: Tensor, hidden: Tensor | None) -> Draft:
        hidden = hidden if self.network.features else None
        trails = [self._trail(turn) for turn in turns]
        planned = [self._plan(row, turn, trail) for row, (turn, trail) in enumerate(zip(turns, trails, strict=True))]
        runs = [run for run in planned if run is not None]
        sheet = _Sheet(self, turns, runs)
        if runs:
            batch, places, sources = self._gather(runs, last)
            features = None if hidden is None else self._features(runs, hidden, sources, batch.tokens.shape[0])
            absorbed = None if features is None else self.network.absorb(features)
            states = self.network.run(batch, absorbed)  # [T, S]
            (self._draw_at_once if self.network.parallel else self._draw_in_turn)(runs, states, places, sheet)
        if hidden is not None:
            self._keep_states(turns, trails, hidden)
        for trail in trails:
            trail.drafted = 0
        for run in runs:
            # The last drafted token has not run. Guessed states and mask tokens leave nothing that is worth keeping.
            kept = not self.network.features and not self.network.parallel
            run.trail.known, run.trail.drafted = run.stop, max(run.width - 1, 0) if kept else 0
        return sheet.draft()

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        for request, count in zip(requests, kept, strict=True):
            trail = self._trails.get(request)
            if trail is not None:
                trail.known += min(count, trail.drafted)
                trail.drafted = 0

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._trails.pop(request, None)

    def _trail(self, turn: Turn) -> Trail:
        """What is known of the request: at its first turn, and in new pages, what the prefix cache supplied."""
        request = turn.request
        trail = self._trails.get(request)
        if trail is None or trail.preemptions != request.preemptions:
            first = 1 if self.network.features else 0  # no state comes before the first token
            trail = self._trails[request] = Trail(max(turn.start, first), request.preemptions)
        return trail

    def _plan(self, row: int, turn: Turn, trail: Trail) -> Run | None:
        """None where nothing can be done: no page yet for the next entry, no room in the context, no state for it."""
        room = min(len(turn.request.pages) * self.page_size, self.network.context)
        # The entry of the newest token is wanted again where a step is repeated: its state is what drafts begin with.
        begin, stop = min(trail.known, turn.computed), min(turn.computed + 1, room)
        if begin >= stop or (self.network.features and not self._has_states(turn, trail, begin)):
            return None
        width = min(turn.width, room - turn.computed) if turn.fresh else 0
        return Run(row, turn, trail, begin, stop, max(width, 0))

    def _gather(self, runs: list[Run], last: Tensor) -> tuple[Batch, Tensor, Tensor]:
        """The entries of all runs side by side, mask tokens included; where the states to draw from will be
        [R, masks + 1]; and where the state goes that stands before each entry [entries].
        """
        upload, size = self.device.upload, self.page_size
        extra = max([run.width for run in runs] + [1]) if self.network.parallel else 1
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for run in runs:
            # A row starts one token early, as the op joins each state to the token after it.
            tokens += [0, *run.turn.tokens(run.begin, run.stop - 1)]
            positions += range(run.begin, run.stop)
            starts.append(len(tokens))
            pages, limit = run.turn.request.pages, run.stop + max(run.width - 1, 0)
            places = range(run.begin, run.stop + extra - 1)
            slots += [pages[at // size] * size + at % size if at < limit else -1 for at in places]
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
        batch = Batch(inputs.tokens, where, written, inputs.query_starts, self._tables(runs))
        return batch, inputs.samples.view(len(runs), extra), inputs.sources

    def _newest(self, runs: list[Run], last: Tensor) -> Tensor:
        """The token of each run's last entry [R]: the request's newest, unless that has no place yet."""
        newest = last[[run.row for run in runs]]
        early = [place for place, run in enumerate(runs) if run.stop <= run.turn.computed]
        if early:
            tokens = [runs[place].turn.tokens(runs[place].stop - 1, runs[place].stop)[0] for place in early]
            newest[early] = self.device.upload(tokens, torch.int32)
        return newest

    def _tables(self, runs: list[Run]) -> Tensor:
        """[R, P] int32."""
        tables = [run.turn.request.pages for run in runs]
        width = max(map(len, tables))
        padded = [page for table in tables for page in table + [0] * (width - len(table))]
        return self.device.upload(padded, torch.int32).view(len(runs), width)

    def _has_states(self, turn: Turn, trail: Trail, begin: int) -> bool:
        return begin > turn.start or (begin == turn.start and self._before(turn, trail) is not None)

    def _before(self, turn: Turn, trail: Trail) -> Tensor | None:
        """The target's state [F] of the position before those that the step ran, if anyone kept it."""
        position = turn.start - 1
        if trail.state_at == position:
            return trail.state
        if trail.state is None and turn.start % self.page_size == 0:  # the prefix cache supplied what comes before
            return self.network.pages.states[turn.request.pages[position // self.page_size]]
        return None

    def _features(self, runs: list[Run], hidden: Tensor, sources: Tensor, count: int) -> Tensor:
        """What the network reads beside each token of its first pass: [count, F]."""
        rows: list[int] = []
        carried: dict[int, Tensor] = {}
        for run in runs:
            turn = run.turn
            if run.begin == turn.start and (state := self._before(turn, run.trail)) is not None:
                carried[len(rows)] = state
            rows += [max(turn.first + entry - 1 - turn.start, 0) for entry in range(run.begin, run.stop)]
        states = hidden[rows]  # [entries, F]
        for place, state in carried.items():
            states[place] = state
        if len(rows) == count:
            return states
        features = torch.zeros(count, hidden.shape[1], device=hidden.device)
        features[sources.long()] = states
        return features

    def _keep_states(self, turns: Sequence[Turn], trails: list[Trail], hidden: Tensor) -> None:
        """Keep the state of the last position of each turn, and that of every page which the step filled."""
        size = self.page_size
        pages: list[int] = []
        rows: list[int] = []
        for turn in turns:
            for end in range(turn.start // size * size + size, turn.computed + 1, size):
                pages.append(turn.request.pages[end // size - 1])
                rows.append(turn.first + end - 1 - turn.start)
        if pages:
            self.network.pages.states[pages] = hidden[rows]
        latest = hidden[[turn.first + turn.computed - 1 - turn.start for turn in turns]]  # [B, F]
        for turn, trail, state in zip(turns, trails, latest, strict=True):
            trail.state, trail.state_at = state, turn.computed - 1

    def _draw_at_once(self, runs: list[Run], states: Tensor, places: Tensor, sheet: _Sheet) -> None:
        """Every mask token gives one token, whatever the others are."""
        deep = [[at for at, run in enumerate(runs) if run.width > depth] for depth in range(sheet.width)]
        if not deep:
            return
        chosen = torch.cat([places[rows, depth] for depth, rows in enumerate(deep)])
        logits = self.network.logits(states[chosen.long()])  # [drafted tokens, V]
        parts = torch.split(logits, [len(rows) for rows in deep])
        for depth, (rows, part) in enumerate(zip(deep, parts, strict=True)):
            sheet.put([runs[at] for at in rows], depth, part)

    def _draw_in_turn(self, runs: list[Run], states: Tensor, places: Tensor, sheet: _Sheet) -> None:
        """One token at a time, each read before the next is drawn."""
        active = [at for at, run in enumerate(runs) if run.width]
        if not active:
            return
        state = states[places[active, 0].long()]  # [R, S]
        drafting = [runs[at] for at in active]
        tables = self._tables(drafting)
        positions = self.device.upload([run.turn.computed for run in drafting], torch.int32)
        for depth in range(sheet.width):
            drawn = sheet.put(drafting, depth, self.network.logits(state))
            going = [at for at, run in enumerate(drafting) if run.width > depth + 1]
            if not going:
                return
            if len(going) < len(drafting):
                drafting = [drafting[at] for at in going]
                drawn, state, tables, positions = drawn[going], state[going], tables[going], positions[going]
            positions, slots = self.ops.advance(positions, tables, self.page_size, self.network.context)
            starts = self.device.upload(range(len(going) + 1), torch.int32)
            state = self.network.run(Batch(drawn, positions, slots, starts, tables), self.network.feedback(state))


class _Sheet:
    """A draft in the making."""

    def __init__(self, drafter: Autoregressive, turns: Sequence[Turn], runs: Sequence[Run]) -> None:
        self.drawer = drafter.drawer
        self.width = max((run.width for run in runs), default=0)
        self.lengths = [0] * len(turns)
        for run in runs:
            self.lengths[run.row] = run.width
        place, shape = drafter.device.place, (len(turns), self.width)
        self.tokens = torch.full(shape, -1, dtype=torch.int32, device=place)  # [B, W]
        # Made anew each time: a draft may be verified some steps later, beside newer ones.
        self.logits = torch.zeros(*shape, drafter.vocabulary, device=place) if self.drawer.keeps else None  # [B, W, V]

    def put(self, runs: Sequence[Run], depth: int, logits: Tensor) -> Tensor:
        """Draw a token for each run from its row of logits [R, V]; return them [R]."""
        rows = [run.row for run in runs]
        drawn = self.drawer.draw(logits, [run.turn for run in runs], depth)
        self.tokens[rows, depth] = drawn
        if self.logits is not None:
            self.logits[rows, depth] = logits
        return drawn

    def draft(self) -> Draft:
        return Draft(self.tokens, self.lengths, logits=self.logits)
