"""Layers of the CPU backend: weights packed for the native library, and calls of its layer operations.

Native layers hold addresses of tensors (norms, biases, rope tables), so the handles below keep those alive. A layer is
checked when it is built.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kv_quantization import LARGEST, key_factors
from ..quantization import FORMATS, dequantize, row_bytes
from ..structures import AttentionWeights, Batch, LayerPages, MlpWeights, MoeWeights, Weight
from . import _native
from .runtime import FLOAT, address, floats, integers

PAGE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_oai": 2}


@dataclass(slots=True)
class AttentionLayer:
    native: _native.Attention
    input_width: int  # E, or 2 * E in a head that reads two states
    width: int  # E
    query_width: int  # H * D
    kv_heads: int
    head_dim: int
    alive: tuple[Tensor | None, ...]
    pages: LayerPages | None = None  # the storage that `native_pages` was made from
    native_pages: _native.Pages | None = None


@dataclass(frozen=True, slots=True)
class MlpLayer:
    native: _native.Mlp
    width: int  # E
    alive: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class MoeLayer:
    native: _native.Moe
    width: int  # E
    alive: tuple[object, ...]


def vector(values: Tensor) -> Tensor:
    return values


def matrix(weight: Weight, fast_activations: bool = False) -> _native.Matrix:
    block = FORMATS[weight.kind]
    rows, columns = weight.shape
    expected = rows * row_bytes(weight.kind, columns)
    data = weight.data.contiguous()
    if data.dtype is not (block.dtype or torch.uint8) or data.nbytes != expected:
        raise ValueError(
            f"a `{weight.kind}` matrix of shape {tuple(weight.shape)} has {expected} bytes, "
            f"but its data is {data.nbytes} bytes of {data.dtype}"
        )
    order = None if weight.order is None else weight.order.to(torch.int32).contiguous()
    where = 0 if order is None else integers(order, columns)
    return _native.Matrix(weight.kind, rows, columns, data.data_ptr(), fast_activations, where)


def _in_one_order(*weights: Weight) -> list[Weight]:
    """Return matrices that read the same rows: as they are if their orders of inputs agree, else as halves."""
    orders = [weight.order for weight in weights]
    first = orders[0]
    if all(order is None if first is None else order is not None and torch.equal(order, first) for order in orders):
        return list(weights)
    return [Weight("f16", weight.shape, dequantize(weight).to(torch.float16)) for weight in weights]


def attention_layer(weights: AttentionWeights, fast_activations: bool = False) -> AttentionLayer:
    input_width, width = weights.query.shape[1], weights.output.shape[0]
    queries, keys = weights.heads * weights.head_dim, weights.kv_heads * weights.head_dim
    whole_norms = weights.whole_norms
    vectors = {
        "norm": _vector("norm", weights.norm, input_width),
        "post_norm": _vector("post_norm", weights.post_norm, width),
        "query_norm": _vector("query_norm", weights.query_norm, queries if whole_norms else weights.head_dim),
        "key_norm": _vector("key_norm", weights.key_norm, keys if whole_norms else weights.head_dim),
        "query_bias": _vector("query_bias", weights.query_bias, queries),
        "key_bias": _vector("key_bias", weights.key_bias, keys),
        "value_bias": _vector("value_bias", weights.value_bias, keys),
        "output_bias": _vector("output_bias", weights.output_bias, width),
        "key_factors": key_factors(weights.key_bias, weights.kv_heads),
        "sinks": _vector("sinks", weights.sinks, weights.heads),
        "cos": _vector("cos", weights.cos, weights.head_dim // 2),
        "sin": _vector("sin", weights.sin, weights.head_dim // 2),
    }
    cos, sin = vectors["cos"], vectors["sin"]
    if (cos is None) != (sin is None) or (cos is not None and sin is not None and cos.shape != sin.shape):
        raise ValueError("`cos` and `sin` must be tables of one shape")
    query, key, value = _in_one_order(weights.query, weights.key, weights.value)
    native = _native.Attention(
        query=matrix(query, fast_activations),
        key=matrix(key, fast_activations),
        value=matrix(value, fast_activations),
        output=matrix(weights.output, fast_activations),
        heads=weights.heads,
        kv_heads=weights.kv_heads,
        head_dim=weights.head_dim,
        window=weights.window,
        skip=weights.skip,
        causal=weights.causal,
        anchored=weights.anchored,
        whole_norms=whole_norms,
        scale=weights.scale,
        soft_cap=weights.soft_cap,
        eps=weights.eps,
        **_addresses(vectors),
        rope_positions=0 if cos is None else cos.numel() * 2 // weights.head_dim,
        gate=None if weights.gate is None else matrix(weights.gate, fast_activations),
    )
    if weights.lora is not None:
        native.set_lora(weights.lora.query, weights.lora.key, weights.lora.value, weights.lora.output)
    alive = tuple(vectors.values())
    return AttentionLayer(native, input_width, width, queries, weights.kv_heads, weights.head_dim, alive)


def mlp_layer(weights: MlpWeights, fast_activations: bool = False) -> MlpLayer:
    hidden, width = weights.gate.shape
    vectors = {
        "norm": _vector("norm", weights.norm, width),
        "post_norm": _vector("post_norm", weights.post_norm, width),
        "gate_bias": _vector("gate_bias", weights.gate_bias, hidden),
        "up_bias": _vector("up_bias", weights.up_bias, hidden),
        "down_bias": _vector("down_bias", weights.down_bias, width),
    }
    gate, up = _in_one_order(weights.gate, weights.up)
    native = _native.Mlp(
        gate=matrix(gate, fast_activations),
        up=matrix(up, fast_activations),
        down=matrix(weights.down, fast_activations),
        activation=ACTIVATIONS[weights.activation],
        eps=weights.eps,
        **_addresses(vectors),
    )
    if weights.lora is not None:
        native.set_lora(weights.lora.gate, weights.lora.up, weights.lora.down)
    return MlpLayer(native, width, tuple(vectors.values()))


def moe_layer(weights: MoeWeights, fast_activations: bool = False) -> MoeLayer:
    count, width = weights.router.shape
    router = weights.router.to(torch.float32)
    experts = [mlp_layer(weights.expert(index), fast_activations) for index in range(count)]
    if weights.shared is not None and weights.shared_gate is not None:  # its gate is one more row of the router
        router = torch.cat([router, weights.shared_gate.to(torch.float32)[None]])
        experts.append(mlp_layer(weights.shared, fast_activations))
    vectors = {
        "norm": _vector("norm", weights.norm, width),
        "post_norm": _vector("post_norm", weights.post_norm, width),
        "router_bias": _vector("router_bias", weights.router_bias, count),
    }
    native = _native.Moe(
        router=matrix(Weight("f32", tuple(router.shape), router)),
        experts=[expert.native for expert in experts],
        count=count,
        top_k=weights.top_k,
        normalized=weights.normalized,
        eps=weights.eps,
        **_addresses(vectors),
    )
    return MoeLayer(native, width, (tuple(experts), *vectors.values()))


def lora_slots(slots: int, rank: int, shape: tuple[int, int]) -> _native.LoraSlots:
    return _native.LoraSlots(slots, *shape)  # an adapter takes the memory of its own rank


def set_lora(lora_slots: _native.LoraSlots, slot: int, a: Tensor | None, b: Tensor | None) -> None:
    if a is None or b is None:
        lora_slots.set(slot, None, None)
    else:
        lora_slots.set(slot, *(matrix(Weight("f32", tuple(part.shape), part)) for part in (a, b)))


def embed(table: _native.Matrix, tokens: Tensor, scale: float) -> Tensor:
    count = tokens.shape[0]
    out = torch.empty(count, table.cols, dtype=FLOAT)  # [T, E]
    _native.embed(table, integers(tokens), count, scale, out.data_ptr())
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    tokens, width = x.shape
    out = torch.empty_like(x)  # [T, E]
    _native.rms_norm(floats(x), floats(weight, width), eps, tokens, width, out.data_ptr())
    return out


def linear(x: Tensor, matrix: _native.Matrix) -> Tensor:
    tokens = x.shape[0]
    out = torch.empty(tokens, matrix.rows, dtype=FLOAT)  # [T, N]
    _native.linear(matrix, floats(x, tokens, matrix.cols), tokens, out.data_ptr())
    return out


def norm_linear(x: Tensor, weight: Tensor, eps: float, matrix: _native.Matrix, out: Tensor | None = None) -> Tensor:
    tokens, rows, width = x.shape[0], matrix.rows, matrix.cols
    if out is None:
        out = torch.empty(tokens, rows, dtype=FLOAT)  # [T, N]
    where = floats(out, tokens, rows)
    _native.norm_linear(matrix, floats(x, tokens, width), floats(weight, width), eps, tokens, where)
    return out


def soft_cap(x: Tensor, cap: float) -> None:
    _native.soft_cap(floats(x), cap, *x.shape)


def project_qkv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> Tensor:
    native_batch = _batch(batch)
    states = floats(x, native_batch.tokens, layer.input_width)
    q = torch.empty(native_batch.tokens, layer.query_width, dtype=FLOAT)  # [T, H * D]
    _native.project_qkv(layer.native, states, native_batch, pages_of(layer, pages), q.data_ptr())
    return q


def project_kv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> None:
    native_batch = _batch(batch)
    _native.project_kv(
        layer.native, floats(x, native_batch.tokens, layer.input_width), native_batch, pages_of(layer, pages)
    )


def attend(q: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages, x: Tensor) -> None:
    native_batch = _batch(batch)
    queries, states = floats(q, native_batch.tokens, layer.query_width), floats(x, native_batch.tokens, layer.width)
    _native.attend(layer.native, queries, native_batch, pages_of(layer, pages), states)


def mlp(x: Tensor, layer: MlpLayer, adapters: Tensor | None = None) -> None:
    tokens = x.shape[0]
    slots = 0 if adapters is None else integers(adapters, tokens)
    _native.mlp(layer.native, floats(x, tokens, layer.width), tokens, slots)


def moe(x: Tensor, layer: MoeLayer) -> None:
    _native.moe(layer.native, floats(x, x.shape[0], layer.width), x.shape[0])


def copy_kv(pages: Sequence[LayerPages], sources: Tensor, targets: Tensor) -> None:
    count = sources.shape[0]
    all_pages = [native_pages(layer) for layer in pages]
    _native.copy_kv(all_pages, integers(sources, count), integers(targets, count), count)


def pages_of(layer: AttentionLayer, pages: LayerPages) -> _native.Pages:
    """Return the native view of a layer's KV pages, built once."""
    if layer.pages is not pages or layer.native_pages is None:
        _, kv_heads, _, head_dim = pages.keys.shape
        if (kv_heads, head_dim) != (layer.kv_heads, layer.head_dim):
            expected = f"{layer.kv_heads} heads of {layer.head_dim}"
            raise ValueError(f"the pages hold {kv_heads} heads of {head_dim}, but the layer has {expected}")
        layer.native_pages, layer.pages = native_pages(pages), pages
    return layer.native_pages


