"""Block heads, DFlash and DSpark: one pass over a block of masks guesses all its tokens at once.

The keys and values of the text come from the target's states, through each layer's own projections: the entry of
position q depends on the target's state at q alone. Queries come from the block: the newest token, then masks, which
see the text before them and each other. DSpark adds a bias by the token before to each guess, so that they agree with
one another, and says how likely each is kept. Without that bias it is DFlash.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, Literal

import torch
from torch import Tensor

from ..kernels import AttentionWeights, Batch, Kernels, Weight
from ..kernels.quantize import BLOCK
from . import layers
from .config import ModelConfig
from .heads import Ends, HeadCheckpoint, HeadLayers, HeadShape, StorageT
from .layers import Reader, Tables
from .llama import Model

MARKOV = "model.markov_head."
CONFIDENCE = "model.confidence_head.proj."
MASK_EMBEDDING = "model.mask_embedding"


@dataclass(frozen=True, kw_only=True)
class BlockShape(HeadShape):
    """In what heads differ that fill a block of masks."""

    layers: ModelConfig  # its own layers
    causal: tuple[bool, ...]  # by layer: in a block, a token sees none that come after it
    anchored: bool  # windows count back from where the block begins, for all of it; else from each token
    block: int  # tokens of the block that it was trained on: the newest of the text, then masks
    mask: int  # the mask token
    from_anchor: bool  # each token of the block guesses the one after it; else each mask the one in its place
    spread_taps: bool = False  # it does not say which states it reads: z-lab's choice, not the target's own
    mask_embedding: bool = False  # the mask has an embedding of its own
    scaled_embedding: bool = False  # the target's embedding is scaled as the target does it
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"  # how the token before counts
    markov_rank: int = 0  # 0: it does not count
    markov_tokens: int = 0  # tokens that may come before
    confidence: bool = False  # it says how likely each guess is kept
    confidence_markov: bool = False  # and reads the token before for it

    @property
    def drafts(self) -> int:
        """Tokens that one pass guesses."""
        return self.block if self.from_anchor else self.block - 1

    def usual_taps(self, layers: int) -> tuple[int, ...] | None:
        return spread(self.tap_count, layers) if self.spread_taps else None


def spread(count: int, layers: int) -> tuple[int, ...]:
    """The states that z-lab's heads read unless they say: leaving layers from the second to the third last."""
    if count == 1:
        return (layers // 2 + 1,)
    return tuple(round(1 + at * (layers - 4) / (count - 1)) + 1 for at in range(count))


class Markov:
    """The bias on a guess by the token before it. Letters: M its rank, U tokens that the head can draft."""

    def __init__(self, reader: Reader, shape: BlockShape, ops: Kernels, drafted: int) -> None:
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

    def _matrix(self, reader: Reader, name: str, rows: int) -> Weight:
        """Rows that are no whole blocks cannot be quantised."""
        stored = reader.stored(MARKOV + name, rows, self.rank)
        return stored if self.rank % BLOCK else reader.quantised(stored, fine=True)

    def embed(self, tokens: Tensor) -> Tensor:
        """The tokens before [R], in the target's ids: [R, M]."""
        return self.ops.embed(self.table, tokens, 1.0)

    def step(self, embedded: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What the bias is made of, and what is kept of the block so far: [R, M] each."""
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
    """DFlash and DSpark: they differ in their BlockShape alone. `absorb` and `store` for what the target has run, then
    `run` for blocks; `scores` of all their states at once; `begin`, and for one token after the other `bias` and
    `logits`.
    """

    def __init__(
        self, head: HeadCheckpoint, target: Model, pages: StorageT, context: int, quantize: str | None = None
    ) -> None:
        self.shape: BlockShape = head.shape
        shape = self.shape
        self.ops, self.pages, self.context = target.ops, pages, context
        self.width, self.eps = shape.width, shape.layers.eps
        self.features = shape.tap_count * shape.target_width
        reader = Reader(head, self.ops, quantize)
        self.ends = Ends(reader, shape, target, head.draft_ids)
        self.embedding_scale = target.embedding_scale if shape.scaled_embedding and not shape.own_embedding else 1.0
        self.fc = self.ops.matrix(reader.matrix("model.fc.weight", self.width, self.features))
        self.context_norm = reader.norm("model.hidden_norm.weight", self.width)
        self.norm = reader.norm("model.norm.weight", self.width)
        self.mask_embedding = reader.vector(MASK_EMBEDDING, self.width) if shape.mask_embedding else None
        drafted = shape.draft_vocabulary or target.config.vocabulary
        self.markov = Markov(reader, shape, self.ops, drafted) if shape.markov_rank else None
        self._read_confidence(reader)
        turning = Tables(shape.layers, self.ops, context)
        attentions = (self._attention(reader, layer, turning) for layer in range(shape.layers.layers))
        self.layers = HeadLayers(shape.layers, reader, self.ops, pages, attentions)
        reader.finish(shape.layers)
        self.weight_bytes = reader.weight_bytes

    def _read_confidence(self, reader: Reader) -> None:
        shape = self.shape
        columns = shape.width + (shape.markov_rank if shape.confidence_markov else 0)
        self.sure = self.sure_bias = None
        if shape.confidence:
            self.sure = self.ops.matrix(reader.counted(reader.stored(CONFIDENCE + "weight", 1, columns)))
            self.sure_bias = reader.vector(CONFIDENCE + "bias", 1)

    def _attention(self, reader: Reader, layer: int, turning: Tables) -> AttentionWeights:
        shape = self.shape
        weights = layers.attention(shape.layers, reader, layer, turning)
        return replace(weights, causal=shape.causal[layer], anchored=shape.anchored and weights.window > 0)

    def absorb(self, features: Tensor) -> Tensor:
        """The target's tapped states, side by side [T, features], as every layer reads them: [T, H]."""
        return self.ops.rms_norm(self.ops.linear(features, self.fc), self.context_norm, self.eps)

    def store(self, states: Tensor, batch: Batch) -> None:
        """Keys and values of what `absorb` gave [T, H], in the slots and turned by the positions of `batch`."""
        for (attention, _), pages in zip(self.layers.pairs, self.pages.layers, strict=True):
            self.ops.project_kv(states, attention, batch, pages)

    def run(self, batch: Batch) -> Tensor:
        """States [T, H], after the last norm, of blocks: a row is the newest token of a text, then masks."""
        x = self.ops.embed(self.ends.embedding, batch.tokens, self.embedding_scale)  # [T, H]
        if self.mask_embedding is not None:
            x = torch.where((batch.tokens == self.shape.mask)[:, None], self.mask_embedding, x)
        self.layers.run(x, batch)
        return self.ops.rms_norm(x, self.norm, self.eps)

    def scores(self, states: Tensor) -> Tensor:
        """Logits of the tokens that it can draft, whatever the token before: [R, H] to [R, U]."""
        return self.ends.scale(self.ops.linear(states, self.ends.matrix))

    def begin(self, states: Tensor, tokens: Tensor) -> Tensor:
        """What is kept of each block [R, M] before its first guess, from its first state [R, H] and its token [R]."""
        if self.markov is None:
            return states.new_zeros(len(states), 0)
        memory = states.new_zeros(len(states), self.markov.rank)
        # A first token that guesses nothing is read all the same.
        return memory if self.shape.from_anchor else self.bias(states, tokens, memory)[1]

    def bias(self, states: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor | None, Tensor]:
        """What the tokens before [R] add to the scores of `states` [R, H]: [R, U], and what is kept [R, M]."""
        if self.markov is None:
            return None, memory
        found, memory = self.markov.step(self.markov.embed(tokens), states, memory)
        return self.ops.linear(found, self.markov.matrix), memory

    def logits(self, scores: Tensor) -> Tensor:
        """[R, U] to [R, V] f32; -inf for tokens that it cannot draft."""
        return self.ends.spread(scores)

    def confidence(self, states: Tensor, tokens: Tensor) -> Tensor | None:
        """How likely each guess is kept if those before it are [R], of its state [R, H] and the token before it [R]."""
        if self.sure is None or self.sure_bias is None:
            return None
        if self.shape.confidence_markov:
            assert self.markov is not None
            states = torch.cat([states, self.markov.embed(tokens)], 1)
        return (self.ops.linear(states, self.sure) + self.sure_bias).sigmoid()[:, 0]
