"""Which tokens top-k, top-p and min-p keep, as one border for each row, found without sorting.

Logits become integer keys of the same order. The border is searched by counting, or adding up, what lies at or above a
key: each pass over the row cuts the interval in four, until what may still matter fits in a pool of token ids. One
program a row, always in the same order: a row's border does not depend on its neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import SamplingMetadata
from .pdl import LAUNCH, wait

MOST = tl.constexpr(torch.finfo(torch.float32).max / 4)  # an infinite logit counts as this
LOWEST = tl.constexpr(-(2**31))  # below the key of every number: the border of a row that keeps all
NOTHING = tl.constexpr(-2139095041)  # the key of -inf
BLOCK = 4096
POOL = 2048  # token ids that fit in a row's pool
WAYS = tl.constexpr(64)  # keys that are tried at once where no tokens are read
MANY = tl.constexpr(2.0**30)  # more than there are tokens


def limits(logits: Tensor, sampling: SamplingMetadata) -> tuple[Tensor, Tensor]:
    """For each row of [R, V] a border [R] int32 and a last id [R] int32, for `is_kept`."""
    rows, vocabulary = logits.shape
    borders, lasts = torch.empty((2, rows), dtype=torch.int32, device=logits.device).unbind()
    pool = torch.empty((rows, POOL), dtype=torch.int32, device=logits.device)
    _limits[(rows,)](
        logits,
        logits.stride(0),
        vocabulary,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        pool,
        borders,
        lasts,
        room=POOL,
        blocks=triton.cdiv(vocabulary, BLOCK),
        block=BLOCK,
        num_warps=16,
        **LAUNCH,
    )
    return borders, lasts


@triton.jit
def is_kept(logit, token, border, last):
    """Whether a token may be drawn. NaN must have become -inf."""
    return _remains(order_key(logit), token, (border, last))


@triton.jit
def order_key(logit):
    """int32 that orders as logits do; the infinite ones and those beyond MOST are equal."""
    return float_key(tl.minimum(logit, MOST))


@triton.jit
def float_key(value):
    """int32 that orders as floats do, the two zeros being equal."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def key_float(key):
    """The float32 whose key this is."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _limits(
    logits,
    stride,
    vocabulary,
    temperature,
    top_k,
    top_p,
    min_p,
    pools,
    borders,
    lasts,
    room: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
):
    wait()
    row = tl.program_id(0).to(tl.int64)
    warmth, count = tl.load(temperature + row), tl.load(top_k + row)
    share, floor = tl.load(top_p + row), tl.load(min_p + row)
    source, pool = logits + row * stride, pools + row * room
    counted = (count > 0) & (count < vocabulary)
    border, last = tl.full((), LOWEST, tl.int32), tl.full((), -1, tl.int32)  # all are above that border
    if (warmth > 0) & (counted | (share < 1) | (floor > 0)):
        top = _largest(source, vocabulary, blocks, block)
        if top > NOTHING:
            scale = (top, warmth.to(tl.float64))
            held = tl.full((), vocabulary, tl.int32)
            if counted:
                kept, goal = (border, last), count.to(tl.float64)
                border, last = _border(source, pool, vocabulary, kept, scale, goal, held, False, room, blocks, block)
                held = count
            if share < 1:
                kept, goal = (border, last), share.to(tl.float64)
                border, last = _border(source, pool, vocabulary, kept, scale, goal, held, True, room, blocks, block)
            if floor > 0:
                least, bound = _least(scale, floor.to(tl.float64), vocabulary)
                last = tl.where(least > border, bound, tl.where(least == border, tl.minimum(bound, last), last))
                border = tl.maximum(least, border)
    tl.store(borders + row, border)
    tl.store(lasts + row, last)


@triton.jit
def _border(
    row,
    pool,
    vocabulary,
    kept,
    scale,
    goal,
    held,
    weighted: tl.constexpr,
    room: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
):
    """The border and last id after one more rule: the first of the `held` tokens kept so far that reach the goal.

    They are measured by their number or, weighted, by their share of the probability.
    """
    low, high = tl.maximum(kept[0], NOTHING).to(tl.int64), scale[0].to(tl.int64) + 1
    above = tl.full((), 0.0, tl.float64)  # the measure of what lies at `high` or above
    total = tl.full((), 0.0 if weighted else 1.0, tl.float64)
    if held > room:
        if weighted:
            total = _total(row, vocabulary, kept, scale, blocks, block)
        while (high - low > 1) & (held > room):
            low, high, held, above = _narrow(
                row, vocabulary, kept, scale, (total, goal), (low, high, held, above), weighted, blocks, block
            )
    if held > room:
        border = low.to(tl.int32)
        last = _nth(
            row, vocabulary, kept, border, _needed(border, scale, (total, goal), above, weighted), blocks, block
        )
    else:
        _gather(row, pool, vocabulary, kept, low, room, blocks, block)
        border, last = _finish(row, pool, held, scale, (total, goal), (low, high, above), weighted, room)
    return border, last


@triton.jit
def _finish(row, pool, size, scale, aim, interval, weighted: tl.constexpr, room: tl.constexpr):
    """The border and last id among the tokens of a pool."""
    low, high, above = interval
    total, goal = aim
    at = tl.arange(0, room)
    token = tl.load(pool + at, mask=at < size, other=0)
    logit = tl.load(row + token, mask=at < size, other=-float("inf"))
    key = tl.where(at < size, order_key(tl.where(logit == logit, logit, -float("inf"))), LOWEST)
    weight = tl.full((room,), 1.0, tl.float64)
    if weighted:
        weight = tl.where(at < size, _weight(tl.maximum(key, NOTHING), scale), 0.0)
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
        # No other key lies between, so that few steps are left.
        present = (key >= low) & (key < high)
        low, high = (
            tl.min(tl.where(present, key, high), 0).to(tl.int64),
            tl.max(tl.where(present, key, low), 0).to(tl.int64) + 1,
        )
    border = low.to(tl.int32)
    equal = (key == border).to(tl.int32)
    within = (equal > 0) & (tl.cumsum(equal, 0) <= _needed(border, scale, (total, goal), above, weighted))
    return border, tl.max(tl.where(within, token, -1), 0)


@triton.jit
def _narrow(
    row,
    vocabulary,
    kept,
    scale,
    aim,
    interval,
    weighted: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
):
    """One pass tries three keys within the interval: (low, high, tokens at or above low, measure at or above high)."""
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
    low, high, held, above = _judge(key_1, count_1, sum_1, aim, (low, high, held, above), weighted)
    low, high, held, above = _judge(key_2, count_2, sum_2, aim, (low, high, held, above), weighted)
    low, high, held, above = _judge(key_3, count_3, sum_3, aim, (low, high, held, above), weighted)
    return low, high, held, above


@triton.jit
def _judge(at, counts, sums, aim, interval, weighted: tl.constexpr):
    """The interval after a key, tried in ascending order: it becomes the lower end if it reaches the goal."""
    low, high, held, above = interval
    total, goal = aim
    count = tl.sum(counts, 0)
    measure = tl.sum(sums, 0) if weighted else count.to(tl.float64)
    enough = measure / total >= goal
    # Whatever is no number misses, so that the search ends.
    reached, missed = (at < high) & enough, (at < high) & (enough == 0)
    low, high = tl.where(reached, at.to(tl.int64), low), tl.where(missed, at.to(tl.int64), high)
    return low, high, tl.where(reached, count, held), tl.where(missed, measure, above)


@triton.jit
def _needed(border, scale, aim, above, weighted: tl.constexpr):
    """How many of the tokens at the border it takes: the fewest with (above + n * weight) / total >= goal."""
    total, goal = aim
    weight = _weight(border, scale) if weighted else tl.full((), 1.0, tl.float64)
    count = tl.where(weight > 0, tl.ceil((goal * total - above) / weight), 1.0)
    return tl.minimum(tl.maximum(count, 1.0), MANY).to(tl.int32)


@triton.jit
def _nth(row, vocabulary, kept, wanted, count, blocks: tl.constexpr, block: tl.constexpr):
    """The id of the count-th token whose key is `wanted`, or of the last such."""
    found, seen = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    for index in range(blocks):
        key, token, remains = _read(row, index, vocabulary, kept, block)
        equal = (remains & (key == wanted)).to(tl.int32)
        within = (equal > 0) & (seen + tl.cumsum(equal, 0) <= count)
        found = tl.maximum(found, tl.max(tl.where(within, token, -1), 0))
        seen += tl.sum(equal, 0)
    return found


@triton.jit
def _gather(row, pool, vocabulary, kept, low, room: tl.constexpr, blocks: tl.constexpr, block: tl.constexpr):
    """The ids of the tokens kept so far at or above `low`, ascending, into the pool."""
    tl.debug_barrier()  # others may still read what an earlier search left
    base, lowest = tl.full((), 0, tl.int32), low.to(tl.int32)
    for index in range(blocks):
        key, token, remains = _read(row, index, vocabulary, kept, block)
        wanted = (remains & (key >= lowest)).to(tl.int32)
        place = base + tl.cumsum(wanted, 0) - 1
        tl.store(pool + place, token, mask=(wanted > 0) & (place < room))
        base += tl.sum(wanted, 0)
    tl.debug_barrier()  # what one thread stores here another loads next


@triton.jit
def _total(row, vocabulary, kept, scale, blocks: tl.constexpr, block: tl.constexpr):
    """The sum of the weights of the tokens kept so far."""
    sums = tl.zeros((block,), tl.float64)
    for index in range(blocks):
        key, _, remains = _read(row, index, vocabulary, kept, block)
        sums += tl.where(remains, _weight(key, scale), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _largest(row, vocabulary, blocks: tl.constexpr, block: tl.constexpr):
    """The largest key of the row."""
    keys = tl.full((block,), NOTHING, tl.int32)
    for index in range(blocks):
        key, _, _ = _read(row, index, vocabulary, (LOWEST, 0), block)
        keys = tl.maximum(keys, key)
    return tl.max(keys, 0)


@triton.jit
def _least(scale, floor, vocabulary):
    """The lowest key whose weight is at least `floor`, and the last id kept at it: none where `floor` is above 1."""
    low, high = tl.full((), NOTHING, tl.int64), scale[0].to(tl.int64)
    while high - low > 1:
        step = (high - low + WAYS - 1) // WAYS
        keys = tl.minimum(low + step * (1 + tl.arange(0, WAYS)), high - 1)
        enough = _weight(keys.to(tl.int32), scale) >= floor
        low, high = tl.max(tl.where(enough, low, keys), 0), tl.min(tl.where(enough, keys, high), 0)
    return high.to(tl.int32), tl.where(floor > 1, -1, vocabulary - 1)


@triton.jit
def _read(row, index, vocabulary, kept, block: tl.constexpr):
    """Keys and ids of one block, and which of them are kept so far."""
    token = index * block + tl.arange(0, block)
    inside = token < vocabulary
    logit = tl.load(row + token, mask=inside, other=-float("inf"))
    key = order_key(tl.where(logit == logit, logit, -float("inf")))
    return key, token, inside & _remains(key, token, kept)


@triton.jit
def _remains(key, token, kept):
    border, last = kept
    return (key > border) | ((key == border) & (token <= last))


@triton.jit
def _weight(key, scale):
    """exp((logit - the largest) / temperature), float64."""
    top, warmth = scale
    return tl.exp((key_float(key).to(tl.float64) - key_float(top).to(tl.float64)) / warmth)