def native_pages(pages: LayerPages) -> _native.Pages:
    keys, values = pages.keys, pages.values
    count, kv_heads, page_size, head_dim = keys.shape
    scales = [pages.key_scales, pages.value_scales]
    if any((part is not None) != (keys.dtype in LARGEST) for part in scales):
        raise ValueError(f"pages of {keys.dtype} with scales, or without them: int8 and e4m3 pages have both")
    key_scales, value_scales = (0 if part is None else floats(part, *keys.shape[:3]) for part in scales)
    return _native.Pages(
        keys=address(keys, keys.dtype),
        values=address(values, keys.dtype, *keys.shape),
        key_scales=key_scales,
        value_scales=value_scales,
        dtype=PAGE_TYPES[keys.dtype],
        pages=count,
        kv_heads=kv_heads,
        page_size=page_size,
        head_dim=head_dim,
    )


def _vector(name: str, tensor: Tensor | None, width: int) -> Tensor | None:
    """Return contiguous fp32 values whose last dimension is `width`."""
    if tensor is None:
        return None
    if tensor.shape[-1] != width:
        raise ValueError(f"`{name}` has {tensor.shape[-1]} numbers a row: expected {width}")
    return tensor.to(torch.float32).contiguous()


def _addresses(vectors: dict[str, Tensor | None]) -> dict[str, int]:
    return {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in vectors.items()}


class _LatestBatch(threading.local):
    """The native view (addresses) of the last batch of this thread."""

    batch: Batch | None = None
    native: _native.Batch | None = None


_latest = _LatestBatch()


def _batch(batch: Batch) -> _native.Batch:
    """Return the native view of a batch, built once per step rather than once per layer."""
    if _latest.batch is not batch:
        tokens, (rows, table_width) = batch.positions.shape[0], batch.page_tables.shape
        _latest.native = _native.Batch(
            positions=integers(batch.positions, tokens),
            slots=integers(batch.slots, tokens),
            query_starts=integers(batch.query_starts, rows + 1),
            page_tables=integers(batch.page_tables),
            parents=0 if batch.parents is None else integers(batch.parents, tokens),
            adapters=0 if batch.adapters is None else integers(batch.adapters, tokens),
            states=0 if batch.states is None else integers(batch.states, rows, 3),
            tokens=tokens,
            rows=rows,
            table_width=table_width,
        )
        _latest.batch = batch
    assert _latest.native is not None
    return _latest.native
