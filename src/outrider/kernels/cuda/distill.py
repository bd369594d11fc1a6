"""How far a draft's distribution is from the target's, and the gradient of that in the draft's logits, row by row.

The meaning is that of train/losses.py: p is the target's distribution, q the draft's, both over U tokens. A program has
a row to itself and reads it twice, three times where the gradient hangs on a sum that hangs on both distributions. Each
pass begins where the one before it ended, at what the cache still holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import bound, rounded
from .thresholds import MOST

KINDS = frozenset(("kl", "ce", "tv", "nla", "lk_hybrid"))
BLOCK = 4096  # tokens at a time
WARPS = 16  # one program fills a multiprocessor: few rows are under way, and much of them stays in the cache
STAGES = 1  # blocks that are read ahead, and the one that is worked on: other rows hide what is waited for
TINY: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)


def distill(
    kind: str,
    logits: Tensor,
    wanted: Tensor,
    whole: Tensor | None,
    gradient: Tensor | None,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [R] f32, the draft's best columns [R] int64, and the sums of min(p, q) [R] f32, p as part of `whole`.

    Of logits of the draft and of the target, [R, U] f32 each; `places` [R]: the rows of `wanted` [any, U] that are
    meant, None: those in the draft's order. `whole` [R] f32: logsumexp of all of the target's logits;
    None: U is all of them. `gradient` [R, U] takes that of the losses, rounded to its type. A token costs nothing where
    p is 0, and next to infinitely much where q alone is.
    """
    assert kind in KINDS and logits.shape[1] == wanted.shape[1] and logits.stride(1) == wanted.stride(1) == 1
    assert len(logits) == len(wanted if places is None else places)
    assert gradient is None or (gradient.shape == logits.shape and gradient.stride(1) == 1)
    rows, columns = logits.shape
    losses, overlap = torch.empty((2, rows), dtype=torch.float32, device=logits.device).unbind()
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _distill[(rows,)](
            logits,
            logits.stride(0),
            wanted,
            wanted.stride(0),
            places,
            whole,
            gradient,
            0 if gradient is None else gradient.stride(0),
            losses,
            best,
            overlap,
            columns,
            triton.cdiv(columns, BLOCK),
            kind=kind,
            block=BLOCK,
            stages=STAGES,
            num_warps=WARPS,
        )
    return losses, best, overlap


