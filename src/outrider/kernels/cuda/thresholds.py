"""Thresholds of top-k, top-p and min-p, one per row, found without sorting.

Logits become integer keys of the same order. A rule keeps the fewest tokens, from the largest key down, that reach a
goal: a number of tokens (top-k) or a share of the probability (top-p). Rows are split over programs, except in 3 and 5:

1. `_summarize` finds the largest key and the sum of the weights.
2. `_count` counts the tokens in bins, which are evenly spaced in logits.
3. `_decide` finds the bins that hold the threshold. The ends of a bin bound the weights of its tokens.
4. `_gather` writes the tokens of these bins into a pool and sums the weights from either end up, float64.
5. `_finish` finds the threshold in the pool. It checks the bins with the float64 sums. If they are wrong or hold more
   tokens than the pool, the program searches the whole row instead.

Splits and the order of sums are fixed, so that a row's threshold does not depend on the batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import SamplingMetadata
from .device import LAUNCH, wait

MAX_LOGIT = tl.constexpr(torch.finfo(torch.float32).max / 4)  # larger logits, also +inf, count as this
MIN_KEY = tl.constexpr(-(2**31))  # below the key of every float: the threshold of a row without truncation
NEG_INF_KEY = tl.constexpr(-2139095041)  # the key of -inf
MAX_KEY = tl.constexpr(2**31 - 1)
BLOCK = 4096  # tokens of a split
POOL = 8192  # token ids in a row's pool
BIN = 600  # tokens of a bin on average: the bins of the threshold hold up to 10 times as many, see docs/log.md
MARGIN = tl.constexpr(1e-4)  # relative error of float32 sums; the weights themselves are exact to 1e-5
FANOUT = tl.constexpr(64)  # keys that are tried at once in searches that read no tokens
MANY = tl.constexpr(2.0**30)  # more than any vocabulary
LOG2_E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(float.fromhex("0x1.62e42feep-1"))  # ln(2) in two parts: products with small integers are exact
LN2_LOW = tl.constexpr(float.fromhex("0x1.a39ef35793c76p-33"))
ROUNDER = tl.constexpr(1.5 * 2.0**52)  # added to a float64, it rounds to an integer
SERIES = tl.constexpr(tuple(1 / math.factorial(power) for power in range(13, -1, -1)))  # of exp


class Sizes(NamedTuple):
    """Constants of kernels."""

    splits: int
    padded: int  # splits, up to a power of 2
    bins: int
    block: int
    pool: int


class Scratch(NamedTuple):
    """Argument of kernels: results by row R, split S and bin B."""

    tops: Tensor  # [R, S] int32: the largest key
    bottoms: Tensor  # [R, S] int32: the lowest key of a finite logit
    sums: Tensor  # [R, S] f32: the sum of the weights, relative to the split's largest
    counts: Tensor  # [R, S, B] int32: the number of tokens in a bin
    interval: Tensor  # [R, 3] int32: the first bin that may hold the threshold, the bin after the last, tokens inside
    bases: Tensor  # [R, S] int32: where a split's tokens begin in the pool
    exact: Tensor  # [R, S, 3] f64: measure of all tokens, of those from the first bin, of those after the last
    pool: Tensor  # [R, POOL] int32: the ids of these tokens, ascending


def find_thresholds(logits: Tensor, sampling: SamplingMetadata) -> tuple[Tensor, Tensor]:
    """Return a threshold key [R] int32 and a last id [R] int32 for each row of logits [R, V], for `is_kept`."""
    rows, vocabulary = logits.shape
    block = min(BLOCK, int(triton.next_power_of_2(vocabulary)))
    splits, bins = int(triton.cdiv(vocabulary, block)), max(32, int(triton.next_power_of_2(vocabulary // BIN)))

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=logits.device)

    thresholds, last_ids = empty(2, rows).unbind()
    scratch = Scratch(
        tops=empty(rows, splits),
        bottoms=empty(rows, splits),
        sums=empty(rows, splits, dtype=torch.float32),
        counts=empty(rows, splits, bins),
        interval=empty(rows, 3),
        bases=empty(rows, splits),
        exact=empty(rows, splits, 3, dtype=torch.float64),
        pool=empty(rows, POOL),
    )
    rules = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    arguments = (logits, logits.stride(0), vocabulary, *rules, scratch)
    sizes = {"sizes": Sizes(splits, triton.next_power_of_2(splits), bins, block, POOL)}
    _summarize[(rows, splits)](*arguments, **sizes, num_warps=8, **LAUNCH)
    _count[(rows, splits)](*arguments, **sizes, num_warps=8, **LAUNCH)
    _decide[(rows,)](*arguments, **sizes, num_warps=8, **LAUNCH)
    _gather[(rows, splits)](*arguments, **sizes, num_warps=8, **LAUNCH)
    _finish[(rows,)](*arguments, thresholds, last_ids, **sizes, num_warps=16, **LAUNCH)
    return thresholds, last_ids


@triton.jit
def is_kept(logit, token, threshold, last):
    """Return whether truncation keeps a token. NaN must have become -inf."""
    return _remains(order_key(logit), token, (threshold, last))


@triton.jit
def order_key(logit):
    """Return int32 keys in the order of logits; those above MAX_LOGIT are equal."""
    return float_key(tl.minimum(logit, MAX_LOGIT))


@triton.jit
def float_key(value):
    """Return int32 keys in the order of floats; the two zeros are equal."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def key_float(key):
    """Return the float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p"])
def _summarize(
    logits,
    stride,
    vocabulary,
    temperature,
    top_k,
    top_p,
    min_p,
    scratch,
    sizes: tl.constexpr,
):
    """Store the largest key, the lowest finite key and the sum of the weights of a split."""
    wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temp, counted, nucleus, _goal = _rules(row, vocabulary, temperature, top_k, top_p)
    if counted | nucleus | ((temp > 0) & (tl.load(min_p + row) > 0)):
        logit, _ = _read(logits + row * stride, split, vocabulary, sizes.block)
        key = order_key(logit)
        top, at = tl.max(key, 0), row * sizes.splits + split
        weight = _quick_weight(key, tl.maximum(top, NEG_INF_KEY + 1), temp)
        tl.store(scratch.tops + at, top)
        tl.store(scratch.bottoms + at, tl.min(tl.where(key > NEG_INF_KEY, key, MAX_KEY), 0))
        tl.store(scratch.sums + at, tl.sum(weight, 0))


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p"])
def _count(
    logits,
    stride,
    vocabulary,
    temperature,
    top_k,
    top_p,
    min_p,
    scratch,
    sizes: tl.constexpr,
):
    """Store the number of a split's tokens in each bin."""
    wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temp, counted, nucleus, goal = _rules(row, vocabulary, temperature, top_k, top_p)
    if counted | nucleus:
        top, bottom, total = _summary(scratch, row, temp, sizes)
        if top > NEG_INF_KEY:
            low, rate = _scale(top, bottom, total, temp, counted, goal, vocabulary, sizes.bins)
            logit, token = _read(logits + row * stride, split, vocabulary, sizes.block)
            counts = tl.histogram(_bin(logit, low, rate, sizes.bins), sizes.bins, mask=token < vocabulary)
            tl.store(scratch.counts + (row * sizes.splits + split) * sizes.bins + tl.arange(0, sizes.bins), counts)


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p"])
def _decide(
    logits,
    stride,
    vocabulary,
    temperature,
    top_k,
    top_p,
    min_p,
    scratch,
    sizes: tl.constexpr,
):
    """Store the bins that hold the threshold, and where each split writes their tokens.

    Float32 sums within MARGIN of the goal decide nothing. Top-k has no such margin: its sums are integers.
    """
    wait()
    row = tl.program_id(0).to(tl.int64)
    temp, counted, nucleus, goal = _rules(row, vocabulary, temperature, top_k, top_p)
    if counted | nucleus:
        top, bottom, total = _summary(scratch, row, temp, sizes)
        if top > NEG_INF_KEY:
            low, rate = _scale(top, bottom, total, temp, counted, goal, vocabulary, sizes.bins)
            part, index = tl.arange(0, sizes.padded), tl.arange(0, sizes.bins)
            at = (row * sizes.splits + part[:, None]) * sizes.bins + index[None, :]
            counts = tl.load(scratch.counts + at, mask=part[:, None] < sizes.splits, other=0)  # [S, B]
            count = tl.sum(counts, 0)  # [B]
            # The lightest and the heaviest token of a bin; the first holds all tokens below too.
            depth, scale = low - key_float(top), _log2_rate(temp)
            lightest = tl.where(index > 0, tl.exp2((depth + index / rate) * scale), 0.0)
            heaviest = tl.exp2((depth + (index + 1) / rate) * scale)
            least = count * tl.where(counted, 1.0, lightest)
            most = count * tl.where(counted, 1.0, heaviest)
            total = tl.where(counted, tl.sum(least, 0), total)
            wanted = tl.where(counted, goal.to(tl.float32), goal.to(tl.float32) * total)
            margin = tl.where(counted, 0.0, MARGIN * total)
            # Two bounds on either side: by the tokens from a bin up, and by the total without the tokens below it.
            least_up, most_up = tl.cumsum(least, 0, reverse=True), tl.cumsum(most, 0, reverse=True)
            lower = tl.maximum(least_up, total - tl.sum(most, 0) + most_up)
            upper = tl.minimum(most_up, total - tl.sum(least, 0) + least_up)
            first = tl.max(tl.where(lower >= wanted + margin, index, 0), 0)
            end = tl.min(tl.where((upper < wanted - margin) & (index > first), index, sizes.bins), 0)
            everything = tl.sum(tl.where(index >= first, count, 0), 0) <= sizes.pool  # the second rule needs all tokens
            end = tl.where(everything, sizes.bins, end)
            inside = tl.sum(tl.where((index >= first) & (index < end), counts, 0), 1)  # [S]
            tl.store(scratch.bases + row * sizes.splits + part, tl.cumsum(inside, 0) - inside, mask=part < sizes.splits)
            tl.store(scratch.interval + row * 3, first)
            tl.store(scratch.interval + row * 3 + 1, end)
            tl.store(scratch.interval + row * 3 + 2, tl.sum(inside, 0))


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p"])
def _gather(
    logits,
    stride,
    vocabulary,
    temperature,
    top_k,
    top_p,
    min_p,
    scratch,
    sizes: tl.constexpr,
):
    """Write the tokens of the interval into the pool; store a split's exact sums."""
    wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temp, counted, nucleus, goal = _rules(row, vocabulary, temperature, top_k, top_p)
    if counted | nucleus:
        top, bottom, total = _summary(scratch, row, temp, sizes)
        if top > NEG_INF_KEY:
            low, rate = _scale(top, bottom, total, temp, counted, goal, vocabulary, sizes.bins)
            first, end = tl.load(scratch.interval + row * 3), tl.load(scratch.interval + row * 3 + 1)
            logit, token = _read(logits + row * stride, split, vocabulary, sizes.block)
            index, inside = _bin(logit, low, rate, sizes.bins), token < vocabulary
            wanted = (inside & (index >= first) & (index < end)).to(tl.int32)
            slot = tl.load(scratch.bases + row * sizes.splits + split) + tl.cumsum(wanted, 0) - 1
            tl.store(scratch.pool + row * sizes.pool + slot, token, mask=(wanted > 0) & (slot < sizes.pool))
            weight = _weight(tl.minimum(logit, MAX_LOGIT), (key_float(top), temp))
            weight = tl.where(inside, tl.where(counted, 1.0, weight), 0.0)
            exact = scratch.exact + (row * sizes.splits + split) * 3
            tl.store(exact, tl.sum(weight, 0))
            tl.store(exact + 1, tl.sum(tl.where(index >= first, weight, 0.0), 0))
            tl.store(exact + 2, tl.sum(tl.where(index >= end, weight, 0.0), 0))


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "thresholds", "last_ids"])
def _finish(
    logits,
    stride,
    vocabulary,
    temperature,
    top_k,
    top_p,
    min_p,
    scratch,
    thresholds,
    last_ids,
    sizes: tl.constexpr,
):
    """Store threshold and last id: those of the first rule, then of top-p after top-k, then of min-p."""
    wait()
    row = tl.program_id(0).to(tl.int64)
    temp, counted, nucleus, goal = _rules(row, vocabulary, temperature, top_k, top_p)
    floor, source, pool = tl.load(min_p + row), logits + row * stride, scratch.pool + row * sizes.pool
    threshold, last = tl.full((), MIN_KEY, tl.int32), tl.full((), -1, tl.int32)  # keeps all tokens
    if counted | nucleus | ((temp > 0) & (floor > 0)):
        top, bottom, _total = _summary(scratch, row, temp, sizes)
        if top > NEG_INF_KEY:
            scale, nothing = (key_float(top), temp), tl.full((), 0.0, tl.float64)
            if counted | nucleus:
                kept, part = (threshold, last), tl.arange(0, sizes.padded)
                exact, interval = scratch.exact + (row * sizes.splits + part) * 3, scratch.interval + row * 3
                total = tl.sum(tl.load(exact, mask=part < sizes.splits, other=0.0), 0)
                reaching = tl.sum(tl.load(exact + 1, mask=part < sizes.splits, other=0.0), 0)
                above = tl.sum(tl.load(exact + 2, mask=part < sizes.splits, other=0.0), 0)
                first_bin, end_bin, size = tl.load(interval), tl.load(interval + 1), tl.load(interval + 2)
                total = tl.where(counted, 1.0, total)
                whole, weighted, target = end_bin == sizes.bins, counted == 0, (total, goal)
                sound = ((first_bin == 0) | (reaching / total >= goal)) & (whole | (above / total < goal))
                pooled = sound & (size <= sizes.pool)
                if pooled:
                    threshold, last = _search_pool(source, pool, size, kept, scale, target, above, weighted, sizes)
                else:
                    threshold, last = _search_row(source, vocabulary, kept, scale, target, bottom, weighted, sizes)
                if counted & nucleus:
                    kept, target = (threshold, last), (nothing, tl.load(top_p + row).to(tl.float64))
                    if pooled & whole:
                        threshold, last = _search_pool(source, pool, size, kept, scale, target, nothing, True, sizes)
                    else:
                        threshold, last = _search_row(source, vocabulary, kept, scale, target, threshold, True, sizes)
            if floor > 0:
                least, bound = _least(scale, floor.to(tl.float64), vocabulary)
                last = tl.where(least > threshold, bound, tl.where(least == threshold, tl.minimum(bound, last), last))
                threshold = tl.maximum(least, threshold)
    tl.store(thresholds + row, threshold)
    tl.store(last_ids + row, last)


