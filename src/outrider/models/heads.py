"""Draft heads: a layer or two that read the target's states beside the tokens, and guess what comes next.

The entry at position q joins token q with the state that the target had at position q - 1, and guesses token q + 1.
There is no entry at position 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from ..kernels import AttentionWeights, Batch, Kernels, LayerPages
from . import layers
from .config import ModelConfig
from .layers import Checkpoint, Reader, Tables
from .llama import Model

FIRST = "model.layers.0."


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """What is to be known of a head of any kind, as data. E: the target's width; H: the head's own."""

    kind: str  # the method that it is for
    layout: str  # who writes such folders
    width: int  # H
    target_width: int  # E
    taps: tuple[int, ...] | None  # states that it reads: entering layer i of the target; None: not said
    tap_count: int
    target_norm: bool  # the state is the target's last one, after its last norm
    own_embedding: int  # rows of its own embedding; 0: it shares the target's
    own_head: bool  # else it shares the target's
    logit_scale: float
    draft_vocabulary: int | None = None  # tokens that it can draft; None: all of the target's
    target_layers: int | None = None  # layers of the model that it was made for; None: not said

    def usual_taps(self, layers: int) -> tuple[int, ...] | None:
        """What such heads read of a target with so many layers unless they say; None: the model's default."""
        return None


@dataclass(frozen=True, kw_only=True)
class EagleShape(HeadShape):
    """In what heads differ that read token and state and draft one token after the other."""

    layers: ModelConfig  # its own layers
    joins: Literal["before", "inside"]  # token and state meet in a matrix before the layers, or in the first attention
    fc: bool  # a matrix comes first: over [token, state] before the layers, else over the tapped states
    fc_bias: bool
    norm_before_fc: bool = False  # one norm over all tapped states
    fc_norm: bool = False  # one norm for each of them
    norm_before_residual: bool = False  # the first layer adds to the normed state
    norm_first: bool = False  # heads that join before: the first layer has a norm before its attention
    norm_last: bool = False  # a norm before the logits
    norm_output: bool = False  # that norm is also on the state that the head reads with the token that it drafts
    norm_inputs: bool = False  # heads that join before: token and state have a norm each
    state_first: bool = False  # heads that join before: [state, token] instead of [token, state]
    blank_first: bool = False  # the first entry reads zeros in place of its token
    mask: int | None = None  # all tokens are drafted in one pass, over this one; None: one after the other


@dataclass(frozen=True, kw_only=True)
class ModuleShape(EagleShape):
    """Modules of multi-token prediction, all alike: the rest of the shape is that of each."""

    modules: int  # 1: it serves every token of a draft; more: one for each
    offset_norms: bool = False  # norm weights are stored minus 1


class HeadCheckpoint(Checkpoint, Protocol):
    """A checkpoint of a head: tensors under one set of names, those of a decoder where there are such."""

    @property
    def shape(self) -> Any: ...  # a HeadShape of its kind

    @property
    def draft_ids(self) -> Tensor | None: ...  # [draft vocabulary] int64: the target's ids; None: all


class Storage(Protocol):
    layers: list[LayerPages]


StorageT = TypeVar("StorageT", bound=Storage)


class Words:
    """The tokens that a head can draft, among the target's. Letter U: how many."""

    def __init__(self, shape: HeadShape, target: Model, ids: Tensor | None) -> None:
        self.shape, self.vocabulary = shape, target.config.vocabulary
        self.ids = ids if ids is None else ids.to(target.norm.device)  # [U]

    def rows_of(self, target: Model) -> object:
        """What of the target's head is theirs."""
        return target.head if self.ids is None else target.head_rows(self.ids)

    def scale(self, found: Tensor) -> Tensor:
        """What a matrix to the tokens that can be drafted gave [R, U] as their logits."""
        return found if self.shape.logit_scale == 1 else found * self.shape.logit_scale

    def spread(self, logits: Tensor) -> Tensor:
        """[R, U] to [R, V] f32; -inf for tokens that cannot be drafted."""
        if self.ids is None:
            return logits
        whole = logits.new_full((len(logits), self.vocabulary), -torch.inf)  # [R, V]
        whole[:, self.ids] = logits
        return whole


