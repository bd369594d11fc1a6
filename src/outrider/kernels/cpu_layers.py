"""The layers of the CPU backend: weights packed for the native library, and the storage beside them. See cpu.py.

Native layers point into tensors (norms, biases, rotary tables), so the handles below keep those alive. A layer is
checked when it is built.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import AttentionWeights, LayerPages, MlpWeights, Weight, _native
from .blocks import FORMATS, row_bytes

PAGE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


@dataclass(slots=True)
class AttentionLayer:
    native: _native.Attention
    input_width: int  # of what is projected: E, or 2 * E in a head that reads two states
    width: int  # E
    query_width: int  # H * D
    kv_heads: int
    head_dim: int
    alive: tuple[Tensor | None, ...]
    pages: LayerPages | None = None  # the storage that `places` was made from
    places: _native.Pages | None = None


@dataclass(frozen=True, slots=True)
class MlpLayer:
    native: _native.Mlp
    width: int  # E
    alive: tuple[Tensor | None, ...]


def vector(values: Tensor) -> Tensor:
    return values


def matrix(weight: Weight) -> _native.Matrix:
    block = FORMATS[weight.kind]
    rows, columns = weight.shape
    expected = rows * row_bytes(weight.kind, columns)
    data = weight.data.contiguous()
    if data.dtype is not (block.dtype or torch.uint8) or data.nbytes != expected:
        raise ValueError(
            f"a `{weight.kind}` matrix of shape {tuple(weight.shape)} has {expected} bytes, "
            f"but its data is {data.nbytes} bytes of {data.dtype}"
        )
    return _native.Matrix(weight.kind, rows, columns, data.data_ptr())


def attention_layer(weights: AttentionWeights) -> AttentionLayer:
    input_width, width = weights.query.shape[1], weights.output.shape[0]
    queries, keys = weights.heads * weights.head_dim, weights.kv_heads * weights.head_dim
    vectors = {
        "norm": _vector("norm", weights.norm, input_width),
        "post_norm": _vector("post_norm", weights.post_norm, width),
        "query_norm": _vector("query_norm", weights.query_norm, weights.head_dim),
        "key_norm": _vector("key_norm", weights.key_norm, weights.head_dim),
        "query_bias": _vector("query_bias", weights.query_bias, queries),
        "key_bias": _vector("key_bias", weights.key_bias, keys),
        "value_bias": _vector("value_bias", weights.value_bias, keys),
        "output_bias": _vector("output_bias", weights.output_bias, width),
        "cos": _vector("cos", weights.cos, weights.head_dim // 2),
        "sin": _vector("sin", weights.sin, weights.head_dim // 2),
    }
    cos, sin = vectors["cos"], vectors["sin"]
    if (cos is None) != (sin is None) or (cos is not None and sin is not None and cos.shape != sin.shape):
        raise ValueError("`cos` and `sin` must be tables of one shape")
    native = _native.Attention(
        query=matrix(weights.query),
        key=matrix(weights.key),
        value=matrix(weights.value),
        output=matrix(weights.output),
        heads=weights.heads,
        kv_heads=weights.kv_heads,
        head_dim=weights.head_dim,
        window=weights.window,
        skip=weights.skip,
        causal=weights.causal,
        anchored=weights.anchored,
        scale=weights.scale,
        eps=weights.eps,
        **_addresses(vectors),
    )
    alive = tuple(vectors.values())
    return AttentionLayer(native, input_width, width, queries, weights.kv_heads, weights.head_dim, alive)


def mlp_layer(weights: MlpWeights) -> MlpLayer:
    hidden, width = weights.gate.shape
    vectors = {
        "norm": _vector("norm", weights.norm, width),
        "post_norm": _vector("post_norm", weights.post_norm, width),
        "gate_bias": _vector("gate_bias", weights.gate_bias, hidden),
        "up_bias": _vector("up_bias", weights.up_bias, hidden),
        "down_bias": _vector("down_bias", weights.down_bias, width),
    }
    native = _native.Mlp(
        gate=matrix(weights.gate),
        up=matrix(weights.up),
        down=matrix(weights.down),
        activation=ACTIVATIONS[weights.activation],
        eps=weights.eps,
        **_addresses(vectors),
    )
    return MlpLayer(native, width, tuple(vectors.values()))


def pages_of(layer: AttentionLayer, pages: LayerPages) -> _native.Pages:
    """The storage of a layer as the native code reads it: made once."""
    if layer.pages is not pages or layer.places is None:
        _, kv_heads, _, head_dim = pages.keys.shape
        assert kv_heads == layer.kv_heads and head_dim == layer.head_dim
        layer.places, layer.pages = native_pages(pages), pages
    return layer.places


def native_pages(pages: LayerPages) -> _native.Pages:
    keys, values = pages.keys, pages.values
    count, kv_heads, page_size, head_dim = keys.shape
    assert keys.shape == values.shape and keys.dtype is values.dtype
    assert keys.is_contiguous() and values.is_contiguous()
    return _native.Pages(
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        dtype=PAGE_TYPES[keys.dtype],
        pages=count,
        kv_heads=kv_heads,
        page_size=page_size,
        head_dim=head_dim,
    )


def _vector(name: str, tensor: Tensor | None, width: int) -> Tensor | None:
    """Floats whose last dimension is `width`, as the native code reads them."""
    if tensor is None:
        return None
    if tensor.shape[-1] != width:
        raise ValueError(f"`{name}` has {tensor.shape[-1]} numbers a row: expected {width}")
    return tensor.to(torch.float32).contiguous()


def _addresses(vectors: dict[str, Tensor | None]) -> dict[str, int]:
    return {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in vectors.items()}