@triton.jit
def _rules(row, vocabulary, temperature, top_k, top_p):
    """Return temperature, whether top-k and top-p truncate, and the goal of the first of them, which is top-k."""
    temp, count, share = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    counted = (temp > 0) & (count > 0) & (count < vocabulary)
    goal = tl.where(counted, count.to(tl.float64), share.to(tl.float64))
    return temp.to(tl.float64), counted, (temp > 0) & (share < 1), goal


@triton.jit
def _summary(scratch, row, temp, sizes: tl.constexpr):
    """Return the largest key, the lowest finite key and the float32 sum of the weights of a row."""
    part = tl.arange(0, sizes.padded)
    at, inside = row * sizes.splits + part, part < sizes.splits
    tops = tl.load(scratch.tops + at, mask=inside, other=NEG_INF_KEY)
    bottom = tl.min(tl.load(scratch.bottoms + at, mask=inside, other=MAX_KEY), 0)
    top = tl.max(tops, 0)
    largest = tl.maximum(top, NEG_INF_KEY + 1)  # finite
    sums = tl.load(scratch.sums + at, mask=inside, other=0.0)
    return top, bottom, tl.sum(sums * _quick_weight(tops, largest, temp), 0)


@triton.jit
def _scale(top, bottom, total, temp, counted, goal, vocabulary, bins: tl.constexpr):
    """Return the logit at which the bins begin, and the number of bins per logit.

    Top-p needs no token whose weight is below (1 - p) * total / V: together these weigh less than (1 - p) * total. The
    bins begin at a 16th of that, so that the tokens of the first bin weigh little.
    """
    lightest = (1.0 - tl.where(counted, 0.0, goal.to(tl.float32))) * total / vocabulary / 16
    lowest, largest = key_float(bottom), key_float(top)
    bound = tl.where(counted, lowest, largest + temp.to(tl.float32) * tl.log(lightest))
    low = tl.minimum(tl.maximum(bound, lowest), largest)
    return low, bins / tl.maximum(largest - low, 1e-30)