class Ends(Words):
    """Where a head begins and ends: embedding and matrix to the vocabulary, its own where it has them."""

    def __init__(self, reader: Reader, shape: HeadShape, target: Model, ids: Tensor | None) -> None:
        super().__init__(shape, target, ids)
        self.embedding = target.embedding
        if shape.own_embedding:
            table = reader.stored("model.embed_tokens.weight", shape.own_embedding, shape.width)
            self.embedding = target.ops.matrix(reader.quantised(table, fine=True))
        if shape.own_head:
            rows = shape.draft_vocabulary or self.vocabulary
            self.matrix = target.ops.matrix(reader.matrix("lm_head.weight", rows, shape.width, fine=True))
        else:
            self.matrix = self.rows_of(target)


class HeadLayers(Generic[StorageT]):
    """A head's own layers, over storage of their own. Those before `begin` are for the head itself to run."""

    def __init__(
        self,
        config: ModelConfig,
        reader: Reader,
        ops: Kernels,
        pages: StorageT,
        attentions: Iterable[AttentionWeights],
        begin: int = 0,
    ) -> None:
        self.ops, self.pages, self.begin = ops, pages, begin
        self.pairs = [
            (ops.attention_layer(attention), ops.mlp_layer(layers.mlp(config, reader, layer)))
            for layer, attention in enumerate(attentions)
        ]
        self._kept: tuple[Sequence[LayerPages], object] | None = None

    def run(self, x: Tensor, batch: Batch) -> None:
        """x [T, H] through the layers from `begin` on."""
        pages, begin = self.pages.layers, self.begin
        if begin == len(self.pairs):
            return
        if self._kept is None or self._kept[0] is not pages:  # they are there once the engine runs, and stay
            self._kept = pages, self.ops.layer_stack(self.pairs[begin:], pages[begin:])
        self.ops.run_layers(x, self._kept[1], batch)


