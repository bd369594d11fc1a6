"""Layers in plain torch: matrices, norms, attention over pages, MLPs, KV copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as functional
from torch import Tensor

from ..kv_quantization import dequantize_heads, key_factors, quantize_heads
from ..quantization import dequantize
from ..structures import AttentionLora, AttentionWeights, Batch, LayerPages, MlpLora, MlpWeights, MoeWeights, Weight


@dataclass(frozen=True)
class AttentionLayer:
    weights: AttentionWeights
    query: Tensor  # [H * D, E] f32, as are the others
    key: Tensor
    value: Tensor
    output: Tensor
    gate: Tensor | None = None


@dataclass(frozen=True)
class MlpLayer:
    weights: MlpWeights
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class MoeLayer:
    weights: MoeWeights
    experts: list[MlpLayer]
    shared: MlpLayer | None


@dataclass(frozen=True)
class LoraSlots:
    shape: tuple[int, int]
    pairs: list[tuple[Tensor, Tensor] | None]  # [R, K] and [N, R] of each slot; None: empty


NO_LORA = AttentionLora(None, None, None, None)
NO_MLP_LORA = MlpLora(None, None, None)
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of the activation `swiglu_oai`


def vector(values: Tensor) -> Tensor:
    return values


def matrix(weight: Weight) -> Tensor:
    return dequantize(weight)


def attention_layer(weights: AttentionWeights) -> AttentionLayer:
    query, key, value, output = map(matrix, (weights.query, weights.key, weights.value, weights.output))
    gate = None if weights.gate is None else matrix(weights.gate)
    return AttentionLayer(weights, query, key, value, output, gate)


def mlp_layer(weights: MlpWeights) -> MlpLayer:
    return MlpLayer(weights, matrix(weights.gate), matrix(weights.up), matrix(weights.down))


def moe_layer(weights: MoeWeights) -> MoeLayer:
    experts = [mlp_layer(weights.expert(index)) for index in range(len(weights.gate))]
    return MoeLayer(weights, experts, None if weights.shared is None else mlp_layer(weights.shared))


def lora_slots(slots: int, rank: int, shape: tuple[int, int]) -> LoraSlots:
    return LoraSlots(shape, [None] * slots)


def set_lora(lora_slots: LoraSlots, slot: int, a: Tensor | None, b: Tensor | None) -> None:
    if not 0 <= slot < len(lora_slots.pairs):
        raise ValueError(f"no slot {slot} for an adapter: there are {len(lora_slots.pairs)}")
    if a is not None and b is not None and (b.shape[0], a.shape[1], b.shape[1]) != (*lora_slots.shape, a.shape[0]):
        raise ValueError(f"an adapter of {list(a.shape)} and {list(b.shape)} does not fit {list(lora_slots.shape)}")
    lora_slots.pairs[slot] = None if a is None or b is None else (a, b)


def embed(table: Tensor, tokens: Tensor, scale: float) -> Tensor:
    return table[tokens.long()] * scale


# One row at a time, so that a row's bits do not depend on its batch: matrix products, attention, activations and norms
# of heads. In a batch: additions, multiplications, and means over whole states, which add each row in the same order.


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def linear(x: Tensor, matrix: Tensor) -> Tensor:
    return row_by_row(x, lambda row: row @ matrix.T)


def norm_linear(x: Tensor, weight: Tensor, eps: float, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    result = linear(rms_norm(x, weight, eps), matrix)
    return result if out is None else out.copy_(result)


def soft_cap(x: Tensor, cap: float) -> None:
    x.copy_(row_by_row(x, lambda row: cap * torch.tanh(row / cap)))


def project_qkv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> Tensor:
    weights = layer.weights
    states = optional_norm(x, weights.norm, weights.eps)  # [T, E]
    lora = weights.lora or NO_LORA
    queries = _heads(states, layer.query, weights.query_bias, weights, lora.query, batch.adapters)  # [T, H, D]
    queries = _rotate(_head_norm(queries, weights.query_norm, weights), weights, batch.positions)
    project_kv(states, layer, batch, pages)
    return queries.flatten(1)


def project_kv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> None:
    weights, stored = layer.weights, batch.slots != -1  # [T]
    states, positions, slots = x[stored], batch.positions[stored], batch.slots[stored].tolist()
    adapters, lora = None if batch.adapters is None else batch.adapters[stored], weights.lora or NO_LORA
    keys = _heads(states, layer.key, weights.key_bias, weights, lora.key, adapters)  # [stored, G, D]
    keys = _rotate(_head_norm(keys, weights.key_norm, weights), weights, positions)
    if (factors := _int8_factors(weights, pages)) is not None:
        keys = keys / factors
    values = _heads(states, layer.value, weights.value_bias, weights, lora.value, adapters)  # [stored, G, D]
    for key, value, slot in zip(keys, values, slots, strict=True):
        page, offset = page_and_offset(pages, slot)
        _store(pages.keys, pages.key_scales, page, offset, key)
        _store(pages.values, pages.value_scales, page, offset, value)


def attend(q: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages, x: Tensor) -> None:
    weights = layer.weights
    check_trees(batch, pages, weights.causal)
    count = int(batch.query_starts[-1])  # the tokens after these pad
    mixed = torch.empty(count, q.shape[1])  # [T, H * D]
    factors = _int8_factors(weights, pages)
    for token, slots in enumerate(visible_slots(batch, weights, pages.keys.shape[2])):
        keys, values = gather(pages, slots)  # [G, keys, D]
        query = q[token].reshape(weights.kv_heads, -1, weights.head_dim)  # [G, H / G, D]
        query = query if factors is None else query * factors[:, None]
        scores = query @ keys.transpose(1, 2) * weights.scale  # [G, H / G, keys]
        if weights.soft_cap:
            scores = weights.soft_cap * torch.tanh(scores / weights.soft_cap)
        if weights.sinks is not None:
            sinks = weights.sinks.view(weights.kv_heads, -1, 1)  # [G, H / G, 1]
            probs = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        else:
            probs = torch.softmax(scores, -1)
        mixed[token] = (probs @ values).flatten()  # 0 if no key is visible
    if layer.gate is not None:
        gate = linear(optional_norm(x[:count], weights.norm, weights.eps), layer.gate)
        mixed *= row_by_row(gate, torch.sigmoid)
    lora = weights.lora or NO_LORA
    out = _affine(mixed, layer.output, weights.output_bias, lora.output, batch.adapters)  # [T, E]
    x[:count] += optional_norm(out, weights.post_norm, weights.eps)


def mlp(x: Tensor, layer: MlpLayer, adapters: Tensor | None = None) -> None:
    weights = layer.weights
    out = _gated(optional_norm(x, weights.norm, weights.eps), layer, adapters)  # [T, E]
    x += optional_norm(out, weights.post_norm, weights.eps)


def _gated(states: Tensor, layer: MlpLayer, adapters: Tensor | None = None) -> Tensor:
    weights = layer.weights
    lora = weights.lora or NO_MLP_LORA
    gate = _affine(states, layer.gate, weights.gate_bias, lora.gate, adapters)  # [T, N]
    up = _affine(states, layer.up, weights.up_bias, lora.up, adapters)
    if weights.activation == "swiglu_oai":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
    active = row_by_row(gate, GATES[weights.activation])
    return _affine(active * up, layer.down, weights.down_bias, lora.down, adapters)  # [T, E]


def moe(x: Tensor, layer: MoeLayer) -> None:
    weights = layer.weights
    states = optional_norm(x, weights.norm, weights.eps)  # [T, E]
    out = torch.zeros_like(x)
    for row, total in zip(torch.split(states, 1), torch.split(out, 1), strict=True):  # [1, E]
        for expert, score in route(row, weights):
            total += score * _gated(row, layer.experts[expert])
        if layer.shared is not None and weights.shared_gate is not None:
            total += torch.sigmoid(linear(row, weights.shared_gate[None])) * _gated(row, layer.shared)
    x += optional_norm(out, weights.post_norm, weights.eps)


def route(state: Tensor, weights: MoeWeights) -> list[tuple[int, float]]:
    """Return the experts of one token [1, E], the best first, with their scores."""
    logits = _affine(state, weights.router, weights.router_bias)[0]  # [X]
    chosen = torch.argsort(logits, descending=True, stable=True)[: weights.top_k]
    scores = torch.softmax(logits, 0)[chosen]  # [top_k]
    if weights.normalized:
        scores = scores / scores.sum()
    return list(zip(chosen.tolist(), scores.tolist(), strict=True))


def row_by_row(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `run` to one row [1, ...] at a time."""
    return torch.cat([run(row) for row in torch.split(x, 1)])


