"""Layers: fused QKV projections, rope and KV storage, paged attention, gated MLPs, stacks of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..kv_quantization import key_factors
from ..recurrence import LayerStates
from ..structures import Activation, AttentionWeights, Batch, LayerPages, MlpWeights
from . import decode_attention
from .device import DEVICE, on_device
from .lora import LoraSlots, add_lora
from .matmul import gated_matmul, matmul
from .matrices import Matrix, pack, rows
from .moe import MoeLayer, moe
from .paged_attention import Heads, paged_attention
from .pointwise import add_normed, norm_columns, rms_norm
from .prompt_attention import prompt_attention
from .recurrent import RecurrentLayer, recurrent
from .rope import RopeWeights, rotate_and_store

# Up to this many tokens beyond one per row, one kernel applies rope, stores KV and attends: each tile rotates all new
# keys of its row.
SURPLUS = 60


@dataclass(frozen=True)
class AttentionLayer:
    heads: Heads
    rope: RopeWeights
    whole_norms: tuple[Tensor, Tensor] | None  # [H * D] and [G * D] f32: norms over all heads of queries and of keys
    eps: float
    qkv: Matrix  # [(H + 2 * G) * D, E]
    kv: Matrix  # its last 2 * G * D rows
    output: Matrix  # [E, H * D]
    norm: Tensor | None  # [E] f32
    post_norm: Tensor | None  # [E] f32
    bias: Tensor | None  # [(H + 2 * G) * D] f32
    kv_bias: Tensor | None  # its last 2 * G * D numbers
    output_bias: Tensor | None  # [E] f32
    qkv_lora: tuple[LoraSlots, ...] = ()  # of queries, keys and values; empty: adapters are off
    output_lora: tuple[LoraSlots, ...] = ()
    gate: Matrix | None = None  # [H * D, E]
    counters: Tensor = field(default_factory=decode_attention.share_counters)  # of programs that share a text


def attention_layer(
    weights: AttentionWeights, batch_invariant: bool = False, fast_activations: bool = False
) -> AttentionLayer:
    packed = partial(pack, batch_invariant=batch_invariant, fast_activations=fast_activations)
    queries = weights.heads * weights.head_dim
    qkv = packed([weights.query, weights.key, weights.value])
    bias = _biases(weights)
    factors = on_device(key_factors(weights.key_bias, weights.kv_heads))
    query_norm, key_norm = on_device(weights.query_norm), on_device(weights.key_norm)
    whole_norms = None
    if weights.whole_norms:
        assert query_norm is not None and key_norm is not None
        whole_norms = query_norm, key_norm
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
            weights.soft_cap,
            on_device(weights.sinks),
            factors,
        ),
        rope=RopeWeights(
            weights.eps,
            None if whole_norms else query_norm,
            None if whole_norms else key_norm,
            on_device(weights.cos),
            on_device(weights.sin),
            factors,
        ),
        whole_norms=whole_norms,
        eps=weights.eps,
        qkv=qkv,
        kv=rows(qkv, queries, qkv.shape[0]),
        output=packed([weights.output]),
        norm=on_device(weights.norm),
        post_norm=on_device(weights.post_norm),
        bias=bias,
        kv_bias=None if bias is None else bias[queries:],
        output_bias=on_device(weights.output_bias),
        qkv_lora=() if weights.lora is None else (weights.lora.query, weights.lora.key, weights.lora.value),
        output_lora=() if weights.lora is None else (weights.lora.output,),
        gate=None if weights.gate is None else packed([weights.gate]),
    )


def _project(x: Tensor, layer: AttentionLayer, batch: Batch) -> Tensor:
    """Return queries, keys and values before the rotary embedding: [T, (H + 2 * G) * D]."""
    projected = matmul(x, layer.qkv, norm=layer.norm, eps=layer.eps, bias=layer.bias)
    if batch.adapters is not None and layer.qkv_lora:
        states = x if layer.norm is None else rms_norm(x, layer.norm, layer.eps)
        add_lora(states, layer.qkv_lora, batch.adapters, projected)
    if layer.whole_norms is not None:
        query_norm, key_norm = layer.whole_norms
        norm_columns(projected, 0, query_norm, layer.eps)
        norm_columns(projected, query_norm.shape[0], key_norm, layer.eps)
    return projected


def project_qkv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> Tensor:
    projected = _project(x, layer, batch)
    return rotate_and_store(projected, layer.heads.count, layer.rope, batch, pages)


def project_kv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> None:
    projected = matmul(x, layer.kv, bias=layer.kv_bias)  # [T, 2 * G * D]
    if batch.adapters is not None and layer.qkv_lora:
        add_lora(x, layer.qkv_lora[1:], batch.adapters, projected)
    if layer.whole_norms is not None:
        norm_columns(projected, 0, layer.whole_norms[1], layer.eps)
    rotate_and_store(projected, 0, layer.rope, batch, pages)


def attention(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> None:
    """Run `project_qkv` and `attend`, fused for short causal chains."""
    projected = _project(x, layer, batch)
    if _fusable(layer, batch):
        mixed = _rotate_and_attend(projected, layer, batch, pages)  # [T, H * D]
        _add_output(mixed, layer, batch, x)
    else:
        attend(rotate_and_store(projected, layer.heads.count, layer.rope, batch, pages), layer, batch, pages, x)


def _rotate_and_attend(projected: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> Tensor:
    heads, result = layer.heads, layer.output.compute
    if decode_attention.serves(heads, batch, pages):
        return decode_attention.decode_attention(projected, heads, batch, pages, result, layer.rope, layer.counters)
    return paged_attention(projected, heads, batch, pages, result, layer.rope)


def attend(q: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages, x: Tensor) -> None:
    mixed = prompt_attention(q, layer.heads, batch, pages, layer.output.compute)  # [T, H * D], as it is multiplied
    _add_output(mixed, layer, batch, x)


def _fusable(layer: AttentionLayer, batch: Batch) -> bool:
    """Return whether each program can rotate all new keys that it attends to: causal chains with few tokens."""
    heads, rope = layer.heads, layer.rope
    chains = batch.parents is None and heads.causal and not heads.anchored
    bare = rope.cos is not None and rope.query_norm is None and rope.key_norm is None
    return chains and bare and batch.positions.shape[0] <= batch.page_tables.shape[0] + SURPLUS


def _add_output(mixed: Tensor, layer: AttentionLayer, batch: Batch, x: Tensor) -> None:
    if layer.gate is not None:
        gate = matmul(x, layer.gate, norm=layer.norm, eps=layer.eps)  # [T, H * D]
        mixed = (mixed * torch.sigmoid(gate)).to(mixed.dtype)
    _add_back(mixed, layer.output, layer.output_bias, layer.output_lora, batch.adapters, layer.post_norm, layer.eps, x)


def _add_back(
    inner: Tensor,
    matrix: Matrix,
    bias: Tensor | None,
    lora: tuple[LoraSlots, ...],
    adapters: Tensor | None,
    post_norm: Tensor | None,
    eps: float,
    x: Tensor,
) -> None:
    """Add post_norm(linear(inner) + bias) to x [T, E]: the end of every block of a layer."""
    out = matmul(inner, matrix, bias=bias, add=x if post_norm is None else None)
    if adapters is not None and lora:
        add_lora(inner, lora, adapters, out)
    if post_norm is not None:
        add_normed(x, out, post_norm, eps)


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
    gate_up_lora: tuple[LoraSlots, ...] = ()  # empty: adapters are off
    down_lora: tuple[LoraSlots, ...] = ()


def mlp_layer(weights: MlpWeights, *, batch_invariant: bool = False, fast_activations: bool = False) -> MlpLayer:
    return MlpLayer(
        gate_up=pack([weights.gate, weights.up], batch_invariant, fast_activations=fast_activations),
        down=pack([weights.down], batch_invariant, fast_activations=fast_activations),
        activation=weights.activation,
        eps=weights.eps,
        norm=on_device(weights.norm),
        post_norm=on_device(weights.post_norm),
        gate_bias=on_device(weights.gate_bias),
        up_bias=on_device(weights.up_bias),
        down_bias=on_device(weights.down_bias),
        gate_up_lora=() if weights.lora is None else (weights.lora.gate, weights.lora.up),
        down_lora=() if weights.lora is None else (weights.lora.down,),
    )


def mlp(x: Tensor, layer: MlpLayer, adapters: Tensor | None = None) -> None:
    deltas = None
    if adapters is not None and layer.gate_up_lora:
        states = x if layer.norm is None else rms_norm(x, layer.norm, layer.eps)
        deltas = torch.zeros(x.shape[0], layer.gate_up.shape[0], device=x.device)  # [T, 2 * N]
        add_lora(states, layer.gate_up_lora, adapters, deltas)
    inner = gated_matmul(
        x,
        layer.gate_up,
        norm=layer.norm,
        eps=layer.eps,
        gate_bias=layer.gate_bias,
        up_bias=layer.up_bias,
        activation=layer.activation,
        deltas=deltas,
    )  # [T, N]
    _add_back(inner, layer.down, layer.down_bias, layer.down_lora, adapters, layer.post_norm, layer.eps, x)


StackedLayer = tuple[AttentionLayer | RecurrentLayer, MlpLayer | MoeLayer, LayerPages | LayerStates]


def layer_stack(
    layers: Sequence[tuple[AttentionLayer | RecurrentLayer, MlpLayer | MoeLayer]],
    pages: Sequence[LayerPages | LayerStates],
) -> list[StackedLayer]:
    widths = {layer.output.shape[0] for layer, _ in layers}
    widths |= {(layer.qkv if isinstance(layer, AttentionLayer) else layer.gate).shape[1] for layer, _ in layers}
    if len(widths) > 1:
        raise ValueError(f"the layers of a stack have different widths: {sorted(widths)}")
    return [(layer, perceptron, kept) for (layer, perceptron), kept in zip(layers, pages, strict=True)]


def run_layers(x: Tensor, layer_stack: list[StackedLayer], batch: Batch) -> None:
    for layer, perceptron, kept in layer_stack:
        if isinstance(layer, RecurrentLayer):
            assert isinstance(kept, LayerStates)
            recurrent(x, layer, batch, kept)
        else:
            assert isinstance(kept, LayerPages)
            attention(x, layer, batch, kept)
        if isinstance(perceptron, MoeLayer):
            moe(x, perceptron)
        else:
            mlp(x, perceptron, batch.adapters)
