"""The drafter over a head that fills a block of masks: it follows the text in the target's pages, and guesses at once.

The entry of a position comes from the target's state at that position alone: pages are shared between prompts as the
target's are, and nothing is to be known of a request from one step to the next, unless it rests (trails.py). Entries of
a block are scratch: they stand where the text goes on, and those of the text overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from ..cache.pages import Pages
from ..kernels import Batch, BlockInputs
from ..models.blocks import BlockHead
from ..types import Request, UserError
from . import Draft, MethodOptions, Needs, Target, Turn
from .block_part import BlockPart
from .checkpoint import Head, choose_taps, open_head
from .draw import Drawer
from .head_drafter import check_mask
from .network import page_tables
from .seats import Seats
from .sheet import Sheet
from .sources import choose_source
from .trails import Trails


@dataclass(frozen=True)
class BlockOptions(MethodOptions):
    width: int = 0  # tokens that it drafts at most; 0: as many as the block that it was trained on holds
    model: str = ""  # the head: a folder, or a name on the hub; default: what ships for the model
    quantize: Literal["int8", "int4"] | None = None  # float weights of the head become this; default: as the target's
    taps: tuple[int, ...] = ()  # states to read, entering these layers of the target, such as 2/15/28


def build_block(method: str, options: BlockOptions, target: Target) -> BlockDrafter:
    """A drafter over a head that is for `method`."""
    head = open_head(choose_source(options.model, method, target), target.model.config, method)
    shape, layers = head.shape, head.shape.layers
    if options.width > shape.drafts:
        raise UserError(
            f"`width` is {options.width}, but `{head.path}` was trained on blocks of {shape.block}, which give "
            f"{shape.drafts} guesses: pass at most {shape.drafts}"
        )
    check_tokens(head, target)
    taps = choose_taps(head, target.model, options.taps)
    pages = target.storage(layers.layers, layers.kv_heads, layers.head_dim, target.kv_dtype)
    network = BlockHead(head, target.model, pages, target.max_context, options.quantize or target.quantize)
    return BlockDrafter(network, target, options.width or shape.drafts, taps)


def check_tokens(head: Head, target: Target) -> None:
    """Refuse a head that cannot read what comes before a guess."""
    check_mask(head, target)
    shape, vocabulary = head.shape, target.model.config.vocabulary
    if shape.markov_rank and 0 < shape.markov_tokens < vocabulary:
        raise UserError(
            f"`markov_w1` of `{head.path}` has {shape.markov_tokens} tokens, but the target has {vocabulary}: "
            "take the head that was made for this model"
        )


@dataclass(frozen=True)
class Reading:
    """What of a turn becomes context: its positions [begin, computed), `shift` earlier, in the pages that are seen."""

    turn: Turn
    begin: int
    pages: list[int]
    shift: int = 0


@dataclass(frozen=True)
class Block:
    """A request's block: `size` tokens run, `width` are drafted."""

    row: int  # among the turns
    place: int  # among the readings
    turn: Turn
    size: int
    width: int

    @property
    def depths(self) -> range:
        return range(self.width)


