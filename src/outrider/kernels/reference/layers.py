"""Layers in plain torch: matrices, norms, attention over pages, MLPs, KV copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as functional
from torch import Tensor

from ..quantization import dequantize
from ..structures import AttentionWeights, Batch, LayerPages, MlpWeights, Weight


@dataclass(frozen=True)
class AttentionLayer:
    weights: AttentionWeights
    query: Tensor  # [H * D, E] f32, as are the others
    key: Tensor
    value: Tensor
    output: Tensor


@dataclass(frozen=True)
class MlpLayer:
    weights: MlpWeights
    gate: Tensor
    up: Tensor
    down: Tensor


StackedLayer = tuple[AttentionLayer, MlpLayer, LayerPages]


def vector(values: Tensor) -> Tensor:
    return values


def matrix(weight: Weight) -> Tensor:
    return dequantize(weight)


def attention_layer(weights: AttentionWeights) -> AttentionLayer:
    return AttentionLayer(
        weights, matrix(weights.query), matrix(weights.key), matrix(weights.value), matrix(weights.output)
    )


def mlp_layer(weights: MlpWeights) -> MlpLayer:
    return MlpLayer(weights, matrix(weights.gate), matrix(weights.up), matrix(weights.down))


def embed(table: Tensor, tokens: Tensor, scale: float) -> Tensor:
    return table[tokens.long()] * scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _row_by_row(x, lambda row: _rms_norm(row, weight, eps))


def linear(x: Tensor, matrix: Tensor) -> Tensor:
    return _row_by_row(x, lambda row: row @ matrix.T)


def norm_linear(x: Tensor, weight: Tensor, eps: float, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    result = linear(rms_norm(x, weight, eps), matrix)
    return result if out is None else out.copy_(result)


def project_qkv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> Tensor:
    weights = layer.weights
    queries = torch.empty(x.shape[0], weights.heads * weights.head_dim)  # [T, H * D]
    for token, position in enumerate(batch.positions.tolist()):
        row = _optional_norm(x[token : token + 1], weights.norm, weights.eps)  # [1, E]
        query = _heads(row, layer.query, weights.query_bias, weights.head_dim)  # [H, D]
        query = _rotate(_optional_norm(query, weights.query_norm, weights.eps), weights, position)
        queries[token] = query.flatten()
        _store(row, layer, position, int(batch.slots[token]), pages)
    return queries


def project_kv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> None:
    for token, position in enumerate(batch.positions.tolist()):
        _store(x[token : token + 1], layer, position, int(batch.slots[token]), pages)


def attend(q: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages, x: Tensor) -> None:
    weights = layer.weights
    starts = batch.query_starts.tolist()
    check_trees(batch, pages, weights.causal)
    lasts = last_visible(batch, weights.causal)  # [T]
    for row in range(len(batch.page_tables)):
        for token in range(starts[row], starts[row + 1]):
            slots = visible_slots(batch, row, token, lasts[token], weights, pages.keys.shape[2])  # [keys]
            keys, values = gather(pages.keys, slots), gather(pages.values, slots)  # [G, keys, D]
            query = q[token].reshape(weights.kv_heads, -1, weights.head_dim)  # [G, H / G, D]
            scores = query @ keys.transpose(1, 2) * weights.scale  # [G, H / G, keys]
            mixed = torch.softmax(scores, -1) @ values  # [G, H / G, D]; 0 where no key is seen
            out = _affine(mixed.reshape(1, -1), layer.output, weights.output_bias)  # [1, E]
            x[token] += _optional_norm(out, weights.post_norm, weights.eps)[0]


def mlp(x: Tensor, layer: MlpLayer) -> None:
    weights = layer.weights
    for token in range(x.shape[0]):
        row = _optional_norm(x[token : token + 1], weights.norm, weights.eps)  # [1, E]
        gate = _affine(row, layer.gate, weights.gate_bias)  # [1, N]
        up = _affine(row, layer.up, weights.up_bias)
        active = functional.silu(gate) if weights.activation == "silu" else functional.gelu(gate, approximate="tanh")
        out = _affine(active * up, layer.down, weights.down_bias)  # [1, E]
        x[token] += _optional_norm(out, weights.post_norm, weights.eps)[0]


def layer_stack(layers: Sequence[tuple[AttentionLayer, MlpLayer]], pages: Sequence[LayerPages]) -> list[StackedLayer]:
    widths = {
        matrix.shape[side] for attention, _ in layers for matrix, side in ((attention.query, 1), (attention.output, 0))
    }
    if len(widths) > 1:
        raise ValueError(f"the layers of a stack have different widths: {sorted(widths)}")
    return [(attention, mlp, kept) for (attention, mlp), kept in zip(layers, pages, strict=True)]


def run_layers(x: Tensor, layer_stack: list[StackedLayer], batch: Batch) -> None:
    for attention, mlp_weights, pages in layer_stack:
        queries = project_qkv(x, attention, batch, pages)  # [T, H * D]
        attend(queries, attention, batch, pages, x)
        mlp(x, mlp_weights)


def _row_by_row(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `run` to one row [1, ...] at a time."""
    return torch.cat([run(row[None]) for row in x])


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _optional_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else _rms_norm(x, weight, eps)


