"""Attention layers: fused projections, rotation and storage, attention over pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import AttentionWeights, Batch, LayerPages
from .matrices import Matrix, matrix, pack, rows
from .paged import Heads, paged
from .place import PLACE, placed
from .pointwise import add_normed
from .product import product
from .rotary import Turn, turn

# Tokens beyond one a row up to which one kernel turns, stores and attends: each tile turns all keys of its row.
SURPLUS = 60


@dataclass(frozen=True)
class AttentionLayer:
    heads: Heads
    turning: Turn
    eps: float
    qkv: Matrix  # [(H + 2 * G) * D, E]
    kv: Matrix  # its last 2 * G * D rows
    output: Matrix  # [E, H * D]
    norm: Tensor | None  # [E] f32
    post_norm: Tensor | None  # [E] f32
    bias: Tensor | None  # [(H + 2 * G) * D] f32
    kv_bias: Tensor | None  # its last 2 * G * D numbers
    output_bias: Tensor | None  # [E] f32


def attention_layer(weights: AttentionWeights, fixed: bool = False) -> AttentionLayer:
    queries = weights.heads * weights.head_dim
    qkv = pack([weights.query, weights.key, weights.value], fixed)
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
            fixed,
        ),
        turning=Turn(
            weights.eps,
            placed(weights.query_norm),
            placed(weights.key_norm),
            placed(weights.cos),
            placed(weights.sin),
        ),
        eps=weights.eps,
        qkv=qkv,
        kv=rows(qkv, queries, qkv.shape[0]),
        output=matrix(weights.output, fixed=fixed),
        norm=placed(weights.norm),
        post_norm=placed(weights.post_norm),
        bias=bias,
        kv_bias=None if bias is None else bias[queries:],
        output_bias=placed(weights.output_bias),
    )


def project_qkv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> Tensor:
    projected = product(x, layer.qkv, norm=layer.norm, eps=layer.eps, bias=layer.bias)  # [T, (H + 2 * G) * D]
    return turn(projected, layer.heads.count, layer.turning, batch, pages)


def project_kv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> None:
    projected = product(x, layer.kv, bias=layer.kv_bias)  # [T, 2 * G * D]
    turn(projected, 0, layer.turning, batch, pages)


def attention(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> None:
    """`project_qkv`, then `attend`."""
    projected = product(x, layer.qkv, norm=layer.norm, eps=layer.eps, bias=layer.bias)  # [T, (H + 2 * G) * D]
    if _fusable(layer, batch):
        mixed = paged(projected, layer.heads, batch, pages, layer.output.compute, layer.turning)  # [T, H * D]
        _add_output(mixed, layer, x)
    else:
        attend(turn(projected, layer.heads.count, layer.turning, batch, pages), layer, batch, pages, x)


def attend(q: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages, x: Tensor) -> None:
    mixed = paged(q, layer.heads, batch, pages, layer.output.compute)  # [T, H * D], as it is multiplied
    _add_output(mixed, layer, x)


def _fusable(layer: AttentionLayer, batch: Batch) -> bool:
    """Whether a program can turn all keys of this step that it sees: those of chains, which are few."""
    heads, turning = layer.heads, layer.turning
    chains = batch.parents is None and heads.causal and not heads.anchored
    bare = turning.cos is not None and turning.query_norm is None and turning.key_norm is None
    return chains and bare and batch.positions.shape[0] <= batch.page_tables.shape[0] + SURPLUS


def _add_output(mixed: Tensor, layer: AttentionLayer, x: Tensor) -> None:
    if layer.post_norm is None:
        product(mixed, layer.output, bias=layer.output_bias, add=x)
    else:
        add_normed(x, product(mixed, layer.output, bias=layer.output_bias), layer.post_norm, layer.eps)


def _biases(weights: AttentionWeights) -> Tensor | None:
    """Those of queries, keys and values, one after the other; 0 where there is none."""
    biases = weights.query_bias, weights.key_bias, weights.value_bias
    if all(bias is None for bias in biases):
        return None
    lengths = [weight.shape[0] for weight in (weights.query, weights.key, weights.value)]
    parts = [
        torch.zeros(length, device=PLACE) if bias is None else bias.to(PLACE, torch.float32)
        for bias, length in zip(biases, lengths, strict=True)
    ]
    return torch.cat(parts)  # [(H + 2 * G) * D]
