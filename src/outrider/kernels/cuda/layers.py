"""Layers: fused QKV projections, rope and KV storage, paged attention, gated MLPs, stacks of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..structures import Activation, AttentionWeights, Batch, LayerPages, MlpWeights
from .device import DEVICE, on_device
from .matmul import gated_matmul, matmul
from .matrices import Matrix, matrix, pack, rows
from .paged_attention import Heads, paged_attention
from .pointwise import add_normed
from .rope import RopeWeights, rotate_and_store

# Up to this many tokens beyond one per row, one kernel applies rope, stores KV and attends: each tile rotates all new
# keys of its row.
SURPLUS = 60


@dataclass(frozen=True)
class AttentionLayer:
    heads: Heads
    rope: RopeWeights
    eps: float
    qkv: Matrix  # [(H + 2 * G) * D, E]
    kv: Matrix  # its last 2 * G * D rows
    output: Matrix  # [E, H * D]
    norm: Tensor | None  # [E] f32
    post_norm: Tensor | None  # [E] f32
    bias: Tensor | None  # [(H + 2 * G) * D] f32
    kv_bias: Tensor | None  # its last 2 * G * D numbers
    output_bias: Tensor | None  # [E] f32


def attention_layer(weights: AttentionWeights, batch_invariant: bool = False) -> AttentionLayer:
    queries = weights.heads * weights.head_dim
    qkv = pack([weights.query, weights.key, weights.value], batch_invariant)
    bias = _biases(weights)
    return AttentionLayer(
        heads=Heads(
            weights.heads,
            weights.kv_heads,
            weights.head_dim,
            weights.scale,
            weights.window,
            weights.skip,
            weights.causal,
            weights.anchored,
            batch_invariant,
        ),
        rope=RopeWeights(
            weights.eps,
            on_device(weights.query_norm),
            on_device(weights.key_norm),
            on_device(weights.cos),
            on_device(weights.sin),
        ),
        eps=weights.eps,
        qkv=qkv,
        kv=rows(qkv, queries, qkv.shape[0]),
        output=matrix(weights.output, batch_invariant=batch_invariant),
        norm=on_device(weights.norm),
        post_norm=on_device(weights.post_norm),
        bias=bias,
        kv_bias=None if bias is None else bias[queries:],
        output_bias=on_device(weights.output_bias),
    )


def project_qkv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> Tensor:
    projected = matmul(x, layer.qkv, norm=layer.norm, eps=layer.eps, bias=layer.bias)  # [T, (H + 2 * G) * D]
    return rotate_and_store(projected, layer.heads.count, layer.rope, batch, pages)


def project_kv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> None:
    projected = matmul(x, layer.kv, bias=layer.kv_bias)  # [T, 2 * G * D]
    rotate_and_store(projected, 0, layer.rope, batch, pages)


def attention(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> None:
    """Run `project_qkv` and `attend`, fused for short causal chains."""
    projected = matmul(x, layer.qkv, norm=layer.norm, eps=layer.eps, bias=layer.bias)  # [T, (H + 2 * G) * D]
    if _fusable(layer, batch):
        mixed = paged_attention(projected, layer.heads, batch, pages, layer.output.compute, layer.rope)  # [T, H * D]
        _add_output(mixed, layer, x)
    else:
        attend(rotate_and_store(projected, layer.heads.count, layer.rope, batch, pages), layer, batch, pages, x)


def attend(q: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages, x: Tensor) -> None:
    mixed = paged_attention(q, layer.heads, batch, pages, layer.output.compute)  # [T, H * D], as it is multiplied
    _add_output(mixed, layer, x)


def _fusable(layer: AttentionLayer, batch: Batch) -> bool:
    """Return whether each program can rotate all new keys that it attends to: causal chains with few tokens."""
    heads, rope = layer.heads, layer.rope
    chains = batch.parents is None and heads.causal and not heads.anchored
    bare = rope.cos is not None and rope.query_norm is None and rope.key_norm is None
    return chains and bare and batch.positions.shape[0] <= batch.page_tables.shape[0] + SURPLUS


def _add_output(mixed: Tensor, layer: AttentionLayer, x: Tensor) -> None:
    if layer.post_norm is None:
        matmul(mixed, layer.output, bias=layer.output_bias, add=x)
    else:
        add_normed(x, matmul(mixed, layer.output, bias=layer.output_bias), layer.post_norm, layer.eps)


def _biases(weights: AttentionWeights) -> Tensor | None:
    """Concatenate the biases of queries, keys and values; zeros for missing ones."""
    biases = weights.query_bias, weights.key_bias, weights.value_bias
    if all(bias is None for bias in biases):
        return None
    lengths = [weight.shape[0] for weight in (weights.query, weights.key, weights.value)]
    parts = [
        torch.zeros(length, device=DEVICE) if bias is None else bias.to(DEVICE, torch.float32)
        for bias, length in zip(biases, lengths, strict=True)
    ]
    return torch.cat(parts)  # [(H + 2 * G) * D]


@dataclass(frozen=True)
class MlpLayer:
    gate_up: Matrix  # [2 * N, E], gate above up
    down: Matrix  # [E, N]
    activation: Activation
    eps: float
    norm: Tensor | None  # [E] f32
    post_norm: Tensor | None  # [E] f32
    gate_bias: Tensor | None  # [N] f32
    up_bias: Tensor | None  # [N] f32
    down_bias: Tensor | None  # [E] f32


def mlp_layer(weights: MlpWeights, *, batch_invariant: bool = False) -> MlpLayer:
    return MlpLayer(
        gate_up=pack([weights.gate, weights.up], batch_invariant),
        down=pack([weights.down], batch_invariant),
        activation=weights.activation,
        eps=weights.eps,
        norm=on_device(weights.norm),
        post_norm=on_device(weights.post_norm),
        gate_bias=on_device(weights.gate_bias),
        up_bias=on_device(weights.up_bias),
        down_bias=on_device(weights.down_bias),
    )


def mlp(x: Tensor, layer: MlpLayer) -> None:
    inner = gated_matmul(
        x,
        layer.gate_up,
        norm=layer.norm,
        eps=layer.eps,
        gate_bias=layer.gate_bias,
        up_bias=layer.up_bias,
        activation=layer.activation,
    )  # [T, N]
    if layer.post_norm is None:
        matmul(inner, layer.down, bias=layer.down_bias, add=x)
    else:
        add_normed(x, matmul(inner, layer.down, bias=layer.down_bias), layer.post_norm, layer.eps)


StackedLayer = tuple[AttentionLayer, MlpLayer, LayerPages]


def layer_stack(layers: Sequence[tuple[AttentionLayer, MlpLayer]], pages: Sequence[LayerPages]) -> list[StackedLayer]:
    widths = {width for layer, _ in layers for width in (layer.qkv.shape[1], layer.output.shape[0])}
    if len(widths) > 1:
        raise ValueError(f"the layers of a stack have different widths: {sorted(widths)}")
    return [(layer, perceptron, kept) for (layer, perceptron), kept in zip(layers, pages, strict=True)]


def run_layers(x: Tensor, layer_stack: list[StackedLayer], batch: Batch) -> None:
    for layer, perceptron, pages in layer_stack:
        attention(x, layer, batch, pages)
        mlp(x, perceptron)
