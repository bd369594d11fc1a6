"""Heads that draft one token after the other, trained by unrolling: later steps read the head's own states.

Row t of a document reads token t + 1 beside a state, in step 0 the target's state at t, and predicts token t + 2. In
step s the row reads token t + 1 + s beside its own output of the step before, and predicts token t + 2 + s. A row
attends to the step-0 entries of its document up to its own, and to its own entries of all later steps. Shapes: S steps,
R answer tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.structures import AttentionRanges, OwnKeys
from ..data.pack import Pack
from ..losses import Loss, score
from ..target import TargetInfo, TargetOutputs, vocab_key
from .base import DraftHead, StepResult
from .layers import DecoderLayer, LayerShape, Norm, Rotary, attend, causal_ranges, to_autocast


@dataclass(frozen=True)
class UnrollConfig:
    """The settings that all autoregressive heads share."""

    shape: LayerShape
    layers: int
    weights: tuple[float, ...]  # of the losses, by step
    loss: Loss
    rows: int  # rows of logits in memory at a time


class UnrolledKV:
    """Keys and values of one layer: the step-0 entries, which later rows see, then each row's own."""

    def __init__(self, ranges: tuple[Tensor, Tensor]) -> None:
        self.ranges = ranges  # begins and ends (`causal_ranges`)
        self.first: tuple[Tensor, Tensor] | None = None  # [B, L, G, D] each
        self.own: list[tuple[Tensor, Tensor]] = []  # by step, from step 1

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Add the entries of the next step and attend: [B, L, H, D] and [B, L, G, D] twice to [B, L, H * D]."""
        if self.first is None:
            self.first = keys, values
            return attend(query, AttentionRanges(keys, values, *self.ranges))
        self.own.append((keys, values))
        own_keys, own_values = (torch.stack(parts, 2) for parts in zip(*self.own, strict=True))  # [B, L, s, G, D]
        return attend(query, AttentionRanges(*self.first, *self.ranges, OwnKeys(own_keys, own_values)))


class CausalLayer(DecoderLayer):
    def forward(self, x: Tensor, attention_input: Tensor, positions: Tensor, rotary: Rotary, kv: UnrolledKV) -> Tensor:
        """Run the layer. x [B, L, E] f32; attention_input [B, L, inputs], normed. Returns [B, L, E] f32."""
        query = self.self_attn.queries(attention_input, positions, rotary)
        mixed = kv.attend(query, *self.self_attn.keys_values(attention_input, positions, rotary))
        x = x + self.self_attn.o_proj(mixed)
        inner: Tensor = self.mlp(to_autocast(self.post_attention_layernorm(x)))
        return x + inner


class AutoregressiveHead(DraftHead):
    embedding: Tensor  # [V, E]
    ids: Tensor | None  # [U]: the tokens that it can draft, rising; None: all. A buffer of this name is in saved states

    def __init__(
        self, target_info: TargetInfo, unroll: UnrollConfig, first: CausalLayer, positions: int, ids: Tensor | None
    ) -> None:
        super().__init__()
        shape = unroll.shape
        self.unroll, self.target = unroll, target_info.config
        # Draft heads in the engine read the embedding as it is stored, without the model's scale.
        scale = target_info.config.embedding_scale
        embedding = target_info.embedding
        self.register_buffer("embedding", embedding / scale if scale != 1 else embedding, persistent=False)
        self.register_buffer("ids", ids)
        self.layers = nn.ModuleList([first, *(CausalLayer(shape) for _ in range(unroll.layers - 1))])
        self.norm = Norm(shape.width, shape.eps)
        self.rotary = Rotary(shape.rope, shape.head_dim, positions)

    @property
    def draft_ids(self) -> Tensor | None:
        return self.ids

    @cached_property
    def _vocab_key(self) -> bytes:
        """Read first in `forward`, when a saved state has been loaded into `ids`."""
        return vocab_key(self.ids)

    @property
    @abstractmethod
    def token_norm(self) -> Norm: ...

    @property
    @abstractmethod
    def matrix(self) -> Tensor: ...  # [U, E], to the logits

    @abstractmethod
    def states(self, target_outputs: TargetOutputs) -> Tensor:
        """Return the target states that step 0 reads: [B, L, E] f32."""

    @abstractmethod
    def enter(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Join normed tokens and states [B, L, E]: the first layer's residual [B, L, E] f32 and its attention input."""

    def outputs(self, target_outputs: TargetOutputs) -> Iterator[Tensor]:
        """Yield for each step the state for lm_head and for the next step: [B, L, E] f32."""
        pack, length = target_outputs.pack, target_outputs.pack.tokens.shape[1]
        ahead = functional.pad(pack.tokens, (0, len(self.unroll.weights)))  # [B, L + S]
        tokens = to_autocast(self.token_norm(functional.embedding(ahead, self.embedding)))  # [B, L + S, E]
        ranges, last = causal_ranges(pack.documents), len(self.rotary.cos) - 1
        kvs = [UnrolledKV(ranges) for _ in self.layers]
        state = self.states(target_outputs)
        for step in range(1, 1 + len(self.unroll.weights)):
            positions = (pack.positions + step).clamp(max=last)  # beyond the last one no loss is computed
            x, attention_input = self.enter(tokens[:, step : step + length], state)
            for number, (layer, kv) in enumerate(zip(self.layers, kvs, strict=True)):
                assert isinstance(layer, CausalLayer)
                if number:
                    attention_input = to_autocast(layer.input_layernorm(x))
                x = layer(x, attention_input, positions, self.rotary, kv)
            state = self.norm(x)
            yield state

    def forward(self, target_outputs: TargetOutputs) -> StepResult:
        answers = AnswerTargets.of(target_outputs, self.ids, self._vocab_key)
        losses, counts = [], []
        first = torch.ones((), device=target_outputs.logits.device)
        for step, states in enumerate(self.outputs(target_outputs)):
            rows, exists = answers.rows(step)  # [R] each
            weights = (exists & (answers.argmax >= 0)).float()
            first = first if step else weights.sum().clamp(min=1)
            scores = score(
                [(states.flatten(0, 1).index_select(0, rows), self.matrix)],
                answers.logits,
                weights * self.unroll.weights[step],
                self.unroll.loss,
                answers.logsumexp,
                self.unroll.rows,
                answers.tokens - 1,
            )
            losses.append(scores.loss)
            correct = exists & (scores.argmax == answers.argmax)
            counts.append(torch.stack([exists.sum(), correct.sum(), (scores.overlap * exists).sum()]))
        counted, correct, overlap = torch.stack(counts, 1).float().detach()  # [S] each
        return StepResult(torch.stack(losses).sum() / first, counted, correct, overlap)


