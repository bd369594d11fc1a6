"""Several passes of the target one after the other, without the host between them. See speculation/seats.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ..cache.pages import Pages
from ..device import Buffer, Device, Fence
from ..device.graphs import Graphs, padded
from ..kernels import Batch, SamplingMetadata, VerifyInputs
from ..models import Model
from ..request import Request, Row, RowResult, Step
from ..speculation.manager import SpeculationManager
from ..types import DecodeStep, Draft
from .planner import Pilot
from .state import DecodeState, Part

MOST_CABINS = 64  # shapes of seats that are kept
TIMED = 4  # rounds of a flight that show what one costs
FEWEST, LONGEST = 2, 0.25  # rounds that the device works without the host at least, and seconds at most
FEWEST_PAGES = 16  # in a page table: shorter ones share a record
Key = tuple[str, int, int, int, bool]  # method, rows, width, pages in a table, whether some request is warm


@dataclass
class Cabin:
    """Seats of one shape, and what fills them."""

    seats: DecodeState
    part: Part | None
    taps: tuple[int, ...]
    numbers: Buffer  # newest, places, limits, drafts, top_k
    shares: Buffer  # temperature, top_p, min_p
    seeds: Buffer
    tables: Buffer
    drafts: VerifyInputs  # its tokens are written in each round: -1 and the drafts of each row
    found: Tensor  # [B, 1 + (W + 1) + W] int32: count, tokens kept, drafts that were verified
    drafted: Tensor  # [B] int32: W
    counted: Tensor  # [B] uint8: 0, no row's choice is to be ignored
    requests: list[Request] = field(default_factory=list)  # whose shares and seeds are there
    flown: bool = False  # its records are there: a round takes as long as all to come


class MultiStepRunner:
    def __init__(
        self, model: Model, device: Device, pages: Pages, spec_manager: SpeculationManager, graphs: Graphs, context: int
    ) -> None:
        self.model, self.ops, self.device, self.pages = model, model.ops, device, pages
        self.verifier, self.pilot, self.graphs, self.context = (
            spec_manager.verifier,
            Pilot(spec_manager),
            graphs,
            context,
        )
        self.busy = 0.0  # seconds that the device took for all rounds so far
        self.pace = 0.0  # seconds of a round, of late; 0: not known
        self._cabins: dict[Key, Cabin] = {}

    def run(self, step: Step) -> list[RowResult] | None:
        """All rounds of a step. None where rows differ in who drafts for them, or a drafter has to catch up."""
        requests = [row.request for row in step.rows]
        names = {request.method if request.width else "" for request in requests}
        name = names.pop()
        if names or not self.pilot.ready(name, requests):
            return None
        width = self.pilot.width(name, requests)
        key, cabin = self._cabin(name, step.rows, width)
        self._fill(cabin, step.rows)
        timed = TIMED if cabin.flown and self.pilot.learns(name) else 0
        marks, landed, ring = self._launch(cabin, key, step.decode_steps, timed)
        cabin.flown = True
        listed: list[list[list[int]]] = ring.tolist()  # the host waits here
        seconds = landed.since(marks[0])
        self.busy += seconds
        self.pace = seconds / step.decode_steps
        results = self._land(cabin, step.rows, listed)
        return self.pilot.land(name, step.rows, results, width, marks)

    def worth(self, most: int, host: float, life: float) -> int:
        """How many rounds a flight has where the host works for `host` seconds between two, and a text takes `life`
        seconds until it ends without notice.
        """
        # Short ones wait for the host, half of one is run in vain behind a text's end: least is lost in between.
        spell = min(math.sqrt(2 * host * life), LONGEST)
        return most if not self.pace else max(min(int(spell / self.pace), most), min(FEWEST, most))

    def warm_up(self, name: str, row: Row, width: int, times: int = 3) -> list[Fence]:
        """Run rounds over a row, `times` flights of a few; the fences of the last one. The row's pages are written, and
        nobody is told.
        """
        key, cabin = self._cabin(name, [row], width)
        for _ in range(times):  # to warm up, to record, to measure
            self._fill(cabin, [row])
            marks, _, ring = self._launch(cabin, key, TIMED, TIMED)
            ring.tolist()
        return marks

    def _launch(self, cabin: Cabin, key: Key, rounds: int, timed: int) -> tuple[list[Fence], Fence, Tensor]:
        """Start all rounds. Gives fences at the start, then after the target's pass and after the draft of the first
        `timed` rounds; one at the end; and what the rounds found, in the end the drafts that are still to be verified:
        [rounds + 1, B, ...].
        """
        seats, part = cabin.seats, cabin.part
        ring = torch.empty(rounds + 1, *cabin.found.shape, dtype=torch.int32, device=self.device.torch_device)
        marks = [self.device.fence()]
        for at in range(rounds):
            self._run(("target", *key), lambda: self._target(cabin))
            ring[at].copy_(cabin.found)
            if at < timed:
                marks.append(self.device.fence())
            if part is not None:
                self._run(("extend", *key), part.extend)
                if seats.width:
                    self._run(("decode", *key), part.decode)
            if at < timed:
                marks.append(self.device.fence())
        if seats.width:
            ring[rounds, :, seats.width + 2 :] = seats.drafts
        return marks, self.device.fence(), ring

    def _run(self, key: Hashable, run: Callable[[], None]) -> None:
        if self.graphs.decoding:
            self.graphs.run(key, run)
        else:
            run()

    # ---- one round, all of it on the device ----

    def _target(self, cabin: Cabin) -> None:
        """Run the newest tokens and their drafts, verify, and move the seats on."""
        seats, batch, width = cabin.seats, cabin.seats.batch, cabin.seats.width
        tables = batch.page_tables
        where = self.ops.next_slots(seats.places - 1, tables, self.pages.page_size, self.context, width + 1)
        if cabin.part is None and not width:
            batch = Batch(seats.newest, *where, batch.query_starts, tables)
        else:
            seats.before.copy_(seats.places)
            batch.positions.copy_(where[0])
            batch.slots.copy_(where[1])
            torch.cat([seats.newest[:, None], seats.drafts.clamp(min=0)], 1, out=batch.tokens.view(-1, width + 1))
        hidden, states = self.model.forward(batch, self.pages.layers, cabin.taps)  # [T, E] each
        if states:
            torch.cat(states, 1, out=seats.hidden)
        choice = replace(seats.choice, positions=seats.places + 1)
        if width:
            self._verify(cabin, self.model.logits(hidden), choice)
        else:
            self.ops.sample(self.model.logits(hidden), choice, seats.newest)
            seats.places.add_(1)
            if cabin.part is not None:
                seats.ends.copy_(cabin.drafts.starts[:-1])  # of one token each
            torch.cat([torch.ones_like(seats.newest)[:, None], seats.newest[:, None]], 1, out=cabin.found)

    def _verify(self, cabin: Cabin, logits: Tensor, choice: SamplingMetadata) -> None:
        """logits [T, V]."""
        seats, drafts, width = cabin.seats, cabin.drafts, cabin.seats.width
        drafts.tokens.view(-1, width + 1)[:, 1:] = seats.drafts
        sampled = torch.empty_like(drafts.tokens)
        kept = self.verifier.verify(logits, choice, drafts, choice.positions, sampled)
        settled = self.ops.next_tokens(
            kept.tokens, cabin.drafted, drafts.starts, seats.newest, cabin.counted, self.model.config.vocabulary
        )
        torch.cat([settled.counts[:, None], kept.tokens, seats.drafts], 1, out=cabin.found)
        seats.newest.copy_(settled.tokens)
        seats.places.add_(settled.counts)
        seats.ends.copy_(settled.ends)

    # ---- on the ground ----

    def _cabin(self, name: str, rows: list[Row], width: int) -> tuple[Key, Cabin]:
        count = padded(len(rows)) if self.graphs.decoding else len(rows)
        pages = max(len(row.request.pages) for row in rows)
        warm = any(row.request.params.temperature > 0 for row in rows)
        key = (name, count, width, max(1 << (pages - 1).bit_length(), FEWEST_PAGES), warm)
        if key not in self._cabins:
            if len(self._cabins) == MOST_CABINS:
                self._cabins.clear()
                self.graphs.forget()
            self._cabins[key] = self._build(*key)
        return key, self._cabins[key]

    def _build(self, name: str, rows: int, width: int, pages: int, warm: bool) -> Cabin:
        buffer, zeros, upload = self.device.buffer, self.device.zeros, self.device.upload
        numbers = buffer(rows * (4 + width), torch.int32)
        newest, places, limits, drafts, top_k = torch.split(numbers.tensor, [rows, rows, rows, rows * width, rows])
        shares, seeds, tables = (
            buffer(3 * rows, torch.float32),
            buffer(rows, torch.int64),
            buffer(rows * pages, torch.int32),
        )
        temperature, top_p, min_p = torch.split(shares.tensor, rows)
        starts = upload(range(0, rows * (width + 1) + 1, width + 1), torch.int32)
        tokens, positions, slots = zeros((3, rows * (width + 1)), torch.int32)
        taps = self.pilot.taps(name)
        floats = len(taps) * self.model.config.width
        seats = DecodeState(
            width=width,
            newest=newest,
            places=places,
            limits=limits,
            drafts=drafts.view(rows, width),
            choice=SamplingMetadata(temperature, top_k, top_p, min_p, seeds.tensor, places, greedy=not warm),
            batch=Batch(tokens, positions, slots, starts, tables.tensor.view(rows, pages)),
            before=zeros((rows,), torch.int32),
            ends=zeros((rows,), torch.int32),
            hidden=zeros((rows * (width + 1), floats), torch.float32),
            warm=warm,
        )
        part = self.pilot.part(name, seats)
        chain = list(range(-1, width))
        logits = part.logits if part is not None else None
        drawn = None if logits is None else upload(([0] + [1] * width) * rows, torch.int32).to(torch.uint8)
        proposed = upload([-1] * (rows * (width + 1)), torch.int32)
        return Cabin(
            seats,
            part,
            taps,
            numbers,
            shares,
            seeds,
            tables,
            drafts=VerifyInputs(starts, proposed, upload(chain * rows, torch.int32), width, logits, drawn),
            found=zeros((rows, 2 + 2 * width), torch.int32),
            drafted=upload([width] * rows, torch.int32),
            counted=upload([0] * rows, torch.uint8),
        )

    def _fill(self, cabin: Cabin, rows: list[Row]) -> None:
        """Seat the requests; every value of the rows that pad is set as well."""
        seats, requests = cabin.seats, [row.request for row in rows]
        count, width = seats.rows, seats.width
        spare = [0] * (count - len(rows))
        numbers = [row.tokens[0] for row in rows] + spare
        numbers += [row.start for row in rows] + spare
        numbers += [request.max_length for request in requests] + spare
        for row in rows if width else ():
            draft = [] if row.draft is None else row.draft.tokens[:width]
            numbers += draft + [-1] * (width - len(draft))
        numbers += [-1] * (width * len(spare))
        numbers += [request.params.top_k for request in requests] + spare
        cabin.numbers.fill(numbers)
        table = np.full((count, seats.batch.page_tables.shape[1]), -1, np.int32)
        for at, request in enumerate(requests):
            table[at, : len(request.pages)] = request.pages
        cabin.tables.fill(table.ravel())
        if cabin.drafts.logits is not None:
            self._fill_logits(cabin, cabin.drafts.logits, rows)
        if cabin.requests != requests:
            params = [request.params for request in requests]
            nothing, whole = [0.0] * len(spare), [1.0] * len(spare)
            shares = [p.temperature for p in params] + nothing + [p.top_p for p in params] + whole
            cabin.shares.fill(shares + [p.min_p for p in params] + nothing)
            cabin.seeds.fill([request.seed for request in requests] + spare)
            cabin.requests = requests  # only now: what fails on the way must not pass for filled

    @staticmethod
    def _fill_logits(cabin: Cabin, logits: Tensor, rows: list[Row]) -> None:
        """What the guesses that come with the rows were drawn from."""
        width = cabin.seats.width
        for at, row in enumerate(rows):
            if row.draft is not None and row.draft.logits is not None:
                drawn = row.draft.logits[:width]
                logits.view(-1, width + 1, logits.shape[1])[at, 1 : len(drawn) + 1] = drawn

    def _land(self, cabin: Cabin, rows: list[Row], listed: list[list[list[int]]]) -> list[RowResult]:
        """What each row found in all rounds, and what it would verify next."""
        *rounds, left = listed
        width, passes = cabin.seats.width, len(rounds)
        if not width:
            results = [RowResult([found[at][1] for found in rounds], passes=passes) for at in range(len(rows))]
            self._tell(cabin, rows, results)
            return results
        results = []
        for at in range(len(rows)):
            parts = [DecodeStep(read_guess(found[at], width), found[at][1 : 1 + found[at][0]]) for found in rounds]
            tokens = [token for part in parts for token in part.tokens]
            draft = read_guess(left[at], width)
            if draft is not None and cabin.drafts.logits is not None:
                begin = at * (cabin.seats.width + 1) + 1
                draft = replace(draft, logits=cabin.drafts.logits[begin : begin + len(draft.tokens)].clone())
            results.append(RowResult(tokens, draft=draft, decode_steps=parts, passes=passes))
        self._tell(cabin, rows, results)
        return results

    @staticmethod
    def _tell(cabin: Cabin, rows: list[Row], results: list[RowResult]) -> None:
        if cabin.part is not None:
            computed = [row.start + len(result.tokens) for row, result in zip(rows, results, strict=True)]
            cabin.part.land([row.request for row in rows], computed)


def read_guess(found: list[int], width: int) -> Draft | None:
    """The drafts of a row of Cabin.found."""
    tokens = found[width + 2 :]
    count = tokens.index(-1) if -1 in tokens else width
    return Draft(tokens[:count]) if count else None
