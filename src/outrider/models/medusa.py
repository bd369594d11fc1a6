"""Medusa: heads that each guess one token from the target's last state alone, one further ahead than the other.

Head k guesses the token k + 2 places after the state's position: the one right after it, the target has chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..errors import UserError
from .heads import HeadCheckpoint, HeadShape, Words
from .layers import Reader
from .llama import Model


@dataclass(frozen=True, kw_only=True)
class MedusaShape(HeadShape):
    heads: int
    blocks: int  # of each head: x + SiLU(W x + b)
    block_bias: bool
    ends: tuple[str, ...]  # matrices to the vocabulary: one for each head, or one for all; none: the target's


class MedusaHeads:
    """Letters: K heads, U tokens that they can draft."""

    def __init__(self, head: HeadCheckpoint, target: Model, quantize: str | None = None) -> None:
        self.shape: MedusaShape = head.shape
        shape, width = self.shape, self.shape.width
        self.ops = target.ops
        self.target_norm = target.norm, target.config.eps
        reader = Reader(head, self.ops, quantize)
        self.blocks = [[self._block(reader, k, at) for at in range(shape.blocks)] for k in range(shape.heads)]
        rows = shape.draft_vocabulary or target.config.vocabulary
        own = [self.ops.matrix(reader.matrix(name, rows, width, fine=True)) for name in shape.ends]
        self.words = Words(shape, target, head.draft_ids)
        self.ends = own or [self.words.rows_of(target)]
        if reader.unread:
            raise UserError(
                f"the Medusa heads come with the tensor `{min(reader.unread)}`, which none of them has a place for: "
                "fetch them again"
            )
        self.weight_bytes = reader.weight_bytes

    def _block(self, reader: Reader, head: int, at: int) -> tuple[object, Tensor | None]:
        """Matrix and bias."""
        prefix, width = f"model.blocks.{head}.layers.{at}.", self.shape.width
        matrix = self.ops.matrix(reader.matrix(prefix + "weight", width, width))
        return matrix, reader.vector(prefix + "bias", width) if self.shape.block_bias else None

    def logits(self, hidden: Tensor, count: int) -> Iterator[Tensor]:
        """What leaves the target's last layer [B, E] to [B, V] f32 by each of the first `count` heads, when it is asked
        for; -inf for tokens that they cannot draft.
        """
        return map(self.words.spread, self.scores(hidden, count))

    def scores(self, hidden: Tensor, count: int) -> Iterator[Tensor]:
        """The same over the tokens that they can draft alone: [B, U]."""
        state = self.ops.rms_norm(hidden, *self.target_norm)  # [B, E]
        if len(self.ends) == 1:  # read once for all heads
            states = torch.cat([self._through(self.blocks[k], state) for k in range(count)])  # [count * B, E]
            yield from self.words.scale(self.ops.linear(states, self.ends[0])).view(count, len(hidden), -1)
            return
        for k in range(count):
            yield self.words.scale(self.ops.linear(self._through(self.blocks[k], state), self.ends[k]))

    def _through(self, blocks: list[tuple[object, Tensor | None]], state: Tensor) -> Tensor:
        for matrix, bias in blocks:
            found = self.ops.linear(state, matrix)  # [B, E]
            state = state + silu(found if bias is None else found + bias)
        return state
