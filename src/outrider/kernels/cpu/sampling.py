"""Logits processors, masks, sampling and log-probabilities, by the native library."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ..structures import ChildTokens, LogitsProcessors, SamplingMetadata, TopLogprobs
from . import _native
from .runtime import FLAG, FLOAT, INTEGER, LONG, address, floats, integers


def process_logits(logits: Tensor, processors: LogitsProcessors) -> None:
    (rows, vocabulary), entries = logits.shape, processors.tokens.shape[0]
    _native.process_logits(
        floats(logits),
        rows,
        vocabulary,
        integers(processors.starts, rows + 1),
        integers(processors.tokens, entries),
        floats(processors.scale, entries),
        floats(processors.bias, entries),
        address(processors.only, FLAG, rows),
    )


def mask_logits(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    count, vocabulary = rows.shape[0], logits.shape[1]
    words = integers(masks, count, -(-vocabulary // 32))
    _native.mask_logits(floats(logits), logits.shape[0], vocabulary, words, integers(rows, count), count)


def sample(logits: Tensor, sampling: SamplingMetadata, out: Tensor | None = None) -> Tensor:
    rows, vocabulary = logits.shape
    if out is None:
        out = torch.empty(rows, dtype=INTEGER)  # [R]
    _native.sample(floats(logits), rows, vocabulary, native_sampling(sampling, rows), integers(out, rows))
    return out


def sample_children(logits: Tensor, sampling: SamplingMetadata, count: int) -> ChildTokens:
    rows, vocabulary = logits.shape
    out = ChildTokens(torch.empty(rows, count, dtype=INTEGER), torch.empty(rows, count, dtype=FLOAT))  # [R, count] each
    where = out.tokens.data_ptr(), out.logprobs.data_ptr()
    _native.sample_children(floats(logits), rows, vocabulary, native_sampling(sampling, rows), count, *where)
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


class _LatestSampling(threading.local):
    """The native view of the last sampling metadata of this thread: decoding reuses one for many steps."""

    sampling: SamplingMetadata | None = None
    rows: int = 0
    native: _native.SamplingMetadata | None = None


_latest = _LatestSampling()


def native_sampling(sampling: SamplingMetadata, rows: int) -> _native.SamplingMetadata:
    if _latest.sampling is not sampling or _latest.rows != rows or _latest.native is None:
        _latest.native = _addresses(sampling, rows)
        _latest.sampling, _latest.rows = sampling, rows
    return _latest.native


def _addresses(sampling: SamplingMetadata, rows: int) -> _native.SamplingMetadata:
    return _native.SamplingMetadata(
        temperature=floats(sampling.temperature, rows),
        top_k=integers(sampling.top_k, rows),
        top_p=floats(sampling.top_p, rows),
        min_p=floats(sampling.min_p, rows),
        seeds=address(sampling.seeds, LONG, rows),
        positions=integers(sampling.positions, rows),
        epochs=0 if sampling.epochs is None else integers(sampling.epochs, rows),
        stream=sampling.stream,
    )
