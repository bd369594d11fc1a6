"""Logits become tokens, by the native library: processors, masks, sampling, log-probabilities."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from .. import _native
from ..structures import ChildTokens, LogitsProcessors, SamplingMetadata, TopLogprobs
from .addresses import FLAG, FLOAT, INTEGER, LONG, address, floats, integers


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


class _Latest(threading.local):
    """The addresses of the choice that this thread saw last: decoding goes on with one for many steps."""

    choice: SamplingMetadata | None = None
    rows: int = 0
    native: _native.Choice | None = None


_latest = _Latest()


def native_choice(choice: SamplingMetadata, rows: int) -> _native.Choice:
    if _latest.choice is not choice or _latest.rows != rows or _latest.native is None:
        _latest.native = _addresses(choice, rows)
        _latest.choice, _latest.rows = choice, rows
    return _latest.native


def _addresses(choice: SamplingMetadata, rows: int) -> _native.Choice:
    return _native.Choice(
        temperature=floats(choice.temperature, rows),
        top_k=integers(choice.top_k, rows),
        top_p=floats(choice.top_p, rows),
        min_p=floats(choice.min_p, rows),
        seeds=address(choice.seeds, LONG, rows),
        positions=integers(choice.positions, rows),
        epochs=0 if choice.epochs is None else integers(choice.epochs, rows),
        stream=choice.stream,
    )
