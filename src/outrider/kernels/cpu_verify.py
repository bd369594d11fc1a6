"""Verification by the native library: expand, match, force, reject. See cpu.py.

Lengths are checked here, since a wrong one would turn into a stray read; starts, parents and tokens in native code.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from . import Choice, Drafts, Kept, _native

FLOAT, INTEGER, LONG, FLAG = torch.float32, torch.int32, torch.int64, torch.uint8


def expand(choice: Choice, drafts: Drafts) -> Choice:
    rows = drafts.tokens.shape[0]
    out = Choice(
        temperature=torch.empty(rows, dtype=FLOAT),
        top_k=torch.empty(rows, dtype=INTEGER),
        top_p=torch.empty(rows, dtype=FLOAT),
        min_p=torch.empty(rows, dtype=FLOAT),
        seeds=torch.empty(rows, dtype=LONG),
        positions=torch.empty(rows, dtype=INTEGER),
        stream=choice.stream,
        epochs=None if choice.epochs is None else torch.empty(rows, dtype=INTEGER),
    )
    _native.expand(
        native_choice(choice, drafts.starts.shape[0] - 1),
        _native_drafts(drafts),
        out.temperature.data_ptr(),
        out.top_k.data_ptr(),
        out.top_p.data_ptr(),
        out.min_p.data_ptr(),
        out.seeds.data_ptr(),
        out.positions.data_ptr(),
        0 if out.epochs is None else out.epochs.data_ptr(),
    )
    return out


def match(sampled: Tensor, drafts: Drafts) -> Kept:
    kept = _room(drafts)
    _native.match(_address(sampled, INTEGER, drafts.tokens.shape[0]), _native_drafts(drafts), *_places(kept))
    return kept


def force(sampled: Tensor, drafts: Drafts, rates: Tensor, choice: Choice) -> Kept:
    if rates.shape[0] < drafts.width:
        raise ValueError(f"{rates.shape[0]} rates cannot serve drafts of {drafts.width} tokens")
    kept, rows = _room(drafts), drafts.tokens.shape[0]
    _native.force(
        _address(sampled, INTEGER, rows),
        _native_drafts(drafts),
        _address(rates, FLOAT, rates.shape[0]),
        native_choice(choice, rows),
        *_places(kept),
    )
    return kept


def reject(logits: Tensor, drafts: Drafts, choice: Choice, block: bool, again: bool = False) -> Kept:
    rows, vocabulary = logits.shape
    assert rows == drafts.tokens.shape[0] and logits.dtype is FLOAT and logits.is_contiguous()
    kept = _room(drafts)
    _native.reject(
        logits.data_ptr(),
        vocabulary,
        _native_drafts(drafts, vocabulary),
        native_choice(choice, rows),
        block,
        again,
        *_places(kept),
    )
    return kept


class _Latest(threading.local):
    """The addresses of the choice that this thread saw last: decoding goes on with one for many steps."""

    choice: Choice | None = None
    rows: int = 0
    native: _native.Choice | None = None


_latest = _Latest()


def native_choice(choice: Choice, rows: int) -> _native.Choice:
    if _latest.choice is not choice or _latest.rows != rows or _latest.native is None:
        _latest.native = _addresses(choice, rows)
        _latest.choice, _latest.rows = choice, rows
    return _latest.native


def _addresses(choice: Choice, rows: int) -> _native.Choice:
    return _native.Choice(
        temperature=_address(choice.temperature, FLOAT, rows),
        top_k=_address(choice.top_k, INTEGER, rows),
        top_p=_address(choice.top_p, FLOAT, rows),
        min_p=_address(choice.min_p, FLOAT, rows),
        seeds=_address(choice.seeds, LONG, rows),
        positions=_address(choice.positions, INTEGER, rows),
        epochs=0 if choice.epochs is None else _address(choice.epochs, INTEGER, rows),
        stream=choice.stream,
    )


def _native_drafts(drafts: Drafts, vocabulary: int = 0) -> _native.Drafts:
    """With what the tokens were drawn from where a vocabulary is given."""
    rows, logits, drawn = drafts.tokens.shape[0], drafts.logits, drafts.drawn
    speaks = vocabulary > 0 and logits is not None and drawn is not None
    assert drafts.width >= 0
    return _native.Drafts(
        starts=_address(drafts.starts, INTEGER, drafts.starts.shape[0]),
        tokens=_address(drafts.tokens, INTEGER, rows),
        parents=_address(drafts.parents, INTEGER, rows),
        requests=drafts.starts.shape[0] - 1,
        rows=rows,
        width=drafts.width,
        logits=_address(logits, FLOAT, rows, vocabulary) if speaks and logits is not None else 0,
        drawn=_address(drawn, FLAG, rows) if speaks and drawn is not None else 0,
    )


def _room(drafts: Drafts) -> Kept:
    requests = drafts.starts.shape[0] - 1
    tokens, rows = torch.empty(2, requests, drafts.width + 1, dtype=INTEGER).unbind()  # [B, width + 1] each
    return Kept(tokens, rows, torch.empty(requests, dtype=INTEGER))


def _places(kept: Kept) -> tuple[int, int, int]:
    return kept.tokens.data_ptr(), kept.rows.data_ptr(), kept.counts.data_ptr()


def _address(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    assert tensor.dtype is dtype and tensor.is_contiguous() and tensor.shape == shape
    return tensor.data_ptr()
