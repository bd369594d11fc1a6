"""Distillation losses between draft and target, and their gradients in the draft's logits.

The losses are those of train/losses.py: p is the target's distribution, q the draft's, both over U tokens. One program
per row reads it twice, or three times if the gradient depends on a sum over both distributions. Passes alternate their
direction, so that each starts with cached data.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import loop_bound, rounded
from .thresholds import MAX_LOGIT

KINDS = frozenset(("kl", "ce", "tv", "nla", "lk_hybrid"))
BLOCK = 4096  # tokens per iteration
WARPS = 16  # one program fills a multiprocessor, so that its row stays in the cache
STAGES = 1  # no software pipelining: other rows hide the latency
TINY: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)
ALL: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)  # else a GPU returns the other operand of NaN


def distill(
    kind: str,
    logits: Tensor,
    wanted: Tensor,
    whole: Tensor | None,
    gradient: Tensor | None,
    target_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses [R] f32, the draft's argmax [R] int64, and the sums of min(p, q) [R] f32.

    logits, wanted [R, U] f32: of the draft and of the target. target_rows [R]: rows of `wanted` [any, U] to use; None:
    the same rows. whole [R] f32: logsumexp of all of the target's logits, which scales p in the sums; None: U is the
    whole vocabulary. gradient [R, U] receives the gradient of the losses, rounded to its dtype. A token with p = 0
    costs nothing; one with q = 0 alone costs a very large finite number.
    """
    assert kind in KINDS and logits.shape[1] == wanted.shape[1] and logits.stride(1) == wanted.stride(1) == 1
    assert len(logits) == len(wanted if target_rows is None else target_rows)
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
            target_rows,
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
    target_rows,
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
    target_row = row
    if target_rows is not None:
        target_row = tl.load(target_rows + row).to(tl.int64)
    wanted += target_row * wanted_stride
    # Largest logits, sums of exp(logit - that), and where the largest are.
    top_q, sum_q, argmax_q, top_p, sum_p, argmax_p = _softmax_sums(logits, wanted, columns, blocks, block, stages)
    tl.store(best + row, argmax_q)
    share = 1.0  # the target's probability of the U tokens
    if whole is not None:
        share = tl.minimum(tl.exp(top_p + tl.log(sum_p) - tl.load(whole + row)), 1.0, propagate_nan=ALL)

    kept = tl.zeros([block], tl.float32)  # sums to that of min(p * share, q)
    shared = tl.zeros([block], tl.float32)  # min(p, q)
    below = tl.zeros([block], tl.float32)  # q where it is less than p
    cost = tl.zeros([block], tl.float32)  # p times how much further the target's logit is from its largest
    for step in tl.range(0, loop_bound(blocks), num_stages=stages):
        column = (blocks - 1 - step) * block + tl.arange(0, block)
        q, away_q = _probs(logits, column, columns, top_q, sum_q)
        p, away_p = _probs(wanted, column, columns, top_p, sum_p)
        kept += tl.minimum(p * share, q, propagate_nan=ALL)
        if kind == "kl" or kind == "lk_hybrid":
            cost += p * (tl.maximum(away_p, -MAX_LOGIT) - tl.maximum(away_q, -MAX_LOGIT))  # never of infinities
        if kind == "kl" or kind == "ce":
            if gradient is not None:
                right = p if kind == "kl" else tl.where(column == argmax_p, 1.0, 0.0)
                _store(gradient + row * gradient_stride, column, columns, q - right)
        else:
            shared += tl.minimum(p, q, propagate_nan=ALL)
            below += tl.where(q < p, q, 0.0)
    tl.store(overlap + row, tl.sum(kept, 0))

    divergence = tl.sum(cost, 0) - tl.log(sum_p) + tl.log(sum_q)
    if kind == "kl":
        tl.store(losses + row, divergence)
    elif kind == "ce":
        tl.store(losses + row, top_q - tl.load(logits + argmax_p) + tl.log(sum_q))
    else:
        loss, far, by_shared = _of_shared(tl.sum(shared, 0), divergence, kind)
        tl.store(losses + row, loss)
        if gradient is not None:
            smaller = tl.sum(below, 0)
            for step in tl.range(0, loop_bound(blocks), num_stages=stages):
                column = step * block + tl.arange(0, block)
                q, _ = _probs(logits, column, columns, top_q, sum_q)
                p, _ = _probs(wanted, column, columns, top_p, sum_p)
                # The sum of min(p, q) changes with q where q is the smaller.
                change = by_shared * (tl.where(q < p, q, 0.0) - q * smaller)
                if kind == "lk_hybrid":
                    change += far * (q - p)
                _store(gradient + row * gradient_stride, column, columns, change)


@triton.jit
def _softmax_sums(logits, wanted, columns, blocks, block: tl.constexpr, stages: tl.constexpr):
    """Run the first pass over a row: maximum, sum of exponentials and argmax, per lane and then over lanes."""
    top_q, sum_q, argmax_q = _start(block)
    top_p, sum_p, argmax_p = _start(block)
    for step in tl.range(0, loop_bound(blocks), num_stages=stages):
        column = step * block + tl.arange(0, block)
        logit = tl.load(logits + column, mask=column < columns, other=-float("inf"))
        goal = tl.load(wanted + column, mask=column < columns, other=-float("inf"))
        top_q, sum_q, argmax_q = _online_softmax(logit, column, top_q, sum_q, argmax_q)
        top_p, sum_p, argmax_p = _online_softmax(goal, column, top_p, sum_p, argmax_p)
    top_q, sum_q, argmax_q = _reduced(top_q, sum_q, argmax_q)
    top_p, sum_p, argmax_p = _reduced(top_p, sum_p, argmax_p)
    return top_q, sum_q, argmax_q, top_p, sum_p, argmax_p


@triton.jit
def _start(block: tl.constexpr):
    """Return the initial state; the maximum is finite, so that its distance to -inf is defined."""
    return tl.full([block], -MAX_LOGIT, tl.float32), tl.zeros([block], tl.float32), tl.zeros([block], tl.int32)


@triton.jit
def _online_softmax(logit, column, top, mass, at):
    """Add one logit per lane to the online softmax; ties keep the first."""
    higher = logit > top
    apart = tl.exp(-tl.abs(logit - top))
    mass = tl.where(higher, mass * apart + 1, mass + apart)
    return tl.where(higher, logit, top), mass, tl.where(higher, column, at)


@triton.jit
def _reduced(top, mass, at):
    peak = tl.max(top, 0)
    return peak, tl.sum(mass * tl.exp(top - peak), 0), tl.min(tl.where(top == peak, at, 0x7FFFFFFF), 0)


@triton.jit
def _probs(logits, column, columns, top, mass):
    """Return the probabilities of one block, 0 beyond the row, and the distance of its logits to the largest."""
    away = tl.load(logits + column, mask=column < columns, other=-float("inf")) - top
    return tl.exp(away) * (1 / mass), away


@triton.jit
def _of_shared(shared, divergence, kind: tl.constexpr):
    """Return the loss, the weight of the divergence in it, and its derivative by the sum of min(p, q)."""
    far = 0.0
    if kind == "nla":
        shared = tl.maximum(shared, TINY, propagate_nan=ALL)
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
    """Store a block of the gradient; it is not read again, so it is evicted first."""
    value = rounded(value, gradient.dtype.element_ty)
    tl.store(gradient + column, value, mask=column < columns, eviction_policy="evict_first")
