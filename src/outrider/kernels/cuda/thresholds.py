"""Thresholds of top-k, top-p and min-p, one per row, found without sorting.

Logits become integer keys of the same order. A rule keeps the fewest tokens, from the largest key down, that reach a
goal: a number of tokens (top-k) or a share of the probability (top-p). Rows are split over programs:

1. `_summarize` finds the largest key and the sum of the weights.
2. `_narrow`, launched NARROWINGS times, measures the tokens at or above each of CANDIDATES keys. The next kernel takes
   the two neighbours between which the goal is reached as its interval. These weights are float32.
3. `_gather` writes the tokens of the last interval into a pool and sums the weights above it, float64.
4. `_finish` finds the threshold in the pool, one program per row. It checks the interval with the float64 sums.
   If the interval is wrong or holds more tokens than the pool, the program searches the whole row instead.

Splits and the order of sums are fixed, so that a row's threshold does not depend on the batch.
"""

from __future__ import annotations

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
POOL = 2048  # token ids in a row's pool
CANDIDATES = tl.constexpr(16)  # keys that a narrowing tries; the interval becomes 15 times shorter
NARROWINGS = 3  # 15^3: normally distributed logits leave about 200 of 128k tokens
MARGIN = tl.constexpr(1e-4)  # relative error of float32 sums; the weights themselves are exact to 1e-5
FANOUT = tl.constexpr(64)  # keys that are tried at once in searches that read no tokens
MANY = tl.constexpr(2.0**30)  # more than any vocabulary
LOG2_E = tl.constexpr(1.4426950408889634)


class Scratch(NamedTuple):
    """Argument of kernels: results by row R, split S, narrowing N and candidate C."""

    tops: Tensor  # [R, S] int32: the largest key
    bottoms: Tensor  # [R, S] int32: the lowest key of a finite logit
    sums: Tensor  # [R, S] f32: the sum of the weights, relative to the split's largest
    keys: Tensor  # [N, R, C] int32: the candidates, from the lower to the upper end of the interval
    measures: Tensor  # [N, R, S, C] f32: number or weight of the tokens at or above a candidate
    counts: Tensor  # [R, S, C] int32: number of these tokens, of the last narrowing
    exact: Tensor  # [R, S, 3] f64: total (top-k: 1); measure of the tokens from the lower end, from the upper end
    interval: Tensor  # [R, 3] int32: lower end, upper end, number of tokens inside
    pool: Tensor  # [R, POOL] int32: the ids of these tokens, ascending


