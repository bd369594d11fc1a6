"""The probabilities that rejection weighs, computed anew wherever they are needed: none is ever stored.

A row's law is two numbers, the largest score (logit / temperature) and one over the sum of exponentials below it.
What rejected siblings leave of p follows from a number for each of them: see `remaining`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .thresholds import is_kept

# Columns of `laws` [R, LAWS] f64.
P_TOP = tl.constexpr(0)  # of the target's logits
P_PER = tl.constexpr(1)
Q_TOP = tl.constexpr(2)  # of the logits that the row's token was drawn from
Q_PER = tl.constexpr(3)  # less than 0: it was not drawn
SCALE = tl.constexpr(4)  # of q, after the siblings that were drawn before it were left out
LEFT = tl.constexpr(5)  # one over what the row's token, once rejected, leaves of p; 0: nothing, so that p stays
WEIGHT = tl.constexpr(6)  # of p where the row's residual is drawn: block verification
LAWS = tl.constexpr(7)
# Columns of `links` [R, LINKS] int32; rows are counted from the request's first.
ELDEST = tl.constexpr(0)  # the first child that is tried, or -1
FOLLOWING = tl.constexpr(1)  # the sibling that is tried next, or -1
KEPT = tl.constexpr(2)  # the child that is kept, or -1
BEST = tl.constexpr(3)  # the token of the largest logit, where the temperature is 0
LINKS = tl.constexpr(4)


@triton.jit
def read(logits, row, token, inside, vocabulary):
    """Logits of one row; -inf where they are no numbers."""
    logit = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=inside, other=-float("inf"))
    return tl.where(logit == logit, logit, -float("inf"))


@triton.jit
def measure(scores):
    """The largest score, and the sum of exponentials below it; an infinite one weighs nothing."""
    top = tl.max(scores, 0)
    base = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    return top, tl.sum(tl.exp(tl.minimum(scores - base, 0.0)), 0)


@triton.jit
def law_of(tops, masses):
    """The parts of a row as one law: the largest score, and one over the sum; 0 where that is none."""
    top = tl.max(tops, 0)
    finite = tl.abs(top) < float("inf")
    base = tl.where(finite, top, 0.0)
    total = tl.where(finite, tl.sum(masses * tl.exp(tl.minimum(tops - base, 0.0)), 0), 0.0)
    return base, tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def target_share(logits, laws, links, row, token, inside, warmth, border, last, vocabulary):
    """p of these tokens, f64."""
    logit = read(logits, row, token, inside, vocabulary)
    heat = tl.where(warmth > 0, warmth, 1.0).to(tl.float64)
    law = laws + row * LAWS
    share = tl.exp(tl.minimum(logit.to(tl.float64) / heat - tl.load(law + P_TOP), 0.0)) * tl.load(law + P_PER)
    share = tl.where(inside & is_kept(logit, token, border, last), share, 0.0)
    best = tl.where(token == tl.load(links + row * LINKS + BEST), 1.0, 0.0).to(tl.float64)
    return tl.where(warmth > 0, share, best)


@triton.jit
def draft_share(guesses, laws, tokens, row, token, inside, gone, warmth, vocabulary):
    """q of these tokens, f64: what the row's own token was drawn from, without those that are gone, or one-hot."""
    share = tl.where(token == tl.load(tokens + row), 1.0, 0.0).to(tl.float64)
    if guesses is not None:
        law = laws + row * LAWS
        per = tl.load(law + Q_PER)
        heat = tl.where(warmth > 0, warmth, 1.0).to(tl.float64)
        score = read(guesses, row, token, tl.where(per >= 0, inside, False), vocabulary).to(tl.float64) / heat
        drawn = tl.exp(tl.minimum(score - tl.load(law + Q_TOP), 0.0)) * (per * tl.load(law + SCALE))
        share = tl.where(per < 0, share, tl.where(gone, 0.0, drawn))
    return share


@triton.jit
def is_taken(laws, tokens, row, token, with_replacement: tl.constexpr):
    """Where a token equals the row's own, which was drawn and, unless `again`, is not drawn by its later siblings."""
    taken = token < 0
    if not with_replacement:
        taken = tl.where(tl.load(laws + row * LAWS + Q_PER) >= 0, token == tl.load(tokens + row), False)
    return taken


@triton.jit
def remaining(
    logits, guesses, laws, links, tokens, first, row, stop, token, inside, warmth, border, last, vocabulary,
    with_replacement: tl.constexpr,
):  # fmt: skip
    """What the children of a row before the child `stop`, all rejected, leave of p; and which tokens are gone from q.

    Each takes its q away: p becomes max(p - q, 0), normalised by what that leaves.
    """
    share = target_share(logits, laws, links, row, token, inside, warmth, border, last, vocabulary)
    gone = token < 0
    child = tl.load(links + row * LINKS + ELDEST)
    while child != stop:
        at = first + child
        less = draft_share(guesses, laws, tokens, at, token, inside, gone, warmth, vocabulary)
        per = tl.load(laws + at * LAWS + LEFT)
        share = tl.where(per > 0, tl.maximum(share - less, 0.0) * per, share)
        gone = gone | is_taken(laws, tokens, at, token, with_replacement)
        child = tl.load(links + at * LINKS + FOLLOWING)
    return share, gone
