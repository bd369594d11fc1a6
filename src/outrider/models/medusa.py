"""Medusa heads: each predicts one token, at its own distance, from the target's last hidden state.

Head k predicts the token k + 2 positions after the state's. The target itself has chosen the one right after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..errors import UserError
from .decoder import Model
from .heads import DraftVocabulary, HeadCheckpoint, HeadShape
from .layers import WeightReader


@dataclass(frozen=True, kw_only=True)
class MedusaShape(HeadShape):
    heads: int
    blocks: int  # residual blocks per head: x + SiLU(W x + b)
    block_bias: bool
    lm_heads: tuple[str, ...]  # names of the LM heads: one per head, or one for all; empty: the target's


class MedusaHeads:
    """Medusa heads. K: heads. U: tokens that they can draft."""

    def __init__(self, head: HeadCheckpoint, target: Model, quantize: str | None = None) -> None:
        self.shape: MedusaShape = head.shape
        shape, width = self.shape, self.shape.width
        self.ops = target.ops
        self.target_norm = target.norm, target.config.eps
        reader = WeightReader(head, self.ops, quantize)
        self.blocks = [[self._block(reader, k, index) for index in range(shape.blocks)] for k in range(shape.heads)]
        rows = shape.draft_vocabulary or target.config.vocabulary
        own = [self.ops.matrix(reader.matrix(name, rows, width, fine=True)) for name in shape.lm_heads]
        self.draft_vocabulary = DraftVocabulary(shape, target, head.draft_ids)
        self.lm_heads = own or [self.draft_vocabulary.head_rows(target)]
        if reader.unread:
            raise UserError(
                f"the Medusa heads come with the tensor `{min(reader.unread)}`, which none of them uses: "
                "fetch them again"
            )
        self.weight_bytes = reader.weight_bytes

    def _block(self, reader: WeightReader, head: int, index: int) -> tuple[object, Tensor | None]:
        """Read the matrix and the bias of a block."""
        prefix, width = f"model.blocks.{head}.layers.{index}.", self.shape.width
        matrix = self.ops.matrix(reader.matrix(prefix + "weight", width, width))
        return matrix, reader.vector(prefix + "bias", width) if self.shape.block_bias else None

    def logits(self, hidden: Tensor, count: int) -> Iterator[Tensor]:
        """Yield the logits [B, V] f32 of each of the first `count` heads, from the target's last states [B, E].

        Tokens that the heads cannot draft have -inf.
        """
        return map(self.draft_vocabulary.scatter, self.scores(hidden, count))

    def scores(self, hidden: Tensor, count: int) -> Iterator[Tensor]:
        """Yield the same over the draft vocabulary: [B, U]."""
        state = self.ops.rms_norm(hidden, *self.target_norm)  # [B, E]
        if len(self.lm_heads) == 1:  # one matmul for all heads
            states = torch.cat([self._through(self.blocks[k], state) for k in range(count)])  # [count * B, E]
            yield from self.draft_vocabulary.scale(self.ops.linear(states, self.lm_heads[0])).view(
                count, len(hidden), -1
            )
            return
        for k in range(count):
            yield self.draft_vocabulary.scale(self.ops.linear(self._through(self.blocks[k], state), self.lm_heads[k]))

    def _through(self, blocks: list[tuple[object, Tensor | None]], state: Tensor) -> Tensor:
        for matrix, bias in blocks:
            out = self.ops.linear(state, matrix)  # [B, E]
            state = state + silu(out if bias is None else out + bias)
        return state
