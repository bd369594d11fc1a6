"""Draft heads: a layer or two that read the target's states beside the tokens, and guess what comes next.

The entry at position q joins token q with the state that the target had at position q - 1, and guesses token q + 1.
There is no entry at position 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from ..kernels import AttentionWeights, Batch, LayerPages
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


class HeadCheckpoint(Checkpoint, Protocol):
    """A checkpoint of a head: tensors under one set of names, those of a decoder where there are such."""

    @property
    def shape(self) -> Any: ...  # a HeadShape of its kind

    @property
    def draft_ids(self) -> Tensor | None: ...  # [draft vocabulary] int64: the target's ids; None: all


class Storage(Protocol):
    layers: list[LayerPages]


StorageT = TypeVar("StorageT", bound=Storage)


class EagleHead(Generic[StorageT]):
    """EAGLE of every version: they differ in their EagleShape alone. Letter U: tokens that the head can draft."""

    parallel = False
    mask = -1

    def __init__(
        self, head: HeadCheckpoint, target: Model, pages: StorageT, context: int, quantize: str | None = None
    ) -> None:
        self.shape: EagleShape = head.shape
        shape = self.shape
        self.ops, self.pages, self.context = target.ops, pages, context
        self.width, self.eps, self.vocabulary = shape.layers.width, shape.layers.eps, target.config.vocabulary
        self.features = shape.tap_count * shape.target_width
        reader = Reader(head, quantize)
        self._read_ends(reader, target, head.draft_ids)
        self._read_norms(reader, target)
        columns = self.width + shape.target_width if shape.joins == "before" else self.features
        self.fc = self.ops.matrix(reader.matrix("model.fc.weight", self.width, columns)) if shape.fc else None
        self.fc_bias = reader.vector("model.fc.bias", self.width) if shape.fc_bias else None
        turning = Tables(shape.layers, context, None)
        self.layers = []
        for layer in range(shape.layers.layers):
            attention = self.ops.attention_layer(self._attention(reader, layer, turning))
            self.layers.append((attention, self.ops.mlp_layer(layers.mlp(shape.layers, reader, layer))))
        self._kept: tuple[Sequence[LayerPages], object] | None = None
        reader.finish(shape.layers)
        self.weight_bytes = reader.weight_bytes

    def _read_ends(self, reader: Reader, target: Model, ids: Tensor | None) -> None:
        """Embedding and head, the head's own where it has them. Both keep 8 bits when the rest has 4."""
        shape, kept = self.shape, "int8" if reader.quantize else None
        self.embedding, self.head = target.embedding, target.head
        if shape.own_embedding:
            table = reader.matrix("model.embed_tokens.weight", shape.own_embedding, self.width, quantize=kept)
            self.embedding = self.ops.matrix(table)
            reader.weight_bytes -= table.data.nbytes  # a step reads a few rows of it, not all
        if shape.own_head:
            rows = shape.draft_vocabulary or self.vocabulary
            self.head = self.ops.matrix(reader.matrix("lm_head.weight", rows, self.width, quantize=kept))
        self.ids = ids if ids is None else ids.to(target.norm.device)  # [U]

    def _read_norms(self, reader: Reader, target: Model) -> None:
        shape, width, inside = self.shape, self.width, self.shape.joins == "inside"
        self.target_norm = (target.norm, target.config.eps) if shape.target_norm else None
        self.fc_norms: list[Tensor] = []  # over the tapped states: one for all, or one for each
        if shape.norm_before_fc:
            self.fc_norms = [reader.norm("model.input_norm.weight", self.features)]
        elif shape.fc_norm:
            names = [f"model.fc_norm.{tap}.weight" for tap in range(shape.tap_count)]
            self.fc_norms = [reader.norm(name, shape.target_width) for name in names]
        self.token_norm = reader.norm(FIRST + "input_layernorm.weight", width) if inside else None
        self.state_norm = reader.norm(FIRST + "hidden_norm.weight", width) if inside else None
        self.norm = reader.norm("model.norm.weight", width) if shape.norm_last else None

    def _attention(self, reader: Reader, layer: int, turning: Tables) -> AttentionWeights:
        shape = self.shape
        doubled = layer == 0 and shape.joins == "inside"
        inputs = 2 * self.width if doubled else self.width
        normed = layer > 0 or (shape.joins == "before" and shape.norm_first)
        weights = layers.attention(shape.layers, reader, layer, turning, inputs=inputs, normed=normed)
        return replace(weights, skip=1)

    def absorb(self, features: Tensor) -> Tensor:
        """The target's tapped states, side by side [T, features], as the state that an entry reads: [T, H]."""
        if self.target_norm is not None:
            features = self.ops.rms_norm(features, *self.target_norm)
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
        token = self.ops.embed(self.embedding, batch.tokens, 1.0)  # [T, H]
        if self.shape.joins == "before":
            x = self._through_fc(torch.cat([token, features], 1))  # [T, H]
            self.ops.run_stack(x, self._stack(0), batch)
            return x
        assert self.token_norm is not None and self.state_norm is not None
        token = self.ops.rms_norm(token, self.token_norm, self.eps)
        state = self.ops.rms_norm(features, self.state_norm, self.eps)  # [T, H]
        x = state.clone() if self.shape.norm_before_residual else features.clone()
        (attention, mlp), pages = self.layers[0], self.pages.layers[0]
        queries = self.ops.project_qkv(torch.cat([token, state], 1), attention, batch, pages)
        self.ops.attend(queries, attention, batch, pages, x)
        self.ops.mlp(x, mlp)
        if len(self.layers) > 1:
            self.ops.run_stack(x, self._stack(1), batch)
        return x

    def logits(self, states: Tensor) -> Tensor:
        """[R, H] to [R, V] f32; -inf for tokens that the head cannot draft."""
        if self.norm is None:
            found = self.ops.linear(states, self.head)  # [R, U or V]
        else:
            found = self.ops.norm_linear(states, self.norm, self.eps, self.head)
        if self.shape.logit_scale != 1:
            found = found * self.shape.logit_scale
        if self.ids is None:
            return found
        spread = found.new_full((found.shape[0], self.vocabulary), -torch.inf)  # [R, V]
        spread[:, self.ids] = found if self.shape.own_head else found[:, self.ids]
        return spread

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

    def _stack(self, begin: int) -> object:
        """Layers from `begin` on over their storage, which stays for the life of an engine."""
        pages = self.pages.layers
        if self._kept is None or self._kept[0] is not pages:
            self._kept = pages, self.ops.stack(self.layers[begin:], pages[begin:])
        return self._kept[1]