def _affine(row: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    out = row @ matrix.T
    return out if bias is None else out + bias


def _heads(row: Tensor, matrix: Tensor, bias: Tensor | None, width: int) -> Tensor:
    return _affine(row, matrix, bias).reshape(-1, width)


def _store(row: Tensor, layer: AttentionLayer, position: int, slot: int, pages: LayerPages) -> None:
    """Store the key and the value of one state [1, E]; slot -1: not stored."""
    weights = layer.weights
    if slot == -1:
        return
    page, line = page_and_offset(pages, slot)
    key = _heads(row, layer.key, weights.key_bias, weights.head_dim)  # [G, D]
    value = _heads(row, layer.value, weights.value_bias, weights.head_dim)  # [G, D]
    key = _rotate(_optional_norm(key, weights.key_norm, weights.eps), weights, position)
    pages.keys[page, :, line] = key.to(pages.keys.dtype)
    pages.values[page, :, line] = value.to(pages.values.dtype)


def _rotate(heads: Tensor, weights: AttentionWeights, position: int) -> Tensor:
    """Apply rope to pairs of dimensions i, i + D / 2: [heads, D]."""
    if weights.cos is None or weights.sin is None:
        return heads
    cos, sin = weights.cos[position], weights.sin[position]  # [D / 2]
    left, right = heads.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def last_visible(batch: Batch, causal: bool) -> list[int]:
    """Return the last position that each token attends to: its own, or the highest of its row (padding has 0)."""
    positions = batch.positions.tolist()
    if causal:
        return positions
    rows = [positions[begin:end] for begin, end in pairwise(batch.query_starts.tolist())]
    return [highest for row in rows for highest in [max(row, default=0)] * len(row)]


def visible_slots(batch: Batch, row: int, token: int, last: int, weights: AttentionWeights, size: int) -> Tensor:
    """Return the slots of the keys that a token attends to, by position up to `last`: [keys]. `size`: of a page."""
    table, begin = batch.page_tables[row], int(batch.query_starts[row])
    origin = int(batch.positions[begin]) - 1 if weights.anchored else int(batch.positions[token])
    first = max(origin - weights.window + 1 if weights.window else 0, weights.skip)
    position = torch.arange(first, max(last + 1, first))
    slots = table.long()[position // size] * size + position % size
    while batch.parents is not None and token >= 0 and int(batch.positions[token]) >= first:
        if (slot := int(batch.slots[token])) != -1:
            slots[int(batch.positions[token]) - first] = slot
        token = int(batch.parents[token])
    return slots


def gather(pages: Tensor, slots: Tensor) -> Tensor:
    """Return the contents of these slots in fp32: [G, keys, D]."""
    size = pages.shape[2]
    return pages[slots // size, :, slots % size].float().transpose(0, 1).contiguous()


def page_and_offset(pages: LayerPages, slot: int) -> tuple[int, int]:
    """Return the page of a slot and the offset in it."""
    count, _, size, _ = pages.keys.shape
    if not 0 <= slot < count * size:
        raise ValueError(f"slot {slot} lies outside the storage of {count * size} slots")
    return divmod(slot, size)


def check_trees(batch: Batch, pages: LayerPages, causal: bool) -> None:
    """Check that parents precede their children in the row, positions grow by one per depth, and slots exist."""
    if batch.parents is None:
        return
    if not causal:
        raise ValueError("a layer that is not causal sees no trees: the batch must have no `parents`")
    starts, positions, slots = batch.query_starts.tolist(), batch.positions.tolist(), batch.slots.tolist()
    covered = batch.page_tables.shape[1] * pages.keys.shape[2]  # positions that a page table names
    for begin, end in pairwise(starts):
        for token, parent in enumerate(batch.parents[begin:end].tolist(), begin):
            if parent != -1 and not begin <= parent < token:
                raise ValueError(f"token {token} follows token {parent}, which does not come before it in its row")
            expected = positions[begin] if parent == -1 else positions[parent] + 1
            if positions[token] != expected or expected < 0:
                raise ValueError(f"token {token} stands at position {positions[token]}: expected {expected}")
            if slots[token] != -1:
                page_and_offset(pages, slots[token])
            elif expected >= covered:
                raise ValueError(f"token {token} has no slot, and its page table ends before position {expected}")


def copy_kv(pages: Sequence[LayerPages], sources: Tensor, targets: Tensor) -> None:
    steps = list(zip(sources.tolist(), targets.tolist(), strict=True))
    copies = [
        [(page_and_offset(layer, source), page_and_offset(layer, target)) for source, target in steps]
        for layer in pages
    ]
    for layer, moves in zip(pages, copies, strict=True):
        for (page, line), (to_page, to_line) in moves:
            for storage in (layer.keys, layer.values):
                storage[to_page, :, to_line] = storage[page, :, line]
