"""A block head's part in rounds without the host. See seats.py and block_drafter.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...cache.pages import Pages
from ...kernels import Batch, Kernels
from ...models.block_head import BlockHead
from ...multi_step.state import DecodeState, rows_of
from ...request import Request
from .draft_sampler import DraftSampler
from .slate import Slate


class BlockPart:
    def __init__(
        self, head: BlockHead[Pages], ops: Kernels, drawer: DraftSampler, seats: DecodeState, unsaid: int, words: int
    ) -> None:
        """unsaid: tokens at the beginning of a block that guess nothing; words: how many tokens the target knows."""
        self.head, self.ops, self.seats, self.unsaid = head, ops, seats, unsaid
        self.slate = Slate(drawer, seats, words, head.context, head.lm_head.ids)
        self.logits = self.slate.logits
        self.size = seats.width + unsaid  # tokens of a block
        self.states = torch.zeros(self.size * seats.rows, head.width, device=seats.newest.device)  # by depth

    def extend(self) -> None:
        """Store what stays of the batch as context, and run the blocks behind it."""
        seats, head, batch = self.seats, self.head, self.seats.batch
        # A text that has no room any more stands nowhere, and so does its block.
        room = rows_of(batch.slots[:, None], seats.ends) >= 0  # [B, 1]
        tables = torch.where(room, batch.page_tables, -1)
        inputs = self.ops.block_inputs(
            batch.positions,
            batch.query_starts,
            seats.ends,
            seats.newest,
            tables,
            head.pages.page_size,
            max(self.size - 1, 0),
            head.shape.mask,
            head.context,
        )
        slots = inputs.context_slots
        where = torch.where(slots >= 0, batch.positions, 0)
        head.store(head.absorb(seats.hidden), Batch(where, where, slots, batch.query_starts, batch.page_tables))
        if seats.width:
            block = Batch(inputs.tokens, inputs.positions, inputs.slots, inputs.query_starts, batch.page_tables)
            states = head.run(block).view(seats.rows, self.size, -1)
            self.states.view(self.size, seats.rows, -1).copy_(states.transpose(0, 1))

    def decode(self) -> None:
        """Guess the tokens of all blocks from left to right, each with the one before it."""
        seats, head = self.seats, self.head
        states = self.states.view(self.size, seats.rows, -1)
        drafts = states[self.unsaid :]  # [W, B, H]
        scores: Tensor = head.scores(drafts.flatten(0, 1)).view(seats.width, seats.rows, -1)  # [W, B, U]
        before = seats.newest
        memory = head.begin(states[0], before)
        self.slate.begin()
        for depth in range(seats.width):
            bias, memory = head.bias(drafts[depth], before, memory)
            found = scores[depth] if bias is None else scores[depth] + bias  # [B, U]
            before = self.slate.put(depth, head.logits(found) if self.slate.ids is None else found)
        self.slate.end()

    def land(self, requests: Sequence[Request], computed: Sequence[int]) -> None:
        """Nothing is kept of a request beside its pages."""