def optional_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else rms_norm(x, weight, eps)


def _head_norm(heads: Tensor, weight: Tensor | None, weights: AttentionWeights) -> Tensor:
    """Normalize each head, or all heads together: [T, heads, D]."""
    if weight is None:
        return heads
    if weights.whole_norms:
        return row_by_row(heads.flatten(1), lambda row: rms_norm(row, weight, weights.eps)).view(heads.shape)
    return row_by_row(heads, lambda row: rms_norm(row, weight, weights.eps))


def _affine(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    lora_slots: LoraSlots | None = None,
    adapters: Tensor | None = None,
) -> Tensor:
    """Return x times the transpose of `matrix`, with the adapters [T] of the rows, plus `bias`."""
    out = linear(x, matrix)
    if lora_slots is not None and adapters is not None:
        for row, slot in enumerate(adapters[: len(x)].tolist()):
            if slot >= 0 and (pair := lora_slots.pairs[slot]) is not None:
                out[row] += x[row : row + 1].mm(pair[0].T).mm(pair[1].T)[0]
    return out if bias is None else out + bias


def _heads(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    weights: AttentionWeights,
    lora_slots: LoraSlots | None,
    adapters: Tensor | None,
) -> Tensor:
    out = _affine(x, matrix, bias, lora_slots, adapters)
    return out.view(-1, matrix.shape[0] // weights.head_dim, weights.head_dim)


def _tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _sharp_silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(SWIGLU_ALPHA * x)


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": _tanh_gelu,
    "swiglu_oai": _sharp_silu,
}