def find_thresholds(logits: Tensor, sampling: SamplingMetadata) -> tuple[Tensor, Tensor]:
    """Return a threshold key [R] int32 and a last id [R] int32 for each row of logits [R, V], for `is_kept`."""
    rows, vocabulary = logits.shape
    block = min(BLOCK, int(triton.next_power_of_2(vocabulary)))
    splits, tried = int(triton.cdiv(vocabulary, block)), CANDIDATES.value

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=logits.device)

    thresholds, last_ids = empty(2, rows).unbind()
    scratch = Scratch(
        tops=empty(rows, splits),
        bottoms=empty(rows, splits),
        sums=empty(rows, splits, dtype=torch.float32),
        keys=empty(NARROWINGS, rows, tried),
        measures=empty(NARROWINGS, rows, splits, tried, dtype=torch.float32),
        counts=empty(rows, splits, tried),
        exact=empty(rows, splits, 3, dtype=torch.float64),
        interval=empty(rows, 3),
        pool=empty(rows, POOL),
    )
    rules = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    arguments = (logits, logits.stride(0), vocabulary, *rules, scratch)
    sizes = {"splits": splits, "padded": triton.next_power_of_2(splits), "block": block}
    _summarize[(rows, splits)](*arguments, **sizes, num_warps=8, **LAUNCH)
    for index in range(NARROWINGS):
        final = index == NARROWINGS - 1
        _narrow[(rows, splits)](*arguments, index=index, final=final, **sizes, num_warps=8, **LAUNCH)
    _gather[(rows, splits)](*arguments, index=NARROWINGS, capacity=POOL, **sizes, num_warps=8, **LAUNCH)
    _finish[(rows,)](*arguments, thresholds, last_ids, capacity=POOL, **sizes, num_warps=16, **LAUNCH)
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
    splits: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    """Store the largest key, the lowest finite key and the sum of the weights of a split."""
    wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temp, counted, nucleus, _goal = _rules(row, vocabulary, temperature, top_k, top_p)
    if counted | nucleus | ((temp > 0) & (tl.load(min_p + row) > 0)):
        key, _, _ = _read(logits + row * stride, split, vocabulary, (MIN_KEY, 0), block)
        top, at = tl.max(key, 0), row * splits + split
        weight = _quick_weight(key, tl.maximum(top, NEG_INF_KEY + 1), temp)
        tl.store(scratch.tops + at, top)
        tl.store(scratch.bottoms + at, tl.min(tl.where(key > NEG_INF_KEY, key, MAX_KEY), 0))
        tl.store(scratch.sums + at, tl.sum(weight, 0))


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p"])
def _narrow(
    logits,
    stride,
    vocabulary,
    temperature,
    top_k,
    top_p,
    min_p,
    scratch,
    index: tl.constexpr,
    final: tl.constexpr,
    splits: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    """Store the measure of a split's tokens at or above each candidate, the `final` time also their number."""
    wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temp, counted, nucleus, goal = _rules(row, vocabulary, temperature, top_k, top_p)
    if counted | nucleus:
        top, bottom, total = _summary(scratch, row, temp, splits, padded)
        if top > NEG_INF_KEY:
            if index == 0:
                low, high = _first_interval(top, bottom, total, temp, counted, goal, vocabulary)
            else:
                low, high = _decide(scratch, row, index - 1, counted, goal, total, splits, padded)
            key, _, _ = _read(logits + row * stride, split, vocabulary, (MIN_KEY, 0), block)
            weight = tl.where(counted, 1.0, _quick_weight(key, top, temp))
            entry = index * tl.num_programs(0).to(tl.int64) + row
            keys, measures = scratch.keys + entry * CANDIDATES, scratch.measures + (entry * splits + split) * CANDIDATES
            counts = scratch.counts + (row * splits + split) * CANDIDATES
            bottom_logit = key_float(low)
            step = (key_float(high) - bottom_logit) / (CANDIDATES - 1)
            for at in tl.static_range(CANDIDATES):
                # Evenly spaced logits: the keys of small numbers of both signs are far apart.
                candidate = tl.minimum(tl.maximum(float_key(bottom_logit + at * step), low), high - 1)
                candidate = low if at == 0 else (high if at == CANDIDATES - 1 else candidate)
                over = key >= candidate
                tl.store(keys + at, candidate, mask=split == 0)
                tl.store(measures + at, tl.sum(tl.where(over, weight, 0.0), 0))
                if final:
                    tl.store(counts + at, tl.sum(over.to(tl.int32), 0))


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
    index: tl.constexpr,
    capacity: tl.constexpr,
    splits: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    """Write the tokens inside the interval into the pool; store the interval and a split's exact sums."""
    wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temp, counted, nucleus, goal = _rules(row, vocabulary, temperature, top_k, top_p)
    if counted | nucleus:
        top, _bottom, total = _summary(scratch, row, temp, splits, padded)
        if top > NEG_INF_KEY:
            low, high = _decide(scratch, row, index - 1, counted, goal, total, splits, padded)
            part, column = tl.arange(0, padded), tl.arange(0, CANDIDATES)
            entry = (index - 1) * tl.num_programs(0).to(tl.int64) + row
            keys = tl.load(scratch.keys + entry * CANDIDATES + column)
            at = (row * splits + part[:, None]) * CANDIDATES + column[None, :]
            counts = tl.load(scratch.counts + at, mask=part[:, None] < splits, other=0)  # [S, C]
            reaching = tl.max(tl.where(keys[None, :] == low, counts, 0), 1)  # [S]
            above = tl.max(tl.where(keys[None, :] == high, counts, 0), 1)
            everything = tl.sum(reaching, 0) <= capacity  # the second rule needs all tokens
            high, above = tl.where(everything, top + 1, high), tl.where(everything, 0, above)
            size = tl.sum(reaching - above, 0)
            base = tl.sum(tl.where(part < split, reaching - above, 0), 0)
            key, token, inside = _read(logits + row * stride, split, vocabulary, (MIN_KEY, 0), block)
            wanted = ((key >= low) & (key < high)).to(tl.int32)
            slot = base + tl.cumsum(wanted, 0) - 1
            tl.store(scratch.pool + row * capacity + slot, token, mask=(wanted > 0) & (size <= capacity))
            exact = scratch.exact + (row * splits + split) * 3
            if counted:
                tl.store(exact, tl.where(split == 0, 1.0, 0.0))
                tl.store(exact + 1, tl.sum(tl.where(part == split, reaching, 0), 0).to(tl.float64))
                tl.store(exact + 2, tl.sum(tl.where(part == split, above, 0), 0).to(tl.float64))
            else:
                weight = tl.where(inside, _weight(key, (top, temp)), 0.0)
                tl.store(exact, tl.sum(weight, 0))
                tl.store(exact + 1, tl.sum(tl.where(key >= low, weight, 0.0), 0))
                tl.store(exact + 2, tl.sum(tl.where(key >= high, weight, 0.0), 0))
            if split == 0:
                tl.store(scratch.interval + row * 3, low)
                tl.store(scratch.interval + row * 3 + 1, high)
                tl.store(scratch.interval + row * 3 + 2, size)


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
    capacity: tl.constexpr,
    splits: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    """Store threshold and last id: those of the first rule, then of top-p after top-k, then of min-p."""
    wait()
    row = tl.program_id(0).to(tl.int64)
    temp, counted, nucleus, goal = _rules(row, vocabulary, temperature, top_k, top_p)
    floor, source, pool = tl.load(min_p + row), logits + row * stride, scratch.pool + row * capacity
    threshold, last = tl.full((), MIN_KEY, tl.int32), tl.full((), -1, tl.int32)  # keeps all tokens
    if counted | nucleus | ((temp > 0) & (floor > 0)):
        top, bottom, _total = _summary(scratch, row, temp, splits, padded)
        if top > NEG_INF_KEY:
            scale, end, nothing = (top, temp), top.to(tl.int64) + 1, tl.full((), 0.0, tl.float64)
            if counted | nucleus:
                kept, part = (threshold, last), tl.arange(0, padded)
                exact, interval = scratch.exact + (row * splits + part) * 3, scratch.interval + row * 3
                total = tl.sum(tl.load(exact, mask=part < splits, other=0.0), 0)
                reaching = tl.sum(tl.load(exact + 1, mask=part < splits, other=0.0), 0)
                above = tl.sum(tl.load(exact + 2, mask=part < splits, other=0.0), 0)
                low, high = tl.load(interval).to(tl.int64), tl.load(interval + 1).to(tl.int64)
                size = tl.load(interval + 2)
                sound = ((low == bottom) | (reaching / total >= goal)) & ((high == end) | (above / total < goal))
                if sound & (size <= capacity):
                    threshold, last = _search_pool(
                        source, pool, size, kept, scale, (total, goal), (low, high, above), counted == 0, capacity
                    )
                else:
                    low, high = tl.where(sound, low, bottom), tl.where(sound, high, end)
                    above = tl.where(sound, above, 0.0)
                    threshold, last = _search_row(
                        source, vocabulary, kept, scale, (total, goal), (low, high, above), counted == 0, splits, block
                    )
                if counted & nucleus:
                    kept, target = (threshold, last), (nothing, tl.load(top_p + row).to(tl.float64))
                    rest = (threshold.to(tl.int64), end, nothing)
                    if (size <= capacity) & (high == end):
                        threshold, last = _search_pool(source, pool, size, kept, scale, target, rest, True, capacity)
                    else:
                        threshold, last = _search_row(
                            source, vocabulary, kept, scale, target, rest, True, splits, block
                        )
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
def _summary(scratch, row, temp, splits: tl.constexpr, padded: tl.constexpr):
    """Return the largest key, the lowest finite key and the float32 sum of the weights of a row."""
    part = tl.arange(0, padded)
    at, inside = row * splits + part, part < splits
    tops = tl.load(scratch.tops + at, mask=inside, other=NEG_INF_KEY)
    bottom = tl.min(tl.load(scratch.bottoms + at, mask=inside, other=MAX_KEY), 0)
    top = tl.max(tops, 0)
    largest = tl.maximum(top, NEG_INF_KEY + 1)  # finite
    sums = tl.load(scratch.sums + at, mask=inside, other=0.0)
    return top, bottom, tl.sum(sums * _weight(tops, (largest, temp)), 0)


@triton.jit
def _first_interval(top, bottom, total, temp, counted, goal, vocabulary):
    """Return the keys between which the threshold lies.

    Top-p needs no token whose weight is below (1 - p) * total / V: together these weigh less than (1 - p) * total.
    """
    lightest = (1.0 - tl.where(counted, 0.0, goal)) * total / vocabulary * (1.0 - MARGIN)
    lowest, largest = key_float(bottom).to(tl.float64), key_float(top).to(tl.float64)
    bound = tl.minimum(tl.maximum(largest + temp * tl.log(lightest), lowest), largest)
    low = tl.maximum(float_key(bound.to(tl.float32)) - 1, bottom)  # the bound may have been rounded up
    return tl.where(counted, bottom, low), top + 1


@triton.jit
def _decide(scratch, row, index, counted, goal, total, splits: tl.constexpr, padded: tl.constexpr):
    """Return the interval after a narrowing: from the last candidate that reaches the goal to the next that does not.

    Float32 sums within MARGIN of the goal decide nothing. Top-k has no such margin: its sums are integers.
    """
    part, column = tl.arange(0, padded), tl.arange(0, CANDIDATES)
    entry = index * tl.num_programs(0).to(tl.int64) + row
    key = tl.load(scratch.keys + entry * CANDIDATES + column)
    at = (entry * splits + part[:, None]) * CANDIDATES + column[None, :]
    measures = tl.load(scratch.measures + at, mask=part[:, None] < splits, other=0.0)  # [S, C]
    measure = tl.sum(measures.to(tl.float64), 0)
    wanted, margin = tl.where(counted, goal, goal * total), tl.where(counted, 0.0, MARGIN)
    lowest, end = tl.min(key, 0), tl.max(key, 0)
    low = tl.max(tl.where((measure >= wanted * (1.0 + margin)) & (key < end), key, lowest), 0)
    high = tl.min(tl.where((measure < wanted * (1.0 - margin)) & (key > low), key, end), 0)
    return low, high


@triton.jit
def _search_pool(row, pool, size, kept, scale, target, interval, weighted, capacity: tl.constexpr):
    """Return threshold and last id after one more rule, among the tokens of a pool.

    The interval is (low, high, measure of the tokens at or above high). A total of 0 stands for that of the pool.
    """
    low, high, above = interval
    total, goal = target
    at = tl.arange(0, capacity)
    token = tl.load(pool + at, mask=at < size, other=0)
    logit = tl.load(row + token, mask=at < size, other=-float("inf"))
    key = order_key(tl.where(logit == logit, logit, -float("inf")))
    remains = (at < size) & _remains(key, token, kept)
    weight = tl.where(remains, tl.where(weighted, _weight(key, scale), 1.0), 0.0)
    key = tl.where(remains, key, MIN_KEY)
    total = tl.where(total == 0, tl.sum(weight, 0), total)
    outside = above
    while high - low > 1:
        middle = low + (high - low) // 2
        measure = outside + tl.sum(tl.where(key >= middle, weight, 0.0), 0)
        reached = measure / total >= goal
        low, high, above = (
            tl.where(reached, middle, low),
            tl.where(reached, high, middle),
            tl.where(reached, above, measure),
        )
        # Shrink the interval to the keys that occur, so that few steps remain.
        present = (key >= low) & (key < high)
        low, high = (
            tl.min(tl.where(present, key, high), 0).to(tl.int64),
            tl.max(tl.where(present, key, low), 0).to(tl.int64) + 1,
        )
    threshold = low.to(tl.int32)
    equal = (key == threshold).to(tl.int32)
    within = (equal > 0) & (tl.cumsum(equal, 0) <= _needed(threshold, scale, (total, goal), above, weighted))
    return threshold, tl.max(tl.where(within, token, -1), 0)


@triton.jit
def _search_row(row, vocabulary, kept, scale, target, interval, weighted, splits: tl.constexpr, block: tl.constexpr):
    """Return the same as `_search_pool`, among all tokens of the row that are kept so far: slow."""
    low, high, above = interval
    total, goal = target
    if total == 0:
        total, _, _ = _measure(row, vocabulary, kept, scale, NEG_INF_KEY, weighted, splits, block)
    while high - low > 1:
        middle = low + (high - low) // 2
        measure, over, under = _measure(row, vocabulary, kept, scale, middle.to(tl.int32), weighted, splits, block)
        reached = measure / total >= goal  # NaN counts as not reached, so that the search ends
        low, high, above = (
            tl.where(reached, tl.minimum(over.to(tl.int64), high - 1), low),
            tl.where(reached, high, tl.maximum(under.to(tl.int64), low) + 1),
            tl.where(reached, above, measure),
        )
    threshold = low.to(tl.int32)
    needed = _needed(threshold, scale, (total, goal), above, weighted)
    found, seen = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    for index in range(splits):
        key, token, remains = _read(row, index, vocabulary, kept, block)
        equal = (remains & (key == threshold)).to(tl.int32)
        within = (equal > 0) & (seen + tl.cumsum(equal, 0) <= needed)
        found = tl.maximum(found, tl.max(tl.where(within, token, -1), 0))
        seen += tl.sum(equal, 0)
    return threshold, found


@triton.jit
def _measure(row, vocabulary, kept, scale, middle, weighted, splits: tl.constexpr, block: tl.constexpr):
    """Return the measure of a row's tokens at or above a key, the lowest of their keys and the largest key below."""
    sums = tl.zeros((block,), tl.float64)
    over, under = tl.full((block,), MAX_KEY, tl.int32), tl.full((block,), MIN_KEY, tl.int32)
    for index in range(splits):
        key, _, remains = _read(row, index, vocabulary, kept, block)
        reaches = remains & (key >= middle)
        sums += tl.where(reaches, tl.where(weighted, _weight(key, scale), 1.0), 0.0)
        over = tl.minimum(over, tl.where(reaches, key, MAX_KEY))
        under = tl.maximum(under, tl.where(remains & (key < middle), key, MIN_KEY))
    return tl.sum(sums, 0), tl.min(over, 0), tl.max(under, 0)


@triton.jit
def _needed(threshold, scale, target, above, weighted):
    """Return how many tokens at the threshold are needed: the fewest with (above + n * weight) / total >= goal."""
    total, goal = target
    weight = tl.where(weighted, _weight(threshold, scale), 1.0)
    count = tl.where(weight > 0, tl.ceil((goal * total - above) / weight), 1.0)
    return tl.minimum(tl.maximum(count, 1.0), MANY).to(tl.int32)


@triton.jit
def _least(scale, floor, vocabulary):
    """Return the lowest key whose weight is at least `floor`, and the last id kept at it (-1 if `floor` > 1)."""
    low, high = tl.full((), NEG_INF_KEY, tl.int64), scale[0].to(tl.int64)
    while high - low > 1:
        step = (high - low + FANOUT - 1) // FANOUT
        keys = tl.minimum(low + step * (1 + tl.arange(0, FANOUT)), high - 1)
        enough = _weight(keys.to(tl.int32), scale) >= floor
        low, high = tl.max(tl.where(enough, low, keys), 0), tl.min(tl.where(enough, keys, high), 0)
    return high.to(tl.int32), tl.where(floor > 1, -1, vocabulary - 1)


@triton.jit
def _read(row, index, vocabulary, kept, block: tl.constexpr):
    """Load keys and ids of one split, and which of them are kept so far."""
    token = index * block + tl.arange(0, block)
    inside = token < vocabulary
    logit = tl.load(row + token, mask=inside, other=-float("inf"))
    key = order_key(tl.where(logit == logit, logit, -float("inf")))
    return key, token, inside & _remains(key, token, kept)


@triton.jit
def _remains(key, token, kept):
    threshold, last = kept
    return (key > threshold) | ((key == threshold) & (token <= last))


@triton.jit
def _weight(key, scale):
    """Return exp((logit - the largest logit) / temperature), float64."""
    top, temp = scale
    return tl.exp((key_float(key).to(tl.float64) - key_float(top).to(tl.float64)) / temp)


@triton.jit
def _quick_weight(key, top, temp):
    """Return the weight as float32; `top` must be finite."""
    rate = tl.minimum(LOG2_E / temp, MAX_LOGIT).to(tl.float32)
    return tl.exp2((key_float(key) - key_float(top)) * rate)
