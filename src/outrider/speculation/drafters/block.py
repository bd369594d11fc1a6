"""The drafter over a head that fills a block of masks: it follows the text in the target's pages, and guesses at once.

The entry of a position comes from the target's state at that position alone: pages are shared between prompts as the
target's are, and nothing is to be known of a request from one step to the next, unless it rests (trails.py). Entries of
a block are scratch: they stand where the text goes on, and those of the text overwrite them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from ...cache.pages import Pages
from ...errors import UserError
from ...kernels import Batch, BlockInputs
from ...models.block_head import BlockHead
from ...multi_step.state import DecodeState
from ...request import Request
from ..checkpoints import Head, choose_source, choose_taps, open_head
from ..interface import DraftBatch, DraftContext, Needs, Target, TreeOptions
from .block_decoding import Block, BlockGrowth
from .block_part import BlockPart
from .head import check_mask
from .kv_tracker import Trails
from .network import page_tables


@dataclass(frozen=True)
class BlockOptions(TreeOptions):
    width: int = 0  # tokens that it drafts at most, in all branches together; 0: as many as its blocks guess
    levels: int | None = None  # how deep a draft may be; default: as deep as its blocks guess
    model: str = ""  # the head: a folder, or a name on the hub; default: what ships for the model
    quantize: Literal["int8", "int4"] | None = None  # float weights of the head become this; default: as the target's
    taps: tuple[int, ...] = ()  # states to read, entering these layers of the target, such as 2/15/28


def build_block(method: str, options: BlockOptions, target: Target) -> BlockDrafter:
    """A drafter over a head that is for `method`."""
    head = open_head(choose_source(options.model, method, target), target.model.config, method)
    layers = head.shape.layers
    width, levels = choose_tree(options, head)
    check_tokens(head, target)
    taps = choose_taps(head, target.model, options.taps)
    pages = target.storage(layers.layers, layers.kv_heads, layers.head_dim, target.kv_dtype)
    network = BlockHead(head, target.model, pages, target.max_context, options.quantize or target.quantize)
    return BlockDrafter(network, target, width, taps, options.branches, levels)


def choose_tree(options: BlockOptions, head: Head) -> tuple[int, int]:
    """Tokens of a draft, and how deep it may be: no deeper than a block."""
    most = head.shape.drafts
    width = options.width or most
    replace(options, width=width).check_tree()
    asked = {"levels": options.levels or most, "width": width if options.branches == 1 else most}
    for name, value in asked.items():
        if value > most:
            raise UserError(
                f"`{name}` is {value}, but `{head.path}` was trained on blocks of {head.shape.block}, which give "
                f"{most} guesses: pass at most {most}" + (", or `branches` for a tree" if name == "width" else "")
            )
    return width, min(asked["levels"], width)


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
    """The positions [begin, computed) of a request to read, `shift` earlier, in the pages that the head sees."""

    context: DraftContext
    begin: int
    pages: list[int]
    shift: int = 0


class BlockDrafter:
    """A Proposer over a BlockHead. A request's draft depends on its own text, width and pages alone."""

    def __init__(
        self, head: BlockHead[Pages], target: Target, width: int, taps: tuple[int, ...], branches: int, levels: int
    ) -> None:
        """`width`, `branches` and `levels` as in TreeOptions."""
        self.growth = BlockGrowth(head, target, width, branches, levels)
        self.needs = Needs(
            self.growth.width,
            taps,
            has_kv=True,
            lookahead=levels + self.growth.unsaid,
            context=head.context,
            trees=branches > 1,
            costs_time=True,
            has_probs=True,
            multi_step=branches == 1,
            suspendable=True,
        )
        self.head, self.ops, self.device = head, target.ops, target.device
        self.page_size = target.page_size
        self._trails = Trails(target.page_size, target.lazy)

    def propose(self, contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        assert hidden is not None
        readings = [reading for context in contexts if (reading := self._read(context)) is not None]
        places = {reading.context.request: place for place, reading in enumerate(readings)}
        planned = [
            self._plan(row, places[context.request], context)
            for row, context in enumerate(contexts)
            if context.request in places
        ]
        blocks = [block for block in planned if block.width > 0]
        draft = DraftBatch([[] for _ in contexts], reached=0)
        if readings:
            tables = page_tables([reading.pages for reading in readings], self.device)
            context, inputs = self._inputs(readings, blocks, self._newest(contexts, readings, last), tables)
            self.head.store(self.head.absorb(self._states(readings, hidden)), context)
            self._note(readings)
            if blocks:
                batch, firsts = self._gather(blocks, inputs, tables)
                draft = self.growth.draft(contexts, blocks, self.head.run(batch), firsts, last)
        return draft

    def _read(self, context: DraftContext) -> Reading | None:
        """None: it missed what comes before, and nothing can be made of the rest yet."""
        if not self._trails.lazy:
            return Reading(context, context.start, context.request.pages)
        trail = self._trails.of(context)
        begin = self._trails.begin(context, trail, 0)
        if begin is None or begin >= context.computed:
            return None
        return Reading(context, begin, trail.pages(context.request), trail.shift(self.page_size))

    def _note(self, readings: list[Reading]) -> None:
        for context in (reading.context for reading in readings if self._trails.lazy):
            trail = self._trails[context.request]
            trail.known = context.computed
            self._trails.label(context, trail)

    @staticmethod
    def _newest(contexts: Sequence[DraftContext], readings: list[Reading], last: Tensor) -> Tensor:
        """The newest token of each reading: [R]."""
        if len(readings) == len(contexts):
            return last
        reading = {reading.context.request for reading in readings}
        return last[[row for row, context in enumerate(contexts) if context.request in reading]]

    @staticmethod
    def _states(readings: list[Reading], hidden: Tensor) -> Tensor:
        """The target's states of all positions that are read: [T, F]."""
        ran = [
            reading.context.first_row + at - reading.context.start
            for reading in readings
            for at in range(reading.begin, reading.context.computed)
        ]
        return hidden if ran == list(range(len(hidden))) else hidden[ran]

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the head's weights."""
        return self.head.weight_bytes

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        """Nothing to rewind: the entries of a block are overwritten."""

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._trails.pop(request, None)

    def ready(self, requests: Sequence[Request]) -> bool:
        return True

    def part(self, seats: DecodeState) -> BlockPart:
        growth = self.growth
        return BlockPart(self.head, self.ops, growth.drawer, seats, growth.unsaid, growth.vocabulary)

    def _plan(self, row: int, place: int, context: DraftContext) -> Block:
        """Its block, where the pages and the context have room for it."""
        room = min(len(context.request.pages) * self.page_size, self.head.context) - context.computed
        return self.growth.plan(row, place, context, room)

    def _inputs(
        self, readings: list[Reading], blocks: list[Block], last: Tensor, tables: Tensor
    ) -> tuple[Batch, BlockInputs]:
        """Where everything goes that the step computed, and the blocks behind it."""
        upload = self.device.upload
        starts = [0, *accumulate(reading.context.computed - reading.begin for reading in readings)]
        where = [at - one.shift for one in readings for at in range(one.begin, one.context.computed)]
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