@triton.jit
def _bin(logit, low, rate, bins: tl.constexpr):
    """Return the bin of a logit. The first bin also holds all logits below it."""
    return tl.minimum(tl.maximum((logit - low) * rate, 0.0), bins - 1).to(tl.int32)


@triton.jit
def _search_pool(row, pool, size, kept, scale, target, above, weighted, sizes: tl.constexpr):
    """Return threshold and last id after one more rule, among the tokens of a pool.

    `above` is the measure of the tokens beyond the pool. A total of 0 stands for that of the pool.
    """
    total, goal = target
    at = tl.arange(0, sizes.pool)
    token = tl.load(pool + at, mask=at < size, other=0)
    logit = tl.load(row + token, mask=at < size, other=-float("inf"))
    key = order_key(tl.where(logit == logit, logit, -float("inf")))
    remains = (at < size) & _remains(key, token, kept)
    weight = tl.where(remains, tl.where(weighted, _weight(key_float(key), scale), 1.0), 0.0)
    total = tl.where(total == 0, tl.sum(weight, 0), total)
    low, key, outside = tl.min(tl.where(remains, key, MAX_KEY), 0), tl.where(remains, key, MIN_KEY), above
    high = tl.max(key, 0) + 1
    while high.to(tl.int64) - low > 1:
        reaches = key >= ((high.to(tl.int64) + low) // 2).to(tl.int32)
        measure = outside + tl.sum(tl.where(reaches, weight, 0.0), 0)
        over, under = tl.min(tl.where(reaches, key, MAX_KEY), 0), tl.max(tl.where(reaches, MIN_KEY, key), 0)
        low, high, above = _halve(low, high, above, measure, over, under, measure / total >= goal)
    threshold = low
    equal = (key == threshold).to(tl.int32)
    within = (equal > 0) & (tl.cumsum(equal, 0) <= _needed(threshold, scale, (total, goal), above, weighted))
    return threshold, tl.max(tl.where(within, token, -1), 0)


@triton.jit
def _search_row(row, vocabulary, kept, scale, target, low, weighted, sizes: tl.constexpr):
    """Return the same as `_search_pool`, among all tokens of the row that are kept so far, from the key `low`: slow."""
    total, goal = target
    high, above = float_key(scale[0]) + 1, goal * 0
    if total == 0:
        total, _, _ = _measure(row, vocabulary, kept, scale, NEG_INF_KEY, weighted, sizes)
    while high.to(tl.int64) - low > 1:
        middle = ((high.to(tl.int64) + low) // 2).to(tl.int32)
        measure, over, under = _measure(row, vocabulary, kept, scale, middle, weighted, sizes)
        low, high, above = _halve(low, high, above, measure, over, under, measure / total >= goal)
    threshold = low
    needed = _needed(threshold, scale, (total, goal), above, weighted)
    found, seen = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    for index in range(sizes.splits):
        logit, token = _read(row, index, vocabulary, sizes.block)
        key = order_key(logit)
        equal = ((token < vocabulary) & _remains(key, token, kept) & (key == threshold)).to(tl.int32)
        within = (equal > 0) & (seen + tl.cumsum(equal, 0) <= needed)
        found = tl.maximum(found, tl.max(tl.where(within, token, -1), 0))
        seen += tl.sum(equal, 0)
    return threshold, found


@triton.jit
def _halve(low, high, above, measure, over, under, reached):
    """Return interval and measure above it after a comparison: its ends move to keys that occur."""
    low, high = tl.where(reached, tl.minimum(over, high - 1), low), tl.where(reached, high, tl.maximum(under, low) + 1)
    return low, high, tl.where(reached, above, measure)


@triton.jit
def _measure(row, vocabulary, kept, scale, middle, weighted, sizes: tl.constexpr):
    """Return the measure of a row's tokens at or above a key, the lowest of their keys and the largest key below."""
    block: tl.constexpr = sizes.block
    sums = tl.zeros((block,), tl.float64)
    over, under = tl.full((block,), MAX_KEY, tl.int32), tl.full((block,), MIN_KEY, tl.int32)
    for index in range(sizes.splits):
        logit, token = _read(row, index, vocabulary, sizes.block)
        key = order_key(logit)
        remains = (token < vocabulary) & _remains(key, token, kept)
        reaches = remains & (key >= middle)
        sums += tl.where(reaches, tl.where(weighted, _weight(key_float(key), scale), 1.0), 0.0)
        over = tl.minimum(over, tl.where(reaches, key, MAX_KEY))
        under = tl.maximum(under, tl.where(remains & (key < middle), key, MIN_KEY))
    return tl.sum(sums, 0), tl.min(over, 0), tl.max(under, 0)


@triton.jit
def _needed(threshold, scale, target, above, weighted):
    """Return how many tokens at the threshold are needed: the fewest with (above + n * weight) / total >= goal."""
    total, goal = target
    weight = tl.where(weighted, _weight(key_float(threshold), scale), 1.0)
    count = tl.where(weight > 0, tl.ceil((goal * total - above) / weight), 1.0)
    return tl.minimum(tl.maximum(count, 1.0), MANY).to(tl.int32)


@triton.jit
def _least(scale, floor, vocabulary):
    """Return the lowest key whose weight is at least `floor`, and the last id kept at it (-1 if `floor` > 1)."""
    low, high = tl.full((), NEG_INF_KEY, tl.int64), float_key(scale[0]).to(tl.int64)
    while high - low > 1:
        step = (high - low + FANOUT - 1) // FANOUT
        keys = tl.minimum(low + step * (1 + tl.arange(0, FANOUT)), high - 1)
        enough = _weight(key_float(keys.to(tl.int32)), scale) >= floor
        low, high = tl.max(tl.where(enough, low, keys), 0), tl.min(tl.where(enough, keys, high), 0)
    return high.to(tl.int32), tl.where(floor > 1, -1, vocabulary - 1)


@triton.jit
def _read(row, index, vocabulary, block: tl.constexpr):
    """Load logits and ids of one split; -inf in place of NaN and outside the vocabulary."""
    token = index * block + tl.arange(0, block)
    logit = tl.load(row + token, mask=token < vocabulary, other=-float("inf"))
    return tl.where(logit == logit, logit, -float("inf")), token


@triton.jit
def _remains(key, token, kept):
    threshold, last = kept
    return (key > threshold) | ((key == threshold) & (token <= last))


@triton.jit
def _weight(logit, scale):
    """Return exp((logit - the largest logit) / temperature), float64, at least exp(-700).

    It has no branches, a third of the instructions of `tl.exp`: 2^n times a Taylor series of at most ln(2) / 2.
    """
    top, temp = scale
    power = tl.maximum((logit.to(tl.float64) - top.to(tl.float64)) * (1.0 / temp), -700.0)
    shifted = power * LOG2_E + ROUNDER  # its lowest bits are n
    count = shifted - ROUNDER
    rest = (power - count * LN2_HIGH) - count * LN2_LOW
    value = rest * 0.0 + SERIES[0]
    for at in tl.static_range(1, 14):
        value = value * rest + SERIES[at]
    return (value.to(tl.int64, bitcast=True) + (shifted.to(tl.int64, bitcast=True) << 52)).to(tl.float64, bitcast=True)


@triton.jit
def _quick_weight(key, top, temp):
    """Return the weight as float32; `top` must be finite."""
    return tl.exp2((key_float(key) - key_float(top)) * _log2_rate(temp))


@triton.jit
def _log2_rate(temp):
    """Return the float32 factor from a difference of logits to the binary logarithm of a weight."""
    return tl.minimum(LOG2_E / temp, MAX_LOGIT).to(tl.float32)
