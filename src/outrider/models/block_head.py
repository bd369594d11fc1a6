"""Block heads, DFlash and DSpark: one pass over a block of mask tokens predicts all tokens of a draft.

Keys and values of the text are projected by each layer from the target's aux hidden states: the entry at position q
depends only on the target's states at q. Queries come from the block, the newest token followed by masks, which attend
to the text and to each other. DSpark adds a bias to each prediction that depends on the token before it (Markov head),
and estimates the probability that each token is accepted. Without these it is DFlash.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, Literal

import torch
from torch import Tensor

from ..kernels import AttentionWeights, Batch, Kernels, Weight
from ..kernels.quantization import BLOCK
from . import layers
from .config import ModelConfig
from .decoder import Model
from .heads import HeadCheckpoint, HeadLayers, HeadShape, LMHead, StorageT
from .layers import RopeTables, WeightReader

MARKOV = "model.markov_head."
CONFIDENCE = "model.confidence_head.proj."
MASK_EMBEDDING = "model.mask_embedding"


@dataclass(frozen=True, kw_only=True)
class BlockShape(HeadShape):
    """Differences between block heads."""

    layers: ModelConfig  # its own layers
    causal: tuple[bool, ...]  # by layer: tokens of a block do not attend to later ones of it
    anchored: bool  # sliding windows count back from the start of the block; else from each token
    block: int  # tokens of the trained block: the newest of the text, then masks
    mask: int  # the mask token
    from_anchor: bool  # each token of the block predicts the next one; else each mask predicts its own position
    spread_aux_layers: bool = False  # the checkpoint names no aux layers: use z-lab's choice, not the target's
    mask_embedding: bool = False  # the mask has its own embedding
    scaled_embedding: bool = False  # the target's embedding scale applies
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"  # how the bias depends on the token before
    markov_rank: int = 0  # 0: no bias
    markov_tokens: int = 0  # vocabulary of the token before
    confidence: bool = False  # estimates the probability that each token is accepted
    confidence_markov: bool = False  # the estimate also reads the token before

    @property
    def drafts(self) -> int:
        """Return the tokens that one pass predicts."""
        return self.block if self.from_anchor else self.block - 1

    def default_aux_layers(self, layers: int) -> tuple[int, ...] | None:
        return evenly_spaced_layers(self.num_aux_layers, layers) if self.spread_aux_layers else None


def evenly_spaced_layers(count: int, layers: int) -> tuple[int, ...]:
    """Return z-lab's default aux layers: evenly spaced, from the output of the second to that of the third last."""
    if count == 1:
        return (layers // 2 + 1,)
    return tuple(round(1 + index * (layers - 4) / (count - 1)) + 1 for index in range(count))


class MarkovBias:
    """The bias on a prediction by the token before it. M: its rank. U: tokens that the head can draft."""

    def __init__(self, reader: WeightReader, shape: BlockShape, ops: Kernels, drafted: int) -> None:
        self.ops, self.kind, self.rank = ops, shape.markov, shape.markov_rank
        self.table = ops.matrix(self._matrix(reader, "markov_w1.weight", shape.markov_tokens))
        self.matrix = ops.matrix(reader.counted(self._matrix(reader, "markov_w2.weight", drafted)))
        name, rows, columns = {
            "vanilla": ("", 0, 0),
            "gated": ("gate_proj", self.rank, shape.width + self.rank),
            "rnn": ("joint_proj", 3 * self.rank, shape.width + 2 * self.rank),
        }[shape.markov]
        self.joint = self.joint_bias = None
        if name:
            self.joint = ops.matrix(reader.counted(reader.stored(f"{MARKOV}{name}.weight", rows, columns)))
            self.joint_bias = reader.vector(f"{MARKOV}{name}.bias", rows)

    def _matrix(self, reader: WeightReader, name: str, rows: int) -> Weight:
        """Read a matrix, quantized if its rows are whole quantization blocks."""
        stored = reader.stored(MARKOV + name, rows, self.rank)
        return stored if self.rank % BLOCK else reader.quantized(stored, fine=True)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed the tokens before [R], as target ids: [R, M]."""
        return self.ops.embed(self.table, tokens, 1.0)

    def step(self, embedded: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the bias matrix, and the recurrent state of the block: [R, M] each."""
        if self.joint is None or self.joint_bias is None:
            return embedded, memory
        parts = [states, embedded] if self.kind == "gated" else [memory, embedded, states]
        joint = self.ops.linear(torch.cat(parts, 1), self.joint) + self.joint_bias
        if self.kind == "gated":
            return joint.sigmoid() * embedded, memory
        gate, fresh, out = joint.chunk(3, 1)  # [R, M] each
        gate = gate.sigmoid()
        return out.tanh(), gate * memory + (1 - gate) * fresh.tanh()


class BlockHead(Generic[StorageT]):
    """A DFlash or DSpark head; they differ in their BlockShape.

    Call `project_features` and `store` for tokens that the target has run, `run` for blocks, `scores` for all their
    states at once, then `begin`, and `bias` and `logits` for one token after the other.
    """

    def __init__(
        self, head: HeadCheckpoint, target: Model, pages: StorageT, context: int, quantize: str | None = None
    ) -> None:
        self.shape: BlockShape = head.shape
        shape = self.shape
        self.ops, self.pages, self.context = target.ops, pages, context
        self.width, self.eps = shape.width, shape.layers.eps
        self.features = shape.num_aux_layers * shape.target_width
        reader = WeightReader(head, self.ops, quantize)
        self.lm_head = LMHead(reader, shape, target, head.draft_ids)
        self.embedding_scale = target.embedding_scale if shape.scaled_embedding and not shape.own_embedding else 1.0
        self.fc = self.ops.matrix(reader.matrix("model.fc.weight", self.width, self.features))
        self.context_norm = reader.norm("model.hidden_norm.weight", self.width)
        self.norm = reader.norm("model.norm.weight", self.width)
        self.mask_embedding = reader.vector(MASK_EMBEDDING, self.width) if shape.mask_embedding else None
        drafted = shape.draft_vocabulary or target.config.vocabulary
        self.markov = MarkovBias(reader, shape, self.ops, drafted) if shape.markov_rank else None
        self._read_confidence(reader)
        rope_tables = RopeTables(shape.layers, self.ops, context)
        attentions = (self._attention(reader, layer, rope_tables) for layer in range(shape.layers.layers))
        self.layers = HeadLayers(shape.layers, reader, self.ops, pages, attentions)
        reader.finish(shape.layers)
        self.weight_bytes = reader.weight_bytes

    def _read_confidence(self, reader: WeightReader) -> None:
        shape = self.shape
        columns = shape.width + (shape.markov_rank if shape.confidence_markov else 0)
        self.confidence_matrix = self.confidence_bias = None
        if shape.confidence:
            self.confidence_matrix = self.ops.matrix(reader.counted(reader.stored(CONFIDENCE + "weight", 1, columns)))
            self.confidence_bias = reader.vector(CONFIDENCE + "bias", 1)

    def _attention(self, reader: WeightReader, layer: int, rope_tables: RopeTables) -> AttentionWeights:
        shape = self.shape
        weights = layers.attention(shape.layers, reader, layer, rope_tables)
        return replace(weights, causal=shape.causal[layer], anchored=shape.anchored and weights.window > 0)

    def project_features(self, features: Tensor) -> Tensor:
        """Convert the target's aux hidden states [T, features] to the states that every layer reads: [T, H]."""
        return self.ops.rms_norm(self.ops.linear(features, self.fc), self.context_norm, self.eps)

    def store(self, states: Tensor, batch: Batch) -> None:
        """Store the KV of states of `project_features` [T, H] at the slots and positions of `batch`."""
        for (attention, _), pages in zip(self.layers.pairs, self.pages.layers, strict=True):
            self.ops.project_kv(states, attention, batch, pages)

    def run(self, batch: Batch) -> Tensor:
        """Run blocks, whose rows are the newest token and masks; return states [T, H] after the last norm."""
        x = self.ops.embed(self.lm_head.embedding, batch.tokens, self.embedding_scale)  # [T, H]
        if self.mask_embedding is not None:
            x = torch.where((batch.tokens == self.shape.mask)[:, None], self.mask_embedding, x)
        self.layers.run(x, batch)
        return self.ops.rms_norm(x, self.norm, self.eps)

    def scores(self, states: Tensor) -> Tensor:
        """Return logits [R, U] of states [R, H] over the draft vocabulary, without the bias."""
        return self.lm_head.scale(self.ops.linear(states, self.lm_head.matrix))

    def begin(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the recurrent state of each block [R, M] before its first prediction.

        It comes from the block's first state [R, H] and token [R].
        """
        if self.markov is None:
            return states.new_zeros(len(states), 0)
        memory = states.new_zeros(len(states), self.markov.rank)
        # A first token that predicts nothing still updates the recurrent state.
        return memory if self.shape.from_anchor else self.bias(states, tokens, memory)[1]

    def bias(self, states: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the bias [R, U] that the tokens before [R] add to the scores, and the recurrent state [R, M]."""
        if self.markov is None:
            return None, memory
        inputs, memory = self.markov.step(self.markov.embed(tokens), states, memory)
        return self.ops.linear(inputs, self.markov.matrix), memory

    def logits(self, scores: Tensor) -> Tensor:
        """Scatter scores [R, U] to [R, V] f32, with -inf for tokens that the head cannot draft."""
        return self.lm_head.scatter(scores)

    def confidence(self, states: Tensor, tokens: Tensor) -> Tensor | None:
        """Estimate the probability that each token is accepted if those before it are: [R].

        states [R, H] and tokens [R]: the token's state, and the token before it.
        """
        if self.confidence_matrix is None or self.confidence_bias is None:
            return None
        if self.shape.confidence_markov:
            assert self.markov is not None
            states = torch.cat([states, self.markov.embed(tokens)], 1)
        return (self.ops.linear(states, self.confidence_matrix) + self.confidence_bias).sigmoid()[:, 0]
