"""Block verification: accept a prefix of each chain by considering the whole chain. See rejection.py."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .. import philox
from .noise import uniform
from .rejection_probs import FIRST_CHILD, KEPT, LINKS, Q_PER, STATS, WEIGHT, draft_prob, target_prob

ACCEPT = tl.constexpr(philox.ACCEPT)


def accept_blocks(
    row_data: tuple[Any, ...],
    trees: tuple[Any, ...],
    target: tuple[Any, ...],
    noise_keys: tuple[Any, ...],
    parts: Tensor,
    requests: int,
    columns: int,
    vocabulary: int,
    sizes: tuple[int, int, int, int],
) -> None:
    """Write the links KEPT and the weights of residuals. `parts` [R, pieces, 4] is reused as scratch memory."""
    piece, pieces, many, wide = sizes
    _cover[(requests * columns, pieces)](
        *row_data, *trees, *target, parts, columns, vocabulary, pieces, piece, num_warps=8
    )
    _accept[(requests,)](*row_data, *trees, *target, *noise_keys, parts, vocabulary, pieces, many, wide, num_warps=1)


@triton.jit
def _token_probs(logits, draft_logits, stats, links, tokens, row, temperature, thresholds, last_ids, vocabulary):
    """Return p and q of the token after this row of a chain."""
    temp, drafted = tl.load(temperature + row), tl.load(tokens + row + 1)
    p = target_prob(
        logits,
        stats,
        links,
        row,
        drafted,
        drafted >= 0,
        temp,
        tl.load(thresholds + row),
        tl.load(last_ids + row),
        vocabulary,
    )
    return p, draft_prob(draft_logits, stats, tokens, row + 1, drafted, drafted >= 0, drafted < 0, temp, vocabulary)


@triton.jit
def _weight_after(weight, p, q):
    """Return the weight after one more token: the part of the target's probability that the draft covers."""
    ratio = tl.minimum(weight * p / tl.where(q > 0, q, 1.0), 1.0)
    return tl.where(weight * p > 0, tl.where(q > 0, ratio, 1.0), 0.0)


@triton.jit(do_not_specialize=["columns", "vocabulary", "pieces"])
def _cover(
    logits, draft_logits, stats, links,
    starts, tokens, parents,
    temperature, thresholds, last_ids,
    parts, columns, vocabulary, pieces,
    piece: tl.constexpr,
):  # fmt: skip
    """Sum max(weight * p - q, 0) over a piece of the vocabulary, at each row with a drafted token."""
    request, split = tl.program_id(0) // columns, tl.program_id(1)
    first = tl.load(starts + request)
    row, end = first + tl.program_id(0) % columns, tl.load(starts + request + 1)
    first_child = tl.load(links + row * LINKS + FIRST_CHILD, mask=row < end, other=-1)
    if (row > first) & (first_child >= 0):
        weight = tl.full((), 1.0, tl.float64)
        at = first
        while at < row:
            p, q = _token_probs(
                logits, draft_logits, stats, links, tokens, at, temperature, thresholds, last_ids, vocabulary
            )
            weight = _weight_after(weight, p, q)
            at += 1
        temp, token = tl.load(temperature + row), split * piece + tl.arange(0, piece)
        inside = token < vocabulary
        p = target_prob(
            logits,
            stats,
            links,
            row,
            token,
            inside,
            temp,
            tl.load(thresholds + row),
            tl.load(last_ids + row),
            vocabulary,
        )
        q = draft_prob(draft_logits, stats, tokens, row + 1, token, inside, token < 0, temp, vocabulary)
        left = tl.sum(tl.where(inside, tl.maximum(weight * p - q, 0.0), 0.0), 0)
        tl.store(parts + (row * pieces + split).to(tl.int64) * 4, left)


@triton.jit(do_not_specialize=["vocabulary", "pieces"])
def _accept(
    logits, draft_logits, stats, links,
    starts, tokens, parents,
    temperature, thresholds, last_ids,
    seeds, positions, epochs,
    parts, vocabulary, pieces,
    many: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Accept the chain up to the last token whose coin passes; a chain without samples up to the first failure."""
    request = tl.program_id(0)
    first, end = tl.load(starts + request), tl.load(starts + request + 1)
    node, piece = tl.arange(0, wide), tl.arange(0, many)
    weights = tl.full((wide,), 1.0, tl.float64)
    weight = tl.full((), 1.0, tl.float64)
    drawn = tl.full((), 0, tl.int32)  # whether any token was sampled
    plain = tl.full((), 0, tl.int32)  # tokens before the first failure
    longest = tl.full((), 0, tl.int32)
    depth = tl.full((), 0, tl.int32)
    child = tl.load(links + first * LINKS + FIRST_CHILD, mask=first < end, other=-1)
    while child >= 0:
        row = first + depth
        p, q = _token_probs(
            logits, draft_logits, stats, links, tokens, row, temperature, thresholds, last_ids, vocabulary
        )
        weight = _weight_after(weight, p, q)
        child = tl.load(links + (row + 1) * LINKS + FIRST_CHILD)
        part = parts + ((row + 1) * pieces + piece).to(tl.int64) * 4
        left = tl.sum(tl.load(part, mask=(piece < pieces) & (child >= 0), other=0.0), 0)
        whole = left + 1 - weight
        bound = tl.where(whole > 0, left / tl.where(whole > 0, whole, 1.0), 1.0)
        bound = tl.where(child < 0, weight, bound)
        epoch = 0 if epochs is None else tl.load(epochs + row)
        coin = uniform(tl.load(seeds + row), tl.load(positions + row), depth * 0, ACCEPT, epoch)
        drawn = tl.where(tl.load(stats + (row + 1) * STATS + Q_PER) >= 0, 1, drawn)
        plain += ((plain == depth) & (p > 0) & (coin * q <= p)).to(tl.int32)
        depth += 1
        longest = tl.where(coin <= bound, depth, longest)
        weights = tl.where(node == depth, weight, weights)
    accepted = tl.where(drawn > 0, longest, plain)
    weights = tl.where(drawn > 0, weights, 1.0)
    inside = node < end - first
    tl.store(links + (first + node) * LINKS + KEPT, tl.where(node < accepted, node + 1, -1), mask=inside)
    tl.store(stats + (first + node) * STATS + WEIGHT, weights, mask=inside)
