"""From the tensors of a checkpoint to the layers of a backend, one matrix at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..errors import UserError
from ..kernels import AttentionWeights, Kernels, MlpWeights, Weight
from ..kernels.quantize import quantise
from .config import ModelConfig
from .rope import Rope, tables

FLOATS = ("f32", "f16", "bf16")
NEEDLESS = "rotary_emb.inv_freq"
# A module of multi-token prediction, as DeepSeek, Qwen and MiMo name the matrix that begins it: it is a drafter's.
MODULE = re.compile(
    r"^(model\.layers\.\d+\.(?=eh_proj\.)|(?:model\.)?mtp\.(?=fc\.)|model\.mtp_layers\.(?=\d+\.input_proj\.))"
)
ROPE_FACTORS = "rope_freqs.weight"  # GGUF stores Llama-3 scaling as a tensor instead of a rule


class Checkpoint(Protocol):
    """What a model needs of a file: tensors under their Hugging Face names, whatever the format."""

    @property
    def config(self) -> dict[str, object]: ...  # as in config.json

    @property
    def norms_are_offset(self) -> bool: ...  # norm weights are stored minus 1

    def names(self) -> Iterable[str]: ...

    def weight(self, name: str) -> Weight: ...

    def release(self) -> None: ...  # what was read so far is packed: its memory may go


class Reader:
    """Reads each tensor once, checks its shape, and knows in the end which were never asked for."""

    def __init__(self, checkpoint: Checkpoint, ops: Kernels, quantize: str | None) -> None:
        self.checkpoint, self.ops, self.quantize = checkpoint, ops, quantize
        self.unread = set(checkpoint.names())
        self.weight_bytes = 0  # of the matrices so far that every step reads, as they are handed to the backend

    def has(self, name: str) -> bool:
        return name in self.unread

    def stored(self, name: str, *shape: int) -> Weight:
        """The tensor as the file has it."""
        if name not in self.unread:
            raise UserError(f"the checkpoint lacks the tensor `{name}` of shape {list(shape)}: fetch the model again")
        self.unread.discard(name)
        weight = self.checkpoint.weight(name)
        if tuple(weight.shape) != shape:
            raise UserError(
                f"the tensor `{name}` has the shape {list(weight.shape)}, but the configuration asks for "
                f"{list(shape)}: config and weights are not of the same model"
            )
        return weight

    def matrix(self, name: str, *shape: int, fine: bool = False) -> Weight:
        """A matrix that every step reads, quantised on the way if that was asked for."""
        return self.counted(self.quantised(self.stored(name, *shape), fine))

    def quantised(self, weight: Weight, fine: bool) -> Weight:
        """A matrix as it was asked for. A `fine` one keeps 8 bits when the rest has fewer."""
        if self.quantize is None or weight.kind not in FLOATS:
            return weight
        return quantise(weight, "int8" if fine else self.quantize)

    def counted(self, weight: Weight) -> Weight:
        """The same, which every step reads. Of tables a step reads a few rows, so they do not count."""
        self.weight_bytes += weight.data.nbytes
        return weight

    def vector(self, name: str, length: int) -> Tensor:
        """[length] f32, a copy: nothing small keeps the file mapped."""
        weight = self.stored(name, length)
        if weight.kind not in FLOATS:
            raise UserError(f"the tensor `{name}` is quantised as `{weight.kind}`: vectors must be floats")
        return self.ops.vector(weight.data.to(torch.float32, copy=True))

    def norm(self, name: str, length: int) -> Tensor:
        weight = self.vector(name, length)
        return weight + 1 if self.checkpoint.norms_are_offset else weight

    def finish(self, config: ModelConfig) -> None:
        """Refuse tensors that the model has no place for: its output would be wrong without them."""
        if config.tied_head:
            self.unread.discard("lm_head.weight")
        modules = {found[1] for name in self.unread if (found := MODULE.match(name))}
        known = [name for name in self.unread if name.startswith(tuple(modules)) or name.endswith(NEEDLESS)]
        strangers = sorted(self.unread.difference(known))
        if strangers:
            shape = list(self.checkpoint.weight(strangers[0]).shape)
            more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
            raise UserError(
                f"the checkpoint holds the tensor `{strangers[0]}` of shape {shape}{more}, which a "
                f"`{config.architecture}` model of this configuration does not have: check config.json"
            )


class Tables:
    """Rotary tables, made once for all layers that turn alike."""

    def __init__(self, config: ModelConfig, ops: Kernels, positions: int, factors: Tensor | None = None) -> None:
        self.config, self.ops, self.positions = config, ops, positions
        self.factors = factors  # [D / 2]
        self.made: dict[Rope, tuple[Tensor, Tensor]] = {}

    def of(self, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Cosines and sines, [positions, D / 2] each."""
        rope = self.config.ropes[layer]
        if rope is None:
            return None, None
        if rope not in self.made:
            cos, sin = tables(rope, self.config.head_dim, self.positions, self.factors)
            self.made[rope] = self.ops.vector(cos), self.ops.vector(sin)
        return self.made[rope]


