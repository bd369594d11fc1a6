"""Probabilities p (target) and q (draft) for rejection sampling, recomputed where they are needed, never stored.

The softmax of a row is kept as two statistics: the largest score (logit / temperature) and one over the sum of
exponentials. The residual after rejected siblings follows from one number per sibling: see `remaining`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .thresholds import is_kept

# Columns of `stats` [R, STATS] f64.
P_TOP = tl.constexpr(0)  # largest score of the target
P_PER = tl.constexpr(1)  # one over the target's sum
Q_TOP = tl.constexpr(2)  # largest score of the logits that the row's token was sampled from
Q_PER = tl.constexpr(3)  # one over their sum; negative: the token was not sampled
SCALE = tl.constexpr(4)  # renormalises q without the siblings that were sampled before
LEFT = tl.constexpr(5)  # one over the residual mass after the row's token was rejected; 0: none, p stays
WEIGHT = tl.constexpr(6)  # weight of p in the row's residual (block verification)
STATS = tl.constexpr(7)
# Columns of `links` [R, LINKS] int32; rows count from the request's first.
FIRST_CHILD = tl.constexpr(0)  # the first child that is tried, or -1
NEXT_SIBLING = tl.constexpr(1)  # the sibling that is tried next, or -1
KEPT = tl.constexpr(2)  # the accepted child, or -1
BEST = tl.constexpr(3)  # argmax of the row, for temperature 0
LINKS = tl.constexpr(4)


@triton.jit
def read(logits, row, token, inside, vocabulary):
    """Load logits of one row; NaN becomes -inf."""
    logit = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=inside, other=-float("inf"))
    return tl.where(logit == logit, logit, -float("inf"))


@triton.jit
def measure(scores):
    """Return the largest score and the sum of exponentials relative to it."""
    top = tl.max(scores, 0)
    base = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    return top, tl.sum(tl.exp(tl.minimum(scores - base, 0.0)), 0)


@triton.jit
def softmax_stats(tops, masses):
    """Combine the parts of a row: the largest score, and one over the sum; 0 if the sum is 0 or not finite."""
    top = tl.max(tops, 0)
    finite = tl.abs(top) < float("inf")
    base = tl.where(finite, top, 0.0)
    total = tl.where(finite, tl.sum(masses * tl.exp(tl.minimum(tops - base, 0.0)), 0), 0.0)
    return base, tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def target_prob(logits, stats, links, row, token, inside, temp, threshold, last, vocabulary):
    """Return p of these tokens, f64."""
    logit = read(logits, row, token, inside, vocabulary)
    safe_temp = tl.where(temp > 0, temp, 1.0).to(tl.float64)
    stat = stats + row * STATS
    prob = tl.exp(tl.minimum(logit.to(tl.float64) / safe_temp - tl.load(stat + P_TOP), 0.0)) * tl.load(stat + P_PER)
    prob = tl.where(inside & is_kept(logit, token, threshold, last), prob, 0.0)
    best = tl.where(token == tl.load(links + row * LINKS + BEST), 1.0, 0.0).to(tl.float64)
    return tl.where(temp > 0, prob, best)


@triton.jit
def draft_prob(draft_logits, stats, tokens, row, token, inside, gone, temp, vocabulary):
    """Return q of these tokens, f64: the distribution of the row's token without those `gone`, or one-hot."""
    prob = tl.where(token == tl.load(tokens + row), 1.0, 0.0).to(tl.float64)
    if draft_logits is not None:
        stat = stats + row * STATS
        per = tl.load(stat + Q_PER)
        safe_temp = tl.where(temp > 0, temp, 1.0).to(tl.float64)
        score = read(draft_logits, row, token, tl.where(per >= 0, inside, False), vocabulary).to(tl.float64) / safe_temp
        drawn = tl.exp(tl.minimum(score - tl.load(stat + Q_TOP), 0.0)) * (per * tl.load(stat + SCALE))
        prob = tl.where(per < 0, prob, tl.where(gone, 0.0, drawn))
    return prob


@triton.jit
def is_drawn_token(stats, tokens, row, token, with_replacement: tl.constexpr):
    """Return where a token is the row's own, which later siblings cannot be unless sampled with replacement."""
    taken = token < 0
    if not with_replacement:
        taken = tl.where(tl.load(stats + row * STATS + Q_PER) >= 0, token == tl.load(tokens + row), False)
    return taken


@triton.jit
def remaining(
    logits, draft_logits, stats, links, tokens, first, row, stop, token, inside, temp, threshold, last, vocabulary,
    with_replacement: tl.constexpr,
):  # fmt: skip
    """Return the residual of p after the rejected children before `stop`, and the tokens that are gone from q.

    Each rejected child turns p into max(p - q, 0), normalised.
    """
    prob = target_prob(logits, stats, links, row, token, inside, temp, threshold, last, vocabulary)
    gone = token < 0
    child = tl.load(links + row * LINKS + FIRST_CHILD)
    while child != stop:
        at = first + child
        less = draft_prob(draft_logits, stats, tokens, at, token, inside, gone, temp, vocabulary)
        per = tl.load(stats + at * STATS + LEFT)
        prob = tl.where(per > 0, tl.maximum(prob - less, 0.0) * per, prob)
        gone = gone | is_drawn_token(stats, tokens, at, token, with_replacement)
        child = tl.load(links + at * LINKS + NEXT_SIBLING)
    return prob, gone