def _rotate(heads: Tensor, weights: AttentionWeights, positions: Tensor) -> Tensor:
    """Apply rope to pairs of dimensions i, i + D / 2: [T, heads, D]."""
    if weights.cos is None or weights.sin is None:
        return heads
    cos, sin = weights.cos[positions.long(), None], weights.sin[positions.long(), None]  # [T, 1, D / 2]
    left, right = heads.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def visible_slots(batch: Batch, weights: AttentionWeights, size: int) -> Iterator[Tensor]:
    """Yield the slots of the keys that each token attends to, by position: [keys]. `size`: of a page.

    A token attends up to its own position; if not causal, up to the highest position of its row (padding has 0).
    """
    positions, slots = batch.positions.tolist(), batch.slots.tolist()
    parents = None if batch.parents is None else batch.parents.tolist()
    for (begin, end), table in zip(pairwise(batch.query_starts.tolist()), batch.page_tables.tolist(), strict=True):
        highest = max(positions[begin:end], default=0)
        for token in range(begin, end):
            origin = positions[begin] - 1 if weights.anchored else positions[token]
            first = max(origin - weights.window + 1 if weights.window else 0, weights.skip)
            last = positions[token] if weights.causal else highest
            visible = [table[position // size] * size + position % size for position in range(first, last + 1)]
            node = token
            while parents is not None and node >= 0 and positions[node] >= first:
                if slots[node] != -1:
                    visible[positions[node] - first] = slots[node]
                node = parents[node]
            yield torch.tensor(visible, dtype=torch.int64)


def _int8_factors(weights: AttentionWeights, pages: LayerPages) -> Tensor | None:
    """Return the factors [G, D] that the keys in these pages are divided by; None: by nothing."""
    return key_factors(weights.key_bias, weights.kv_heads) if pages.keys.dtype is torch.int8 else None


def _store(storage: Tensor, scales: Tensor | None, page: int, offset: int, heads: Tensor) -> None:
    """Store the heads [G, D] of one token."""
    if scales is None:
        storage[page, :, offset] = heads
    else:
        storage[page, :, offset], scales[page, :, offset] = quantize_heads(heads, storage.dtype)


def gather(pages: LayerPages, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of these slots in fp32: [G, keys, D] each."""
    size = pages.keys.shape[2]
    page, offset = slots // size, slots % size

    def read(storage: Tensor, scales: Tensor | None) -> Tensor:
        heads = (
            storage[page, :, offset].float()
            if scales is None
            else dequantize_heads(storage[page, :, offset], scales[page, :, offset])
        )  # [keys, G, D]
        return heads.transpose(0, 1).contiguous()

    return read(pages.keys, pages.key_scales), read(pages.values, pages.value_scales)


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
            for storage in layer.tensors:
                storage[to_page, :, to_line] = storage[page, :, line]