class BlockDrafter:
    """A Proposer over a BlockHead. A request's draft depends on its own text, width and pages alone."""

    def __init__(self, head: BlockHead[Pages], target: Target, width: int, taps: tuple[int, ...]) -> None:
        self.unsaid = 0 if head.shape.from_anchor else 1  # tokens at the beginning of a block that guess nothing
        self.needs = Needs(
            width,
            taps,
            follows=True,
            lookahead=width + self.unsaid,
            context=head.context,
            costs=True,
            draws=True,
            unattended=True,
            lazy=True,
        )
        self.head, self.ops, self.device = head, target.ops, target.device
        self.page_size, self.vocabulary = target.page_size, target.model.config.vocabulary
        self.drawer = Drawer(target)
        self._trails = Trails(target.page_size, target.lazy)

    def propose(self, turns: Sequence[Turn], last: Tensor, hidden: Tensor | None) -> Draft:
        assert hidden is not None
        readings = [reading for turn in turns if (reading := self._read(turn)) is not None]
        places = {reading.turn.request: place for place, reading in enumerate(readings)}
        planned = [
            self._plan(row, places[turn.request], turn) for row, turn in enumerate(turns) if turn.request in places
        ]
        blocks = [block for block in planned if block.width > 0]
        sheet = Sheet(self, turns, blocks)
        if readings:
            tables = page_tables([reading.pages for reading in readings], self.device)
            context, inputs = self._inputs(readings, blocks, self._newest(turns, readings, last), tables)
            self.head.store(self.head.absorb(self._states(readings, hidden)), context)
            self._note(readings)
            if blocks:
                batch, firsts = self._gather(blocks, inputs, tables)
                self._draw(blocks, self.head.run(batch), firsts, last, sheet)
        return sheet.draft()

    def _read(self, turn: Turn) -> Reading | None:
        """None: it missed what comes before, and nothing can be made of the rest yet."""
        if not self._trails.lazy:
            return Reading(turn, turn.start, turn.request.pages)
        trail = self._trails.of(turn)
        begin = self._trails.begin(turn, trail, 0)
        if begin is None or begin >= turn.computed:
            return None
        return Reading(turn, begin, trail.pages(turn.request), trail.shift(self.page_size))

    def _note(self, readings: list[Reading]) -> None:
        for turn in (reading.turn for reading in readings if self._trails.lazy):
            trail = self._trails[turn.request]
            trail.known = turn.computed
            self._trails.label(turn, trail)

    @staticmethod
    def _newest(turns: Sequence[Turn], readings: list[Reading], last: Tensor) -> Tensor:
        """The newest token of each reading: [R]."""
        if len(readings) == len(turns):
            return last
        reading = {reading.turn.request for reading in readings}
        return last[[row for row, turn in enumerate(turns) if turn.request in reading]]

    @staticmethod
    def _states(readings: list[Reading], hidden: Tensor) -> Tensor:
        """The target's states of all positions that are read: [T, F]."""
        ran = [
            reading.turn.first + at - reading.turn.start
            for reading in readings
            for at in range(reading.begin, reading.turn.computed)
        ]
        return hidden if ran == list(range(len(hidden))) else hidden[ran]

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        """Nothing to rewind: the entries of a block are overwritten."""

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._trails.pop(request, None)

    def ready(self, requests: Sequence[Request]) -> bool:
        return True

    def part(self, seats: Seats) -> BlockPart:
        return BlockPart(self.head, self.ops, self.drawer, seats, self.unsaid, self.vocabulary)

    def _plan(self, row: int, place: int, turn: Turn) -> Block:
        """A block no larger than the guesses that are wanted, cut where the pages or the context end."""
        if not turn.fresh or turn.width < 1:
            return Block(row, place, turn, 0, 0)
        room = min(len(turn.request.pages) * self.page_size, self.head.context) - turn.computed
        size = min(min(turn.width, self.needs.width) + self.unsaid, room)
        return Block(row, place, turn, size, size - self.unsaid)

    def _inputs(
        self, readings: list[Reading], blocks: list[Block], last: Tensor, tables: Tensor
    ) -> tuple[Batch, BlockInputs]:
        """Where everything goes that the step computed, and the blocks behind it."""
        upload = self.device.upload
        starts = [0, *accumulate(reading.turn.computed - reading.begin for reading in readings)]
        where = [at - one.shift for one in readings for at in range(one.begin, one.turn.computed)]
        positions = upload(where, torch.int32)  # [T]
        query_starts = upload(starts, torch.int32)
        inputs = self.ops.block_inputs(
            positions,
            query_starts,
            upload([start - 1 for start in starts[1:]], torch.int32),  # nothing was rejected of what is passed on
            last,
            tables,
            self.page_size,
            max((block.size for block in blocks), default=1) - 1,
            self.head.shape.mask,
            self.head.context,
        )
        slots = inputs.context_slots
        stored = torch.where(slots >= 0, positions, 0)  # a position without a slot may lie beyond all tables
        return Batch(stored, stored, slots, query_starts, tables), inputs  # tokens do not matter

    def _gather(self, blocks: list[Block], inputs: BlockInputs, tables: Tensor) -> tuple[Batch, list[int]]:
        """The blocks side by side without their padding, and where each begins."""
        padded = inputs.tokens.shape[0] // tables.shape[0]  # tokens of a row
        kept: list[int] = []
        starts = [0]
        for block in blocks:
            kept += range(block.place * padded, block.place * padded + block.size)
            starts.append(len(kept))
        rows = [block.place for block in blocks]
        batch = Batch(
            inputs.tokens[kept],
            inputs.positions[kept],
            inputs.slots[kept],
            self.device.upload(starts, torch.int32),
            tables[rows],
        )
        return batch, starts[:-1]

    def _draw(self, blocks: list[Block], states: Tensor, firsts: list[int], last: Tensor, sheet: Sheet) -> None:
        """Guess the tokens of all blocks from left to right, each with the one before it. states: [T, H]."""
        begins = [0, *accumulate(block.width for block in blocks)]
        guessing = [
            first + self.unsaid + at for first, block in zip(firsts, blocks, strict=True) for at in block.depths
        ]
        guesses = states[guessing]  # [drafted tokens, H]
        scores = self.head.scores(guesses)  # [drafted tokens, U]
        before = last[[block.row for block in blocks]]  # [R]
        memory = self.head.begin(states[firsts], before)
        going = list(range(len(blocks)))
        ids = self.head.ends.ids if sheet.likeliest else None
        for depth in range(sheet.width):
            here = [begins[at] + depth for at in going]
            sure = self.head.confidence(guesses[here], before)
            bias, memory = self.head.bias(guesses[here], before, memory)
            logits = scores[here] if bias is None else scores[here] + bias  # [R, U]
            drafting = [blocks[at] for at in going]
            before = sheet.put(drafting, depth, logits if ids is not None else self.head.logits(logits), sure, ids)
            pays = sheet.pays(drafting, depth, at_once=True)
            stay = [place for place, block in enumerate(drafting) if block.width > depth + 1 and pays[place]]
            if len(stay) < len(going):
                going, before, memory = [going[place] for place in stay], before[stay], memory[stay]
            if not going:
                return
