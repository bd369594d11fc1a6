"""Logits processors, token masks, and log-probabilities."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import LogitsProcessors, TopLogprobs
from .sampling import PART, PartBest, logprob_of, logsumexp_of_parts, merge, read_part, store_best, store_sum
from .thresholds import MIN_KEY, float_key

BLOCK = 1024


def process_logits(logits: Tensor, processors: LogitsProcessors) -> None:
    rows, vocabulary = logits.shape
    if rows:
        _process[(rows,)](
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
    rank, top_tokens = (torch.empty(size, dtype=torch.int32, device=logits.device) for size in ((rows,), (rows, count)))
    if rows:
        part_best = PartBest(logits, count, True)
        larger = torch.empty((rows, part_best.parts), dtype=torch.int32, device=logits.device)
        _best_and_rank[(rows, part_best.parts)](
            logits,
            logits.stride(0),
            vocabulary,
            tokens,
            part_best.keys,
            part_best.tokens,
            part_best.maxima,
            part_best.exp_sums,
            larger,
            count=part_best.count,
            part=PART,
            num_warps=8,
        )
        _rank[(rows,)](
            logits,
            logits.stride(0),
            vocabulary,
            tokens,
            part_best.maxima,
            part_best.exp_sums,
            larger,
            chosen,
            rank,
            parts=part_best.parts,
            padded=triton.next_power_of_2(part_best.parts),
            num_warps=1,
        )
        if count:
            merge(logits, part_best, None, top_tokens, values, banned=True)
    return TopLogprobs(chosen, rank, values, top_tokens)


@triton.jit(do_not_specialize=["entries"])
def _process(
    logits,
    stride,
    vocabulary,
    starts,
    tokens,
    scales,
    biases,
    only,
    processed,
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
        tl.store(processed + entry, after + tl.load(biases + entry, mask=known, other=0.0), mask=known)
        at += block
    tl.debug_barrier()  # all logits are read before any is written
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
        tl.store(logits + token, tl.load(processed + entry, mask=known, other=0.0), mask=known)
        at += block


@triton.jit
def _mask(logits, stride, rows, vocabulary, masks, words, row_ids, block: tl.constexpr):
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + mask).to(tl.int64)
    token = tl.program_id(1) * block + tl.arange(0, block)
    known = (token < vocabulary) & (row >= 0) & (row < rows)
    word = tl.load(masks + mask * words + token // 32, mask=known, other=-1)
    refused = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * stride + token, -float("inf"), mask=known & refused)


@triton.jit
def _entries(tokens, entry, end, vocabulary):
    """Load the tokens of these entries, and which of them are in the vocabulary."""
    token = tl.load(tokens + entry, mask=entry < end, other=-1)
    return token, (token >= 0) & (token < vocabulary)


@triton.jit
def _best_and_rank(
    logits,
    stride,
    vocabulary,
    chosen,
    keys,
    tokens,
    maxima,
    exp_sums,
    larger,
    count: tl.constexpr,
    part: tl.constexpr,
):
    row, part_index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logit, token = read_part(logits + row * stride, part_index, vocabulary, part)
    at = row * tl.num_programs(1) + part_index
    key = tl.where(token < vocabulary, float_key(logit), MIN_KEY)
    store_best(key, part_index * part, keys + at * count, tokens + at * count, count, part)
    store_sum(logit, 1.0, maxima + at, exp_sums + at)
    taken = _logit_of(logits + row * stride, tl.load(chosen + row), vocabulary)
    tl.store(larger + at, tl.sum((logit > taken).to(tl.int32), 0))


@triton.jit
def _rank(
    logits,
    stride,
    vocabulary,
    tokens,
    maxima,
    exp_sums,
    larger,
    chosen,
    rank,
    parts: tl.constexpr,
    padded: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    count = tl.load(larger + row * parts + column, mask=column < parts, other=0)
    largest, size = logsumexp_of_parts(maxima + row * parts, exp_sums + row * parts, 1.0, parts, padded)
    taken = _logit_of(logits + row * stride, tl.load(tokens + row), vocabulary)
    tl.store(chosen + row, logprob_of(taken, 1.0, largest, size))
    tl.store(rank + row, 1 + tl.sum(count, 0))


@triton.jit
def _logit_of(row, token, vocabulary):
    """Load the logit of a token; ids outside the vocabulary are clamped."""
    return tl.load(row + tl.minimum(tl.maximum(token, 0), vocabulary - 1))
