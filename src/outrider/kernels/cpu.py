"""The CPU backend: checks, allocates, and calls the native library with addresses.

Native layers point into tensors (norms, biases, rotary tables), so the handles below keep those alive. A layer is
checked when it is built; a call asserts only what a mistake of ours would turn into a stray write.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from ..types import UserError
from . import AttentionWeights, Batch, Choice, Edits, LayerPages, MlpWeights, TopLogprobs, Weight, _native
from .blocks import FORMATS, row_bytes

FLOAT, INTEGER = torch.float32, torch.int32
PAGE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


@dataclass(slots=True)
class AttentionLayer:
    native: _native.Attention
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


@dataclass(frozen=True, slots=True)
class Stack:
    native: _native.Stack
    width: int  # E
    alive: tuple[object, ...]


class _Latest(threading.local):
    """The addresses of the batch that this thread saw last; nothing of a batch but where it lies."""

    batch: Batch | None = None
    native: _native.Batch | None = None


_latest = _Latest()


class Facts(TypedDict):
    level: str
    levels: list[str]  # that this machine and this build offer, the best last
    threads: int


def facts() -> Facts:
    return {"level": _native.level_name(), "levels": _native.available_levels(), "threads": _native.thread_count()}


def set_threads(count: int) -> None:
    try:
        _native.set_thread_count(count)
    except ValueError as error:
        raise UserError(str(error)) from None


def busy_seconds() -> float:
    """Seconds that this process has spent in kernels so far."""
    return _native.busy_seconds()


def stream_read(tensor: Tensor) -> int:
    """Read a contiguous tensor with all threads, as fast as memory gives it; a checksum, so that it must be read."""
    assert tensor.is_contiguous()
    return _native.stream_read(tensor.data_ptr(), tensor.nbytes)


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
    width = weights.query.shape[1]
    queries, keys = weights.heads * weights.head_dim, weights.kv_heads * weights.head_dim
    vectors = {
        "norm": _vector("norm", weights.norm, width),
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
        scale=weights.scale,
        eps=weights.eps,
        **_addresses(vectors),
    )
    return AttentionLayer(native, width, queries, weights.kv_heads, weights.head_dim, tuple(vectors.values()))


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


def embed(table: _native.Matrix, tokens: Tensor, scale: float) -> Tensor:
    count = tokens.shape[0]
    out = torch.empty(count, table.cols, dtype=torch.float32)  # [T, E]
    _native.embed(table, _integers(tokens), count, scale, out.data_ptr())
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    tokens, width = x.shape
    assert weight.shape[0] == width
    out = torch.empty_like(x)  # [T, E]
    _native.rms_norm(_floats(x), _floats(weight), eps, tokens, width, out.data_ptr())
    return out


def linear(x: Tensor, matrix: _native.Matrix) -> Tensor:
    tokens, width = x.shape
    assert width == matrix.cols
    out = torch.empty(tokens, matrix.rows, dtype=torch.float32)  # [T, N]
    _native.linear(matrix, _floats(x), tokens, out.data_ptr())
    return out


def norm_linear(x: Tensor, weight: Tensor, eps: float, matrix: _native.Matrix, out: Tensor | None = None) -> Tensor:
    tokens, width = x.shape
    assert width == matrix.cols and weight.shape[0] == width
    if out is None:
        out = torch.empty(tokens, matrix.rows, dtype=torch.float32)  # [T, N]
    assert out.shape == (tokens, matrix.rows)
    _native.norm_linear(matrix, _floats(x), _floats(weight), eps, tokens, _floats(out))
    return out


def project_qkv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> Tensor:
    tokens, width = x.shape
    places = _batch(batch)
    assert width == layer.width and tokens == places.tokens
    q = torch.empty(tokens, layer.query_width, dtype=FLOAT)  # [T, H * D]
    _native.project_qkv(layer.native, _floats(x), places, _pages(layer, pages), q.data_ptr())
    return q


def attend(q: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages, x: Tensor) -> None:
    places = _batch(batch)
    assert x.shape == (places.tokens, layer.width) and q.shape == (places.tokens, layer.query_width)
    _native.attend(layer.native, _floats(q), places, _pages(layer, pages), _floats(x))


def mlp(x: Tensor, layer: MlpLayer) -> None:
    tokens, width = x.shape
    assert width == layer.width
    _native.mlp(layer.native, _floats(x), tokens)


def stack(layers: Sequence[tuple[AttentionLayer, MlpLayer]], pages: Sequence[LayerPages]) -> Stack:
    places = [_pages(attention, kept) for (attention, _), kept in zip(layers, pages, strict=True)]
    attentions, mlps = [attention.native for attention, _ in layers], [mlp.native for _, mlp in layers]
    widths = {layer.width for pair in layers for layer in pair}
    if len(widths) > 1:
        raise ValueError(f"the layers of a stack have different widths: {sorted(widths)}")
    return Stack(_native.Stack(attentions, mlps, places), max(widths, default=0), (tuple(layers), tuple(pages)))


def run_stack(x: Tensor, stack: Stack, batch: Batch) -> None:
    tokens, width = x.shape
    assert width == stack.width and tokens == batch.positions.shape[0]
    _native.run_stack(stack.native, _floats(x), _batch(batch))


def edit_logits(logits: Tensor, edits: Edits) -> None:
    rows, vocabulary = logits.shape
    assert edits.only.dtype is torch.uint8 and edits.starts.shape[0] == rows + 1
    _native.edit_logits(
        _floats(logits),
        rows,
        vocabulary,
        _integers(edits.starts),
        _integers(edits.tokens),
        _floats(edits.scale),
        _floats(edits.bias),
        edits.only.data_ptr(),
    )


def sample(logits: Tensor, choice: Choice, out: Tensor | None = None) -> Tensor:
    rows, vocabulary = logits.shape
    assert choice.seeds.dtype is torch.int64 and choice.temperature.shape[0] == rows
    if out is None:
        out = torch.empty(rows, dtype=torch.int32)  # [R]
    assert out.shape[0] == rows
    _native.sample(
        _floats(logits),
        rows,
        vocabulary,
        _floats(choice.temperature),
        _integers(choice.top_k),
        _floats(choice.top_p),
        _floats(choice.min_p),
        choice.seeds.data_ptr(),
        _integers(choice.positions),
        _integers(out),
    )
    return out


def top_logprobs(logits: Tensor, tokens: Tensor, count: int) -> TopLogprobs:
    rows, vocabulary = logits.shape
    count = min(count, vocabulary)
    out = TopLogprobs(
        chosen=torch.empty(rows, dtype=torch.float32),
        rank=torch.empty(rows, dtype=torch.int32),
        values=torch.empty(rows, count, dtype=torch.float32),
        tokens=torch.empty(rows, count, dtype=torch.int32),
    )
    _native.top_logprobs(
        _floats(logits),
        rows,
        vocabulary,
        _integers(tokens),
        count,
        out.chosen.data_ptr(),
        out.rank.data_ptr(),
        out.values.data_ptr(),
        out.tokens.data_ptr(),
    )
    return out


def _floats(tensor: Tensor) -> int:
    assert tensor.dtype is FLOAT and tensor.is_contiguous()
    return tensor.data_ptr()


def _integers(tensor: Tensor) -> int:
    assert tensor.dtype is INTEGER and tensor.is_contiguous()
    return tensor.data_ptr()


def _batch(batch: Batch) -> _native.Batch:
    """The batch as the native code reads it: made once a step, not once a layer."""
    if _latest.batch is not batch:
        tables, tokens = batch.page_tables, batch.positions.shape[0]
        rows, table_width = tables.shape
        assert batch.slots.shape[0] == tokens and batch.query_starts.shape[0] == rows + 1
        _latest.native = _native.Batch(
            positions=_integers(batch.positions),
            slots=_integers(batch.slots),
            query_starts=_integers(batch.query_starts),
            page_tables=_integers(tables),
            tokens=tokens,
            rows=rows,
            table_width=table_width,
        )
        _latest.batch = batch
    assert _latest.native is not None
    return _latest.native


def _pages(layer: AttentionLayer, pages: LayerPages) -> _native.Pages:
    if layer.pages is not pages or layer.places is None:
        keys, values = pages.keys, pages.values
        _, kv_heads, page_size, head_dim = keys.shape
        assert kv_heads == layer.kv_heads and head_dim == layer.head_dim and keys.shape == values.shape
        assert keys.dtype is values.dtype and keys.is_contiguous() and values.is_contiguous()
        layer.places = _native.Pages(
            keys=keys.data_ptr(), values=values.data_ptr(), dtype=PAGE_TYPES[keys.dtype], page_size=page_size
        )
        layer.pages = pages
    return layer.places


def _vector(name: str, tensor: Tensor | None, width: int) -> Tensor | None:
    """Floats whose last dimension is `width`, as the native code reads them."""
    if tensor is None:
        return None
    if tensor.shape[-1] != width:
        raise ValueError(f"`{name}` has {tensor.shape[-1]} numbers a row: expected {width}")
    return tensor.to(torch.float32).contiguous()


def _addresses(vectors: dict[str, Tensor | None]) -> dict[str, int]:
    return {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in vectors.items()}


def _start() -> None:
    """Settle the instruction set and the number of threads, so that a bad setting is refused here."""
    try:
        facts()
    except ValueError as error:
        raise UserError(str(error)) from None


_start()
