"""Thresholds of top-k, top-p and min-p, one per row, found without sorting.

Logits become integer keys of the same order. The threshold is found by counting (top-k) or summing (top-p) the tokens
at or above a key: each pass over the row quarters the interval, until the candidates fit into a pool of token ids. One
program per row, with a fixed order of sums, so that a row's threshold does not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import SamplingMetadata
from .device import LAUNCH, wait

MAX_LOGIT = tl.constexpr(torch.finfo(torch.float32).max / 4)  # larger logits, also +inf, count as this
MIN_KEY = tl.constexpr(-(2**31))  # below the key of every float: the threshold of a row without truncation
NEG_INF_KEY = tl.constexpr(-2139095041)  # the key of -inf
BLOCK = 4096
POOL = 2048  # token ids in a row's pool
FANOUT = tl.constexpr(64)  # keys that are tried at once in searches that read no tokens
MANY = tl.constexpr(2.0**30)  # more than any vocabulary


def find_thresholds(logits: Tensor, sampling: SamplingMetadata) -> tuple[Tensor, Tensor]:
    """Return a threshold key [R] int32 and a last id [R] int32 for each row of logits [R, V], for `is_kept`."""
    rows, vocabulary = logits.shape
    thresholds, last_ids = torch.empty((2, rows), dtype=torch.int32, device=logits.device).unbind()
    pool = torch.empty((rows, POOL), dtype=torch.int32, device=logits.device)
    _find_thresholds[(rows,)](
        logits,
        logits.stride(0),
        vocabulary,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        pool,
        thresholds,
        last_ids,
        capacity=POOL,
        blocks=triton.cdiv(vocabulary, BLOCK),
        block=BLOCK,
        num_warps=16,
        **LAUNCH,
    )
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


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "thresholds", "last_ids"])
def _find_thresholds(
    logits,
    stride,
    vocabulary,
    temperature,
    top_k,
    top_p,
    min_p,
    pools,
    thresholds,
    last_ids,
    capacity: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
):
    wait()
    row = tl.program_id(0).to(tl.int64)
    temp, count = tl.load(temperature + row), tl.load(top_k + row)
    share, floor = tl.load(top_p + row), tl.load(min_p + row)
    source, pool = logits + row * stride, pools + row * capacity
    counted = (count > 0) & (count < vocabulary)
    threshold, last = tl.full((), MIN_KEY, tl.int32), tl.full((), -1, tl.int32)  # keeps all tokens
    if (temp > 0) & (counted | (share < 1) | (floor > 0)):
        top = _largest(source, vocabulary, blocks, block)
        if top > NEG_INF_KEY:
            scale = (top, temp.to(tl.float64))
            held = tl.full((), vocabulary, tl.int32)
            if counted:
                kept, goal = (threshold, last), count.to(tl.float64)
                threshold, last = _threshold(
                    source, pool, vocabulary, kept, scale, goal, held, False, capacity, blocks, block
                )
                held = count
            if share < 1:
                kept, goal = (threshold, last), share.to(tl.float64)
                threshold, last = _threshold(
                    source, pool, vocabulary, kept, scale, goal, held, True, capacity, blocks, block
                )
            if floor > 0:
                least, bound = _least(scale, floor.to(tl.float64), vocabulary)
                last = tl.where(least > threshold, bound, tl.where(least == threshold, tl.minimum(bound, last), last))
                threshold = tl.maximum(least, threshold)
    tl.store(thresholds + row, threshold)
    tl.store(last_ids + row, last)


@triton.jit
def _threshold(
    row,
    pool,
    vocabulary,
    kept,
    scale,
    goal,
    held,
    weighted: tl.constexpr,
    capacity: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
):
    """Return threshold and last id after one more rule: the fewest of the `held` tokens that reach the goal.

    Tokens are measured by their number or, `weighted`, by their share of the probability.
    """
    low, high = tl.maximum(kept[0], NEG_INF_KEY).to(tl.int64), scale[0].to(tl.int64) + 1
    above = tl.full((), 0.0, tl.float64)  # the measure of the tokens at `high` or above
    total = tl.full((), 0.0 if weighted else 1.0, tl.float64)
    if held > capacity:
        if weighted:
            total = _total(row, vocabulary, kept, scale, blocks, block)
        while (high - low > 1) & (held > capacity):
            low, high, held, above = _narrow(
                row, vocabulary, kept, scale, (total, goal), (low, high, held, above), weighted, blocks, block
            )
    if held > capacity:
        threshold = low.to(tl.int32)
        last = _nth(
            row, vocabulary, kept, threshold, _needed(threshold, scale, (total, goal), above, weighted), blocks, block
        )
    else:
        _gather(row, pool, vocabulary, kept, low, capacity, blocks, block)
        threshold, last = _finish(row, pool, held, scale, (total, goal), (low, high, above), weighted, capacity)
    return threshold, last


@triton.jit
def _finish(row, pool, size, scale, target, interval, weighted: tl.constexpr, capacity: tl.constexpr):
    """Return threshold and last id among the tokens of a pool."""
    low, high, above = interval
    total, goal = target
    at = tl.arange(0, capacity)
    token = tl.load(pool + at, mask=at < size, other=0)
    logit = tl.load(row + token, mask=at < size, other=-float("inf"))
    key = tl.where(at < size, order_key(tl.where(logit == logit, logit, -float("inf"))), MIN_KEY)
    weight = tl.full((capacity,), 1.0, tl.float64)
    if weighted:
        weight = tl.where(at < size, _weight(tl.maximum(key, NEG_INF_KEY), scale), 0.0)
        if total == 0:
            total = tl.sum(weight, 0)
    while high - low > 1:
        middle = low + (high - low) // 2
        measure = tl.sum(tl.where(key >= middle, weight, 0.0), 0)
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
def _narrow(
    row,
    vocabulary,
    kept,
    scale,
    target,
    interval,
    weighted: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
):
    """Try three keys in one pass; the interval is (low, high, tokens at or above low, measure at or above high)."""
    low, high, held, above = interval
    step = tl.maximum((high - low) // 4, 1)
    key_1, key_2, key_3 = (low + step).to(tl.int32), (low + 2 * step).to(tl.int32), (low + 3 * step).to(tl.int32)
    count_1, sum_1 = tl.zeros((block,), tl.int32), tl.zeros((block,), tl.float64)
    count_2, sum_2 = tl.zeros((block,), tl.int32), tl.zeros((block,), tl.float64)
    count_3, sum_3 = tl.zeros((block,), tl.int32), tl.zeros((block,), tl.float64)
    for index in range(blocks):
        key, _, remains = _read(row, index, vocabulary, kept, block)
        over_1, over_2, over_3 = remains & (key >= key_1), remains & (key >= key_2), remains & (key >= key_3)
        count_1 += over_1.to(tl.int32)
        count_2 += over_2.to(tl.int32)
        count_3 += over_3.to(tl.int32)
        if weighted:
            weight = _weight(key, scale)
            sum_1 += tl.where(over_1, weight, 0.0)
            sum_2 += tl.where(over_2, weight, 0.0)
            sum_3 += tl.where(over_3, weight, 0.0)
    low, high, held, above = _judge(key_1, count_1, sum_1, target, (low, high, held, above), weighted)
    low, high, held, above = _judge(key_2, count_2, sum_2, target, (low, high, held, above), weighted)
    low, high, held, above = _judge(key_3, count_3, sum_3, target, (low, high, held, above), weighted)
    return low, high, held, above


@triton.jit
def _judge(at, counts, sums, target, interval, weighted: tl.constexpr):
    """Return the interval after trying a key, in ascending order: it becomes the lower end if it reaches the goal."""
    low, high, held, above = interval
    total, goal = target
    count = tl.sum(counts, 0)
    measure = tl.sum(sums, 0) if weighted else count.to(tl.float64)
    enough = measure / total >= goal
    # NaN counts as not reached, so that the search ends.
    reached, failed = (at < high) & enough, (at < high) & (enough == 0)
    low, high = tl.where(reached, at.to(tl.int64), low), tl.where(failed, at.to(tl.int64), high)
    return low, high, tl.where(reached, count, held), tl.where(failed, measure, above)


@triton.jit
def _needed(threshold, scale, target, above, weighted: tl.constexpr):
    """Return how many tokens at the threshold are needed: the fewest with (above + n * weight) / total >= goal."""
    total, goal = target
    weight = _weight(threshold, scale) if weighted else tl.full((), 1.0, tl.float64)
    count = tl.where(weight > 0, tl.ceil((goal * total - above) / weight), 1.0)
    return tl.minimum(tl.maximum(count, 1.0), MANY).to(tl.int32)


@triton.jit
def _nth(row, vocabulary, kept, wanted, count, blocks: tl.constexpr, block: tl.constexpr):
    """Return the id of the count-th token whose key is `wanted`, or of the last one."""
    found, seen = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    for index in range(blocks):
        key, token, remains = _read(row, index, vocabulary, kept, block)
        equal = (remains & (key == wanted)).to(tl.int32)
        within = (equal > 0) & (seen + tl.cumsum(equal, 0) <= count)
        found = tl.maximum(found, tl.max(tl.where(within, token, -1), 0))
        seen += tl.sum(equal, 0)
    return found


@triton.jit
def _gather(row, pool, vocabulary, kept, low, capacity: tl.constexpr, blocks: tl.constexpr, block: tl.constexpr):
    """Write the ids of the tokens kept so far at or above `low` into the pool, ascending."""
    tl.debug_barrier()  # other threads may still read the pool of an earlier search
    base, lowest = tl.full((), 0, tl.int32), low.to(tl.int32)
    for index in range(blocks):
        key, token, remains = _read(row, index, vocabulary, kept, block)
        wanted = (remains & (key >= lowest)).to(tl.int32)
        slot = base + tl.cumsum(wanted, 0) - 1
        tl.store(pool + slot, token, mask=(wanted > 0) & (slot < capacity))
        base += tl.sum(wanted, 0)
    tl.debug_barrier()  # other threads load the pool next


@triton.jit
def _total(row, vocabulary, kept, scale, blocks: tl.constexpr, block: tl.constexpr):
    """Return the sum of the weights of the tokens kept so far."""
    sums = tl.zeros((block,), tl.float64)
    for index in range(blocks):
        key, _, remains = _read(row, index, vocabulary, kept, block)
        sums += tl.where(remains, _weight(key, scale), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _largest(row, vocabulary, blocks: tl.constexpr, block: tl.constexpr):
    """Return the largest key of the row."""
    keys = tl.full((block,), NEG_INF_KEY, tl.int32)
    for index in range(blocks):
        key, _, _ = _read(row, index, vocabulary, (MIN_KEY, 0), block)
        keys = tl.maximum(keys, key)
    return tl.max(keys, 0)


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
    """Load keys and ids of one block, and which of them are kept so far."""
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