@dataclass(frozen=True)
class AnswerTargets:
    """The tokens that the target wrote, and its logits for them."""

    pack: Pack
    tokens: Tensor  # [R]: index of each token in the flattened pack
    logits: Tensor  # [B * L, U] f32: of the draft vocabulary; those of a token stand one position before it
    logsumexp: Tensor | None  # [R] f32: of all logits; None: U is the whole vocabulary
    argmax: Tensor  # [R]: a column of U; -1: the target's argmax is not in the draft vocabulary

    @staticmethod
    def of(target_outputs: TargetOutputs, ids: Tensor | None, key: bytes) -> AnswerTargets:
        written = target_outputs.pack.answered & (target_outputs.pack.documents >= 0)
        written[:, :2] = False  # no row predicts them
        tokens = written.flatten().nonzero().flatten()  # the only wait of the host for the device in a step
        vocab = target_outputs.logits_for(ids, key)
        logsumexp = None if vocab.logsumexp is None else vocab.logsumexp[tokens - 1]
        argmax = vocab.argmax[tokens - 1]
        if ids is not None:
            columns = ids.new_full((target_outputs.logits.shape[-1],), -1)  # [V]
            columns[ids] = torch.arange(len(ids), device=ids.device)
            argmax = columns[argmax]
        return AnswerTargets(target_outputs.pack, tokens, vocab.logits, logsumexp, argmax)

    def rows(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the rows that predict these tokens in a step [R], and whether each row exists in the document."""
        rows = self.tokens - 2 - step
        documents, column = self.pack.documents.flatten(), self.tokens % self.pack.tokens.shape[1]
        rows = rows.clamp(min=0)
        return rows, (column >= 2 + step) & (documents[rows] == documents[self.tokens])