@triton.jit
def _distill(
    logits,
    logits_stride,
    wanted,
    wanted_stride,
    places,
    whole,
    gradient,
    gradient_stride,
    losses,
    best,
    overlap,
    columns,
    blocks,
    kind: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    place = row
    if places is not None:
        place = tl.load(places + row).to(tl.int64)
    wanted += place * wanted_stride
    # Largest logits, sums of exp(logit - that), and where the largest are.
    top_q, sum_q, at_q, top_p, sum_p, at_p = _masses(logits, wanted, columns, blocks, block, stages)
    tl.store(best + row, at_q)
    share = 1.0  # of the target's chances, what can be drafted
    if whole is not None:
        share = tl.minimum(tl.exp(top_p + tl.log(sum_p) - tl.load(whole + row)), 1.0)

    kept = tl.zeros([block], tl.float32)  # sums to that of min(p * share, q)
    shared = tl.zeros([block], tl.float32)  # min(p, q)
    below = tl.zeros([block], tl.float32)  # q where it is less than p
    cost = tl.zeros([block], tl.float32)  # p times how much further the target's logit is from its largest
    for step in tl.range(0, bound(blocks), num_stages=stages):
        column = (blocks - 1 - step) * block + tl.arange(0, block)
        q, away_q = _chance(logits, column, columns, top_q, sum_q)
        p, away_p = _chance(wanted, column, columns, top_p, sum_p)
        kept += tl.minimum(p * share, q)
        if kind == "kl" or kind == "lk_hybrid":
            cost += p * (tl.maximum(away_p, -MOST) - tl.maximum(away_q, -MOST))  # never of infinities
        if kind == "kl" or kind == "ce":
            if gradient is not None:
                right = p if kind == "kl" else tl.where(column == at_p, 1.0, 0.0)
                _store(gradient + row * gradient_stride, column, columns, q - right)
        else:
            shared += tl.minimum(p, q)
            below += tl.where(q < p, q, 0.0)
    tl.store(overlap + row, tl.sum(kept, 0))

    divergence = tl.sum(cost, 0) - tl.log(sum_p) + tl.log(sum_q)
    if kind == "kl":
        tl.store(losses + row, divergence)
    elif kind == "ce":
        tl.store(losses + row, top_q - tl.load(logits + at_p) + tl.log(sum_q))
    else:
        loss, far, by_shared = _of_shared(tl.sum(shared, 0), divergence, kind)
        tl.store(losses + row, loss)
        if gradient is not None:
            smaller = tl.sum(below, 0)
            for step in tl.range(0, bound(blocks), num_stages=stages):
                column = step * block + tl.arange(0, block)
                q, _ = _chance(logits, column, columns, top_q, sum_q)
                p, _ = _chance(wanted, column, columns, top_p, sum_p)
                # The sum of min(p, q) changes with q where q is the smaller.
                change = by_shared * (tl.where(q < p, q, 0.0) - q * smaller)
                if kind == "lk_hybrid":
                    change += far * (q - p)
                _store(gradient + row * gradient_stride, column, columns, change)


@triton.jit
def _masses(logits, wanted, columns, blocks, block: tl.constexpr, stages: tl.constexpr):
    """The first pass over a row: every lane by itself, then all of them at once."""
    top_q, sum_q, at_q = _start(block)
    top_p, sum_p, at_p = _start(block)
    for step in tl.range(0, bound(blocks), num_stages=stages):
        column = step * block + tl.arange(0, block)
        logit = tl.load(logits + column, mask=column < columns, other=-float("inf"))
        goal = tl.load(wanted + column, mask=column < columns, other=-float("inf"))
        top_q, sum_q, at_q = _climb(logit, column, top_q, sum_q, at_q)
        top_p, sum_p, at_p = _climb(goal, column, top_p, sum_p, at_p)
    top_q, sum_q, at_q = _reduced(top_q, sum_q, at_q)
    top_p, sum_p, at_p = _reduced(top_p, sum_p, at_p)
    return top_q, sum_q, at_q, top_p, sum_p, at_p


@triton.jit
def _start(block: tl.constexpr):
    """The largest of nothing is a number, so that its distance to -inf is one."""
    return tl.full([block], -MOST, tl.float32), tl.zeros([block], tl.float32), tl.zeros([block], tl.int32)


@triton.jit
def _climb(logit, column, top, mass, at):
    """One more logit in every lane; of equals the first stays. What has to shrink does so by the same exp."""
    higher = logit > top
    apart = tl.exp(-tl.abs(logit - top))
    mass = tl.where(higher, mass * apart + 1, mass + apart)
    return tl.where(higher, logit, top), mass, tl.where(higher, column, at)


@triton.jit
def _reduced(top, mass, at):
    peak = tl.max(top, 0)
    return peak, tl.sum(mass * tl.exp(top - peak), 0), tl.min(tl.where(top == peak, at, 0x7FFFFFFF), 0)


@triton.jit
def _chance(logits, column, columns, top, mass):
    """Those of one block, 0 beyond the row; and how far their logits are from the largest."""
    away = tl.load(logits + column, mask=column < columns, other=-float("inf")) - top
    return tl.exp(away) * (1 / mass), away


@triton.jit
def _of_shared(shared, divergence, kind: tl.constexpr):
    """The loss, how much of it is divergence, and how it changes with the sum of min(p, q)."""
    far = 0.0
    if kind == "nla":
        shared = tl.maximum(shared, TINY)
        loss = -tl.log(shared)
        by_shared = -1 / shared
    elif kind == "tv":
        loss = 1 - shared
        by_shared = -1.0
    else:
        far = tl.exp(-3 * shared)
        loss = far * divergence + (1 - far) * (1 - shared)
        by_shared = far - 1
    return loss, far, by_shared


@triton.jit
def _store(gradient, column, columns, value):
    """A row is done with where it is written: the cache had better hold another."""
    value = rounded(value, gradient.dtype.element_ty)
    tl.store(gradient + column, value, mask=column < columns, eviction_policy="evict_first")
