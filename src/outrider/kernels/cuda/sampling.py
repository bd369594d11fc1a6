"""Sampling, log-probabilities, logits processors and token masks.

To sample, each program finds the best tokens of one part of a row; a second kernel merges the parts.

Rows are split at the same token ids in any batch, so that not even a log-probability depends on the batch. Scores are
passed as integer keys (thresholds.float_key): integers have no NaN, and MIN_KEY, below -inf, marks taken tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import ChildTokens, LogitsProcessors, SamplingMetadata, TopLogprobs
from .device import LAUNCH, wait
from .noise import as_gumbel, philox_run
from .thresholds import MAX_LOGIT, MIN_KEY, NEG_INF_KEY, find_thresholds, float_key, is_kept

PART = 2048  # tokens per program
BLOCK = 1024  # tokens per iteration or program of the logits processors and masks


def sample(logits: Tensor, sampling: SamplingMetadata, out: Tensor | None = None) -> Tensor:
    rows = logits.shape[0]
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out  # [R]
    _sample_best(logits, sampling, 1, tokens, None)
    return tokens


def sample_children(logits: Tensor, sampling: SamplingMetadata, count: int) -> ChildTokens:
    rows = logits.shape[0]
    tokens = torch.empty((rows, count), dtype=torch.int32, device=logits.device)
    logprobs = torch.empty((rows, count), dtype=torch.float32, device=logits.device)
    if count:
        _sample_best(logits, sampling, count, tokens, logprobs)
    return ChildTokens(tokens, logprobs)


def _sample_best(
    logits: Tensor, sampling: SamplingMetadata, count: int, tokens: Tensor, logprobs: Tensor | None
) -> None:
    """Write the best tokens of each row, and their log-probabilities if `logprobs` is given."""
    rows, vocabulary = logits.shape
    if not rows:
        return
    thresholds, last_ids = (None, None) if sampling.greedy else find_thresholds(logits, sampling)
    part_best = PartBest(logits, count, logprobs is not None)
    _best[(rows, part_best.parts)](
        logits,
        logits.stride(0),
        vocabulary,
        sampling.temperature,
        sampling.seeds,
        sampling.positions,
        sampling.epochs,
        thresholds,
        last_ids,
        part_best.keys,
        part_best.tokens,
        part_best.maxima,
        part_best.exp_sums,
        sampling.stream,
        count=part_best.count,
        part=PART,
        num_warps=8,
        **LAUNCH,
    )
    merge(logits, part_best, sampling.temperature, tokens, logprobs)


class PartBest:
    """The best tokens and the softmax sums of the parts of each row."""

    def __init__(self, logits: Tensor, count: int, with_sums: bool) -> None:
        rows, vocabulary = logits.shape
        self.parts, self.count = triton.cdiv(vocabulary, PART), min(count, PART)
        ids = torch.empty((2, rows, self.parts, self.count), dtype=torch.int32, device=logits.device)
        self.keys, self.tokens = ids.unbind()  # [R, parts, count], the best first
        sums = torch.empty((2, rows, self.parts), dtype=torch.float32, device=logits.device) if with_sums else None
        # [R, parts]: the largest logit, and the sum of exp((logit - that) / temperature)
        self.maxima: Tensor | None = None if sums is None else sums[0]
        self.exp_sums: Tensor | None = None if sums is None else sums[1]


def merge(
    logits: Tensor,
    part_best: PartBest,
    temperature: Tensor | None,
    tokens: Tensor,
    logprobs: Tensor | None,
    banned: bool = False,
) -> None:
    """Merge the parts into tokens [R] or [R, count]. Tokens with logit -inf are listed only if `banned`."""
    count = 1 if tokens.ndim == 1 else tokens.shape[1]
    _merge[(logits.shape[0],)](
        logits,
        logits.stride(0),
        logits.shape[1],
        temperature,
        part_best.keys,
        part_best.tokens,
        part_best.maxima,
        part_best.exp_sums,
        tokens,
        tokens.stride(0),
        logprobs,
        part_best.parts * part_best.count,
        parts=part_best.parts,
        padded_parts=triton.next_power_of_2(part_best.parts),
        padded=triton.next_power_of_2(part_best.parts * part_best.count),
        count=count,
        banned=banned,
        num_warps=4,
        **LAUNCH,
    )


@triton.jit(
    do_not_specialize=["noise_stream"],
    do_not_specialize_on_alignment=[
        "temperature",
        "seeds",
        "positions",
        "epochs",
        "thresholds",
        "last_ids",
        "keys",
        "tokens",
        "maxima",
        "exp_sums",
    ],
)
def _best(
    logits,
    stride,
    vocabulary,
    temperature,
    seeds,
    positions,
    epochs,
    thresholds,
    last_ids,
    keys,
    tokens,
    maxima,
    exp_sums,
    noise_stream,
    count: tl.constexpr,
    part: tl.constexpr,
):
    wait()
    row, part_index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temp = tl.load(temperature + row)
    logit, token = read_part(logits + row * stride, part_index, vocabulary, part)
    score = logit
    if thresholds is not None:  # noqa: SIM102 - it is known when this is compiled, the other is not
        if temp > 0:
            seed, position = tl.load(seeds + row), tl.load(positions + row)
            epoch = 0 if epochs is None else tl.load(epochs + row)
            noise = as_gumbel(philox_run(seed, position, part_index * part, noise_stream, epoch, part))
            kept = is_kept(logit, token, tl.load(thresholds + row), tl.load(last_ids + row))
            score = tl.where(kept, tl.div_rn(logit, temp) + noise, -float("inf"))
    at = row * tl.num_programs(1) + part_index
    key = tl.where(token < vocabulary, float_key(score), MIN_KEY)
    store_best(key, part_index * part, keys + at * count, tokens + at * count, count, part)
    if maxima is not None:
        store_sum(logit, tl.where(temp > 0, temp, 1.0), maxima + at, exp_sums + at)


@triton.jit
def read_part(row, part_index, vocabulary, part: tl.constexpr):
    """Load the logits of a part, -inf in place of NaN and beyond the row, and their ids."""
    token = part_index * part + tl.arange(0, part)
    logit = tl.load(row + token, mask=token < vocabulary, other=-float("inf"))
    return tl.where(logit == logit, logit, -float("inf")), token


@triton.jit
def store_best(key, first, keys, tokens, count: tl.constexpr, part: tl.constexpr):
    """Store the `count` largest keys of a part; ties: the lower id first."""
    column = tl.arange(0, part)
    for index in range(count):
        best, at = tl.max(key, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(keys + index, best)
        tl.store(tokens + index, first + at)
        key = tl.where(column == at, MIN_KEY, key)


@triton.jit
def store_sum(logit, temp, part_max, exp_sum):
    """Store the largest logit of a part, and the sum of exp((logit - largest) / temperature)."""
    finite = tl.minimum(logit, MAX_LOGIT)
    largest = tl.maximum(tl.max(finite, 0), -MAX_LOGIT)  # finite, so that differences are defined
    tl.store(part_max, largest)
    tl.store(exp_sum, tl.sum(tl.exp((finite - largest) / temp), 0))


@triton.jit
def logsumexp_of_parts(maxima, exp_sums, temp, parts: tl.constexpr, padded: tl.constexpr):
    """Return the largest logit of a row, and log(sum(exp((logit - largest) / temperature))), float64."""
    column = tl.arange(0, padded)
    inside = column < parts
    part_max = tl.load(maxima + column, mask=inside, other=-MAX_LOGIT).to(tl.float64)
    exp_sum = tl.load(exp_sums + column, mask=inside, other=0.0).to(tl.float64)
    largest = tl.max(part_max, 0)
    total = tl.sum(exp_sum * tl.exp((part_max - largest) / temp), 0)
    return largest, tl.log(tl.where(total > 0, total, 1.0))


@triton.jit
def logprob_of(logit, temp, largest, size):
    """Return the log-probability of a logit; -inf for -inf and NaN."""
    usable = (logit == logit) & (logit > -float("inf"))
    away = (tl.minimum(logit, MAX_LOGIT).to(tl.float64) - largest) / temp - size
    return tl.where(usable, away, -float("inf")).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["temperature", "keys", "tokens", "maxima", "exp_sums", "out", "logprobs"])
def _merge(
    logits,
    stride,
    vocabulary,
    temperature,
    keys,
    tokens,
    maxima,
    exp_sums,
    out,
    out_stride,
    logprobs,
    candidates,
    parts: tl.constexpr,
    padded_parts: tl.constexpr,
    padded: tl.constexpr,
    count: tl.constexpr,
    banned: tl.constexpr,
):
    wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    key = tl.load(keys + row * candidates + column, mask=column < candidates, other=MIN_KEY)
    if logprobs is not None:
        temp = 1.0 if temperature is None else tl.load(temperature + row)
        temp = tl.where(temp > 0, temp, 1.0).to(tl.float64)
        largest, size = logsumexp_of_parts(maxima + row * parts, exp_sums + row * parts, temp, parts, padded_parts)
    for index in range(count):
        # Parts and the ties within a part are in order of ids: the leftmost has the lowest id.
        best, at = tl.max(key, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.load(tokens + row * candidates + tl.minimum(at, candidates - 1))
        taken = (best > NEG_INF_KEY) | (index == 0) | banned
        tl.store(out + row * out_stride + index, tl.where(taken, token, -1))
        if logprobs is not None:
            logit = tl.load(logits + row * stride + tl.minimum(token, vocabulary - 1))
            logprob = logprob_of(logit, temp, largest, size)
            tl.store(logprobs + row * count + index, tl.where(taken, logprob, -float("inf")))
        key = tl.where(column == at, MIN_KEY, key)


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


@triton.jit(do_not_specialize=["rows"])
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


@triton.jit(do_not_specialize_on_alignment=["chosen", "keys", "tokens", "maxima", "exp_sums", "larger"])
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


@triton.jit(do_not_specialize_on_alignment=["tokens", "maxima", "exp_sums", "larger", "chosen", "rank"])
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
