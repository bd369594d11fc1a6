"""The CPU backend: checks, allocates, and calls the native library with addresses.

Layers are built and checked in cpu_layers.py; a call asserts only what a mistake of ours would turn into a stray write.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from ..errors import UserError
from . import Batch, ChildTokens, LayerPages, LogitsProcessors, SamplingMetadata, TopLogprobs, _native
from .cpu_addresses import FLAG, FLOAT, INTEGER, address, floats, integers
from .cpu_layers import AttentionLayer, MlpLayer, native_pages, pages_of
from .cpu_layers import attention_layer as attention_layer
from .cpu_layers import matrix as matrix
from .cpu_layers import mlp_layer as mlp_layer
from .cpu_layers import vector as vector
from .cpu_prepare import advance as advance
from .cpu_prepare import block_inputs as block_inputs
from .cpu_prepare import draft_inputs as draft_inputs
from .cpu_prepare import settle as settle
from .cpu_verify import expand as expand
from .cpu_verify import force as force
from .cpu_verify import match as match
from .cpu_verify import native_choice
from .cpu_verify import reject as reject


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


def project_qkv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> Tensor:
    places = _batch(batch)
    states = floats(x, places.tokens, layer.input_width)
    q = torch.empty(places.tokens, layer.query_width, dtype=FLOAT)  # [T, H * D]
    _native.project_qkv(layer.native, states, places, pages_of(layer, pages), q.data_ptr())
    return q


def project_kv(x: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages) -> None:
    places = _batch(batch)
    _native.project_kv(layer.native, floats(x, places.tokens, layer.input_width), places, pages_of(layer, pages))


def attend(q: Tensor, layer: AttentionLayer, batch: Batch, pages: LayerPages, x: Tensor) -> None:
    places = _batch(batch)
    queries, states = floats(q, places.tokens, layer.query_width), floats(x, places.tokens, layer.width)
    _native.attend(layer.native, queries, places, pages_of(layer, pages), states)


def mlp(x: Tensor, layer: MlpLayer) -> None:
    _native.mlp(layer.native, floats(x, x.shape[0], layer.width), x.shape[0])


def stack(layers: Sequence[tuple[AttentionLayer, MlpLayer]], pages: Sequence[LayerPages]) -> Stack:
    places = [pages_of(attention, kept) for (attention, _), kept in zip(layers, pages, strict=True)]
    attentions, mlps = [attention.native for attention, _ in layers], [mlp.native for _, mlp in layers]
    widths = {layer.width for pair in layers for layer in pair} | {attention.input_width for attention, _ in layers}
    if len(widths) > 1:
        raise ValueError(f"the layers of a stack have different widths: {sorted(widths)}")
    return Stack(_native.Stack(attentions, mlps, places), max(widths, default=0), (tuple(layers), tuple(pages)))


def run_stack(x: Tensor, stack: Stack, batch: Batch) -> None:
    places = _batch(batch)
    _native.run_stack(stack.native, floats(x, places.tokens, stack.width), places)


def move(pages: Sequence[LayerPages], sources: Tensor, targets: Tensor) -> None:
    count = sources.shape[0]
    places = [native_pages(layer) for layer in pages]
    _native.move(places, integers(sources, count), integers(targets, count), count)


def edit_logits(logits: Tensor, edits: LogitsProcessors) -> None:
    (rows, vocabulary), entries = logits.shape, edits.tokens.shape[0]
    _native.edit_logits(
        floats(logits),
        rows,
        vocabulary,
        integers(edits.starts, rows + 1),
        integers(edits.tokens, entries),
        floats(edits.scale, entries),
        floats(edits.bias, entries),
        address(edits.only, FLAG, rows),
    )


def mask_logits(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    count, vocabulary = rows.shape[0], logits.shape[1]
    words = integers(masks, count, -(-vocabulary // 32))
    _native.mask_logits(floats(logits), logits.shape[0], vocabulary, words, integers(rows, count), count)


def sample(logits: Tensor, choice: SamplingMetadata, out: Tensor | None = None) -> Tensor:
    rows, vocabulary = logits.shape
    if out is None:
        out = torch.empty(rows, dtype=INTEGER)  # [R]
    _native.sample(floats(logits), rows, vocabulary, native_choice(choice, rows), integers(out, rows))
    return out


def branch(logits: Tensor, choice: SamplingMetadata, count: int) -> ChildTokens:
    rows, vocabulary = logits.shape
    out = ChildTokens(torch.empty(rows, count, dtype=INTEGER), torch.empty(rows, count, dtype=FLOAT))  # [R, count] each
    where = out.tokens.data_ptr(), out.logprobs.data_ptr()
    _native.branch(floats(logits), rows, vocabulary, native_choice(choice, rows), count, *where)
    return out


def top_logprobs(logits: Tensor, tokens: Tensor, count: int) -> TopLogprobs:
    rows, vocabulary = logits.shape
    count = min(count, vocabulary)
    out = TopLogprobs(
        chosen=torch.empty(rows, dtype=FLOAT),
        rank=torch.empty(rows, dtype=INTEGER),
        values=torch.empty(rows, count, dtype=FLOAT),
        tokens=torch.empty(rows, count, dtype=INTEGER),
    )
    _native.top_logprobs(
        floats(logits),
        rows,
        vocabulary,
        integers(tokens, rows),
        count,
        out.chosen.data_ptr(),
        out.rank.data_ptr(),
        out.values.data_ptr(),
        out.tokens.data_ptr(),
    )
    return out


def _batch(batch: Batch) -> _native.Batch:
    """The batch as the native code reads it: made once a step, not once a layer."""
    if _latest.batch is not batch:
        tokens, (rows, table_width) = batch.positions.shape[0], batch.page_tables.shape
        _latest.native = _native.Batch(
            positions=integers(batch.positions, tokens),
            slots=integers(batch.slots, tokens),
            query_starts=integers(batch.query_starts, rows + 1),
            page_tables=integers(batch.page_tables),
            parents=0 if batch.parents is None else integers(batch.parents, tokens),
            tokens=tokens,
            rows=rows,
            table_width=table_width,
        )
        _latest.batch = batch
    assert _latest.native is not None
    return _latest.native


def _start() -> None:
    """Settle the instruction set and the number of threads, so that a bad setting is refused here."""
    try:
        facts()
    except ValueError as error:
        raise UserError(str(error)) from None


_start()