class EagleHead(Generic[StorageT]):
    """EAGLE of every version: they differ in their EagleShape alone. Letter U: tokens that the head can draft."""

    def __init__(
        self,
        head: HeadCheckpoint,
        target: Model,
        pages: StorageT,
        context: int,
        quantize: str | None = None,
        first: int = 1,
    ) -> None:
        """first: the position of its first entry."""
        self.shape: EagleShape = head.shape
        shape = self.shape
        self.ops, self.pages, self.context, self.first = target.ops, pages, context, first
        self.device = target.norm.device
        self.parallel, self.mask = shape.mask is not None, -1 if shape.mask is None else shape.mask
        self.width, self.eps, self.vocabulary = shape.layers.width, shape.layers.eps, target.config.vocabulary
        self.features = shape.tap_count * shape.target_width
        reader = Reader(head, self.ops, quantize)
        self.ends = Ends(reader, shape, target, head.draft_ids)
        self._read_norms(reader, target)
        columns = self.width + shape.target_width if shape.joins == "before" else self.features
        self.fc = self.ops.matrix(reader.matrix("model.fc.weight", self.width, columns)) if shape.fc else None
        self.fc_bias = reader.vector("model.fc.bias", self.width) if shape.fc_bias else None
        turning = Tables(shape.layers, self.ops, context)
        attentions = (self._attention(reader, layer, turning) for layer in range(shape.layers.layers))
        self.layers = HeadLayers(shape.layers, reader, self.ops, pages, attentions, int(shape.joins == "inside"))
        self.beside_mask = self._beside_mask(reader) if self.parallel else None
        reader.finish(shape.layers)
        self.weight_bytes = reader.weight_bytes

    def _read_norms(self, reader: Reader, target: Model) -> None:
        shape, width, inside = self.shape, self.width, self.shape.joins == "inside"
        self.target_norm = (target.norm, target.config.eps) if shape.target_norm else None
        self.fc_norms: list[Tensor] = []  # over the tapped states: one for all, or one for each
        if shape.norm_before_fc:
            self.fc_norms = [reader.norm("model.input_norm.weight", self.features)]
        elif shape.fc_norm:
            names = [f"model.fc_norm.{tap}.weight" for tap in range(shape.tap_count)]
            self.fc_norms = [reader.norm(name, shape.target_width) for name in names]
        token, state = ("input_layernorm", "hidden_norm") if inside else ("token_norm", "state_norm")
        self.token_norm = self.state_norm = None
        if inside or shape.norm_inputs:
            prefix = FIRST if inside else "model."
            self.token_norm = reader.norm(f"{prefix}{token}.weight", width)
            self.state_norm = reader.norm(f"{prefix}{state}.weight", width)
        self.norm = reader.norm("model.norm.weight", width) if shape.norm_last else None

    def _beside_mask(self, reader: Reader) -> Tensor:
        """The learned state that stands where the target has none yet, as an entry reads it: [1, H]."""
        state = reader.stored("mask_hidden", 1, 1, self.features).data.view(1, -1)
        return self._fuse(state.to(self.device, torch.float32, copy=True))

    def _attention(self, reader: Reader, layer: int, turning: Tables) -> AttentionWeights:
        shape = self.shape
        doubled = layer == 0 and shape.joins == "inside"
        inputs = 2 * self.width if doubled else self.width
        normed = layer > 0 or (shape.joins == "before" and shape.norm_first)
        weights = layers.attention(shape.layers, reader, layer, turning, inputs=inputs, normed=normed)
        return replace(weights, skip=self.first)

    def absorb(self, features: Tensor) -> Tensor:
        """The target's tapped states, side by side [T, features], as the state that an entry reads: [T, H]."""
        if self.target_norm is not None:
            features = self.ops.rms_norm(features, *self.target_norm)
        return self._fuse(features)

    def _fuse(self, features: Tensor) -> Tensor:
        if self.fc_norms:
            parts = features.chunk(len(self.fc_norms), 1)
            normed = [
                self.ops.rms_norm(part.contiguous(), norm, self.eps)
                for part, norm in zip(parts, self.fc_norms, strict=True)
            ]
            features = torch.cat(normed, 1)
        return self._through_fc(features) if self.shape.joins == "inside" else features

    def run(self, batch: Batch, features: Tensor | None) -> Tensor:
        """Tokens, and the states [T, H] of `absorb` or `feedback` beside them, to states [T, H]; keys are stored."""
        assert features is not None
        token, state = self.ops.embed(self.ends.embedding, batch.tokens, 1.0), features  # [T, H] each
        if self.shape.blank_first:
            token = torch.where(batch.positions[:, None] == self.first, 0.0, token)
        if self.token_norm is not None and self.state_norm is not None:
            token = self.ops.rms_norm(token, self.token_norm, self.eps)
            state = self.ops.rms_norm(state, self.state_norm, self.eps)
        if self.shape.joins == "before":
            x = self._through_fc(torch.cat([state, token] if self.shape.state_first else [token, state], 1))  # [T, H]
            self.layers.run(x, batch)
            return x
        x = state.clone() if self.shape.norm_before_residual else features.clone()
        (attention, mlp), pages = self.layers.pairs[0], self.pages.layers[0]
        queries = self.ops.project_qkv(torch.cat([token, state], 1), attention, batch, pages)
        self.ops.attend(queries, attention, batch, pages, x)
        self.ops.mlp(x, mlp)
        self.layers.run(x, batch)
        return x

    def logits(self, states: Tensor) -> Tensor:
        """[R, H] to [R, V] f32; -inf for tokens that the head cannot draft."""
        return self.ends.spread(self.scores(states))

    def scores(self, states: Tensor) -> Tensor:
        """[R, H] to [R, U] f32."""
        if self.norm is None:
            found = self.ops.linear(states, self.ends.matrix)  # [R, U]
        else:
            found = self.ops.norm_linear(states, self.norm, self.eps, self.ends.matrix)
        return self.ends.scale(found)

    @property
    def ids(self) -> Tensor | None:
        return self.ends.ids

    def feedback(self, states: Tensor) -> Tensor:
        """What an entry reads beside the token that was drafted from `states` [R, H], in place of the target's."""
        if self.norm is None or not self.shape.norm_output:
            return states
        return self.ops.rms_norm(states, self.norm, self.eps)

    def _through_fc(self, x: Tensor) -> Tensor:
        if self.fc is None:
            return x
        found = self.ops.linear(x, self.fc)  # [T, H]
        return found if self.fc_bias is None else found.add_(self.fc_bias)