def attention(
    config: ModelConfig, reader: Reader, layer: int, turning: Tables, inputs: int | None = None, normed: bool = True
) -> AttentionWeights:
    """One block. Draft heads may read `inputs` floats instead of the width, and without a norm."""
    prefix = f"model.layers.{layer}."
    own = prefix + "self_attn."
    width, head = config.width, config.head_dim
    inputs = inputs or width
    queries, keys = config.heads * head, config.kv_heads * head
    query = reader.matrix(own + "q_proj.weight", queries, inputs)  # refused before tables of a width that is a lie
    cos, sin = turning.of(layer)
    weights = AttentionWeights(
        query=query,
        key=reader.matrix(own + "k_proj.weight", keys, inputs),
        value=reader.matrix(own + "v_proj.weight", keys, inputs),
        output=reader.matrix(own + "o_proj.weight", width, queries),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=head,
        scale=config.attention_scale,
        eps=config.eps,
        window=config.windows[layer],
        norm=reader.norm(prefix + "input_layernorm.weight", width) if normed else None,
        cos=cos,
        sin=sin,
    )
    if config.sandwich_norms:
        weights = replace(weights, post_norm=reader.norm(prefix + "post_attention_layernorm.weight", width))
    if config.head_norms:
        weights = replace(
            weights,
            query_norm=reader.norm(own + "q_norm.weight", head),
            key_norm=reader.norm(own + "k_norm.weight", head),
        )
    if config.qkv_bias:
        weights = replace(
            weights,
            query_bias=reader.vector(own + "q_proj.bias", queries),
            key_bias=reader.vector(own + "k_proj.bias", keys),
            value_bias=reader.vector(own + "v_proj.bias", keys),
        )
    if config.output_bias:
        weights = replace(weights, output_bias=reader.vector(own + "o_proj.bias", width))
    return weights


def mlp(config: ModelConfig, reader: Reader, layer: int) -> MlpWeights:
    prefix = f"model.layers.{layer}."
    own = prefix + "mlp."
    width, inner = config.width, config.mlp_width
    # With norms on both sides, the name that Llama gives to the norm before the MLP means the one after attention.
    before = "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"
    weights = MlpWeights(
        gate=reader.matrix(own + "gate_proj.weight", inner, width),
        up=reader.matrix(own + "up_proj.weight", inner, width),
        down=reader.matrix(own + "down_proj.weight", width, inner),
        activation=config.activation,
        eps=config.eps,
        norm=reader.norm(f"{prefix}{before}.weight", width),
    )
    if config.sandwich_norms:
        weights = replace(weights, post_norm=reader.norm(prefix + "post_feedforward_layernorm.weight", width))
    if config.mlp_bias:
        weights = replace(
            weights,
            gate_bias=reader.vector(own + "gate_proj.bias", inner),
            up_bias=reader.vector(own + "up_proj.bias", inner),
            down_bias=reader.vector(own + "down_proj.bias", width),
        )
    return weights


def rope_factors(config: ModelConfig, reader: Reader) -> Tensor | None:
    """[D / 2], where the checkpoint has them."""
    return reader.stored(ROPE_FACTORS, config.head_dim // 2).data.float() if reader.has(ROPE_FACTORS) else None


def ends(config: ModelConfig, reader: Reader, ops: Kernels) -> tuple[object, object, torch.dtype, str]:
    """Embedding and head, one matrix where they are tied; the dtype that the embedding was stored in, the head's kind.

    Both are fine: an error in the head moves every logit.
    """
    shape = (config.vocabulary, config.width)
    table = reader.stored("model.embed_tokens.weight", *shape)
    stored = table.data.dtype
    table = reader.quantised(table, fine=True)
    embedding = ops.matrix(table)
    if config.tied_head:
        return embedding, embedding, stored, reader.counted(table).kind
    head = reader.matrix("lm_head.weight", *shape, fine=True)
    return embedding, ops.matrix(head), stored, head.kind
