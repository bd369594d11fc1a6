"""What is done to logits before a choice, and told about them after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import LogitsProcessors, TopLogprobs
from .sampling import PART, Found, merge, read_part, share_of, store_best, store_mass, total_mass
from .thresholds import LOWEST, float_key

BLOCK = 1024


def process_logits(logits: Tensor, processors: LogitsProcessors) -> None:
    rows, vocabulary = logits.shape
    if rows:
        _edit[(rows,)](
            logits,
            logits.stride(0),
            vocabulary,
            processors.starts,
            processors.tokens,
            processors.scale,
            processors.bias,
            processors.only,
            torch.empty_like(processors.scale),
            processors.tokens.shape[0],
            block=BLOCK,
            num_warps=8,
        )


def mask_logits(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    count, vocabulary = rows.shape[0], logits.shape[1]
    if count:
        _mask[(count, triton.cdiv(vocabulary, BLOCK))](
            logits,
            logits.stride(0),
            logits.shape[0],
            vocabulary,
            masks,
            masks.stride(0),
            rows,
            block=BLOCK,
            num_warps=4,
        )


def top_logprobs(logits: Tensor, tokens: Tensor, count: int) -> TopLogprobs:
    rows, vocabulary = logits.shape
    count = min(count, vocabulary)
    chosen, values = (torch.empty(size, dtype=torch.float32, device=logits.device) for size in ((rows,), (rows, count)))
    rank, likeliest = (torch.empty(size, dtype=torch.int32, device=logits.device) for size in ((rows,), (rows, count)))
    if rows:
        found = Found(logits, count, True)
        likelier = torch.empty((rows, found.parts), dtype=torch.int32, device=logits.device)
        _likely[(rows, found.parts)](
            logits,
            logits.stride(0),
            vocabulary,
            tokens,
            found.keys,
            found.tokens,
            found.peaks,
            found.masses,
            likelier,
            count=found.count,
            part=PART,
            num_warps=8,
        )
        _rank[(rows,)](
            logits,
            logits.stride(0),
            vocabulary,
            tokens,
            found.peaks,
            found.masses,
            likelier,
            chosen,
            rank,
            parts=found.parts,
            padded=triton.next_power_of_2(found.parts),
            num_warps=1,
        )
        if count:
            merge(logits, found, None, likeliest, values, banned=True)
    return TopLogprobs(chosen, rank, values, likeliest)


@triton.jit(do_not_specialize=["entries"])
def _edit(
    logits,
    stride,
    vocabulary,
    starts,
    tokens,
    scales,
    biases,
    only,
    edited,
    entries,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    start = tl.maximum(tl.load(starts + row), 0)
    end = tl.minimum(tl.load(starts + row + 1), entries)
    at = start
    while at < end:
        entry = at + tl.arange(0, block)
        token, known = _entries(tokens, entry, end, vocabulary)
        before = tl.load(logits + token, mask=known, other=0.0)
        scale = tl.load(scales + entry, mask=known, other=1.0)
        after = tl.where(before > 0, tl.div_rn(before, scale), before * scale)
        tl.store(edited + entry, after + tl.load(biases + entry, mask=known, other=0.0), mask=known)
        at += block
    tl.debug_barrier()  # all is read before any is written
    if tl.load(only + row) != 0:
        first = 0
        while first < vocabulary:
            column = first + tl.arange(0, block)
            tl.store(logits + column, -float("inf"), mask=column < vocabulary)
            first += block
        tl.debug_barrier()  # the listed tokens are written after the others
    at = start
    while at < end:
        entry = at + tl.arange(0, block)
        token, known = _entries(tokens, entry, end, vocabulary)
        tl.store(logits + token, tl.load(edited + entry, mask=known, other=0.0), mask=known)
        at += block


@triton.jit
def _mask(logits, stride, rows, vocabulary, masks, words, places, block: tl.constexpr):
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(places + mask).to(tl.int64)
    token = tl.program_id(1) * block + tl.arange(0, block)
    known = (token < vocabulary) & (row >= 0) & (row < rows)
    word = tl.load(masks + mask * words + token // 32, mask=known, other=-1)
    refused = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * stride + token, -float("inf"), mask=known & refused)


@triton.jit
def _entries(tokens, entry, end, vocabulary):
    """The tokens of these entries, and which of them there are."""
    token = tl.load(tokens + entry, mask=entry < end, other=-1)
    return token, (token >= 0) & (token < vocabulary)


@triton.jit
def _likely(
    logits,
    stride,
    vocabulary,
    chosen,
    keys,
    tokens,
    peaks,
    masses,
    likelier,
    count: tl.constexpr,
    part: tl.constexpr,
):
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logit, token = read_part(logits + row * stride, place, vocabulary, part)
    at = row * tl.num_programs(1) + place
    key = tl.where(token < vocabulary, float_key(logit), LOWEST)
    store_best(key, place * part, keys + at * count, tokens + at * count, count, part)
    store_mass(logit, 1.0, peaks + at, masses + at)
    taken = _logit_of(logits + row * stride, tl.load(chosen + row), vocabulary)
    tl.store(likelier + at, tl.sum((logit > taken).to(tl.int32), 0))


@triton.jit
def _rank(
    logits,
    stride,
    vocabulary,
    tokens,
    peaks,
    masses,
    likelier,
    chosen,
    rank,
    parts: tl.constexpr,
    padded: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    count = tl.load(likelier + row * parts + column, mask=column < parts, other=0)
    most, size = total_mass(peaks + row * parts, masses + row * parts, 1.0, parts, padded)
    taken = _logit_of(logits + row * stride, tl.load(tokens + row), vocabulary)
    tl.store(chosen + row, share_of(taken, 1.0, most, size))
    tl.store(rank + row, 1 + tl.sum(count, 0))


@triton.jit
def _logit_of(row, token, vocabulary):
    """The logit of a token; that of another where there is no such token."""
    return tl.load(row + tl.minimum(tl.maximum(token, 0), vocabulary - 1))
