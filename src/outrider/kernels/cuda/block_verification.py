"""Block verification: how much of each chain is kept, all of it considered at once. See reject.py."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .. import philox
from .noise import uniform
from .rejection_probs import ELDEST, KEPT, LAWS, LINKS, Q_PER, WEIGHT, draft_share, target_share

ACCEPT = tl.constexpr(philox.ACCEPT)


def accept_blocks(
    seen: tuple[Any, ...],
    trees: tuple[Any, ...],
    target: tuple[Any, ...],
    dice: tuple[Any, ...],
    parts: Tensor,
    requests: int,
    columns: int,
    vocabulary: int,
    sizes: tuple[int, int, int, int],
) -> None:
    """The links KEPT and the weights of residuals. `parts` [R, pieces, 4] has served, and is written over."""
    piece, pieces, many, wide = sizes
    _cover[(requests * columns, pieces)](*seen, *trees, *target, parts, columns, vocabulary, pieces, piece, num_warps=8)
    _accept[(requests,)](*seen, *trees, *target, *dice, parts, vocabulary, pieces, many, wide, num_warps=1)


@triton.jit
def _token_shares(logits, guesses, laws, links, tokens, row, temperature, borders, lasts, vocabulary):
    """p and q of the token after this row, in a chain."""
    warmth, guess = tl.load(temperature + row), tl.load(tokens + row + 1)
    p = target_share(
        logits, laws, links, row, guess, guess >= 0, warmth, tl.load(borders + row), tl.load(lasts + row), vocabulary
    )
    return p, draft_share(guesses, laws, tokens, row + 1, guess, guess >= 0, guess < 0, warmth, vocabulary)


@triton.jit
def _weight_after(weight, p, q):
    """The part of the target's probability that the draft has covered, one token later."""
    ratio = tl.minimum(weight * p / tl.where(q > 0, q, 1.0), 1.0)
    return tl.where(weight * p > 0, tl.where(q > 0, ratio, 1.0), 0.0)


@triton.jit(do_not_specialize=["columns", "vocabulary", "pieces"])
def _cover(
    logits, guesses, laws, links,
    starts, tokens, parents,
    temperature, borders, lasts,
    parts, columns, vocabulary, pieces,
    piece: tl.constexpr,
):  # fmt: skip
    """What the next draft leaves of weight * p, summed over a piece of the vocabulary, at each row with a draft."""
    request, split = tl.program_id(0) // columns, tl.program_id(1)
    first = tl.load(starts + request)
    row, end = first + tl.program_id(0) % columns, tl.load(starts + request + 1)
    eldest = tl.load(links + row * LINKS + ELDEST, mask=row < end, other=-1)
    if (row > first) & (eldest >= 0):
        weight = tl.full((), 1.0, tl.float64)
        at = first
        while at < row:
            p, q = _token_shares(logits, guesses, laws, links, tokens, at, temperature, borders, lasts, vocabulary)
            weight = _weight_after(weight, p, q)
            at += 1
        warmth, token = tl.load(temperature + row), split * piece + tl.arange(0, piece)
        inside = token < vocabulary
        p = target_share(
            logits, laws, links, row, token, inside, warmth, tl.load(borders + row), tl.load(lasts + row), vocabulary
        )
        q = draft_share(guesses, laws, tokens, row + 1, token, inside, token < 0, warmth, vocabulary)
        left = tl.sum(tl.where(inside, tl.maximum(weight * p - q, 0.0), 0.0), 0)
        tl.store(parts + (row * pieces + split).to(tl.int64) * 4, left)


@triton.jit(do_not_specialize=["vocabulary", "pieces"])
def _accept(
    logits, guesses, laws, links,
    starts, tokens, parents,
    temperature, borders, lasts,
    seeds, positions, epochs,
    parts, vocabulary, pieces,
    many: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """The chain is kept up to the last token whose coin passes. One that was not drawn: up to the first that fails."""
    request = tl.program_id(0)
    first, end = tl.load(starts + request), tl.load(starts + request + 1)
    node, piece = tl.arange(0, wide), tl.arange(0, many)
    weights = tl.full((wide,), 1.0, tl.float64)
    weight = tl.full((), 1.0, tl.float64)
    drawn = tl.full((), 0, tl.int32)  # whether any token was
    plain = tl.full((), 0, tl.int32)  # tokens before the first that fails
    longest = tl.full((), 0, tl.int32)
    depth = tl.full((), 0, tl.int32)
    child = tl.load(links + first * LINKS + ELDEST, mask=first < end, other=-1)
    while child >= 0:
        row = first + depth
        p, q = _token_shares(logits, guesses, laws, links, tokens, row, temperature, borders, lasts, vocabulary)
        weight = _weight_after(weight, p, q)
        child = tl.load(links + (row + 1) * LINKS + ELDEST)
        part = parts + ((row + 1) * pieces + piece).to(tl.int64) * 4
        left = tl.sum(tl.load(part, mask=(piece < pieces) & (child >= 0), other=0.0), 0)
        whole = left + 1 - weight
        bound = tl.where(whole > 0, left / tl.where(whole > 0, whole, 1.0), 1.0)
        bound = tl.where(child < 0, weight, bound)
        epoch = 0 if epochs is None else tl.load(epochs + row)
        coin = uniform(tl.load(seeds + row), tl.load(positions + row), depth * 0, ACCEPT, epoch)
        drawn = tl.where(tl.load(laws + (row + 1) * LAWS + Q_PER) >= 0, 1, drawn)
        plain += ((plain == depth) & (p > 0) & (coin * q <= p)).to(tl.int32)
        depth += 1
        longest = tl.where(coin <= bound, depth, longest)
        weights = tl.where(node == depth, weight, weights)
    accepted = tl.where(drawn > 0, longest, plain)
    weights = tl.where(drawn > 0, weights, 1.0)
    inside = node < end - first
    tl.store(links + (first + node) * LINKS + KEPT, tl.where(node < accepted, node + 1, -1), mask=inside)
    tl.store(laws + (first + node) * LAWS + WEIGHT, weights, mask=inside)
