"""Rejection sampling in a few launches that never wait for the host. Scores are in log space.

1. `_partial_softmax`: softmax sums of every row over pieces of the vocabulary; `_combine_parts` combines them.
2. `_try_children`: tries the children of every row against the residual of its p. Rows are independent, so that none
   waits for the path to reach it. Block verification instead considers each chain as a whole: `accept_blocks`.
3. `_sample_last`: samples the last token at the end of the accepted path; `_write` writes the results.

Probabilities p (target) and q (draft) are recomputed where they are needed, never stored. The softmax of a row is kept
as two statistics: the largest score (logit / temperature) and one over the sum of exponentials. The residual after
rejected siblings follows from one number per sibling: see `remaining`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import philox
from ..structures import SamplingMetadata, VerifyInputs, VerifyOutput
from .noise import gumbel, uniform
from .thresholds import find_thresholds, is_kept
from .verification import empty_output, padded_rows

ACCEPT = tl.constexpr(philox.ACCEPT)
TARGET = tl.constexpr(philox.TARGET)
RESIDUAL = tl.constexpr(philox.RESIDUAL)
PIECE = 1024  # tokens per program of the partial sums
PASS = 2048  # tokens per iteration of a program that reads a whole row
# Columns of `stats` [R, STATS] f64.
P_TOP = tl.constexpr(0)  # largest score of the target
P_PER = tl.constexpr(1)  # one over the target's sum
Q_TOP = tl.constexpr(2)  # largest score of the logits that the row's token was sampled from
Q_PER = tl.constexpr(3)  # one over their sum; 0: they are not finite, so the token is ignored; negative: not sampled
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


class RowData(NamedTuple):
    """Argument of kernels: logits and results of each row."""

    logits: Tensor  # [R, V] f32
    draft_logits: Tensor | None  # [R, V] f32
    stats: Tensor  # [R, STATS] f64
    links: Tensor  # [R, LINKS] int32


class Trees(NamedTuple):
    """Argument of kernels: see VerifyInputs."""

    starts: Tensor
    tokens: Tensor
    parents: Tensor


class Truncation(NamedTuple):
    """Argument of kernels: temperature and truncation of the target, for all rows or one row. See `is_kept`."""

    temperature: Tensor
    thresholds: Tensor
    last_ids: Tensor


class NoiseKeys(NamedTuple):
    """Argument of kernels: see SamplingMetadata."""

    seeds: Tensor
    positions: Tensor
    epochs: Tensor | None


@dataclass(frozen=True)
class Pieces:
    """How rows of the vocabulary are split over programs."""

    size: int  # tokens in a piece
    count: int
    padded: int  # the power of two that covers the count
    padded_rows: int  # the power of two that covers the rows of a request


@triton.jit
def read(logits, row, token, inside, vocabulary):
    """Load logits of one row; NaN becomes -inf."""
    logit = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=inside, other=-float("inf"))
    return tl.where(logit == logit, logit, -float("inf"))


@triton.jit
def read_draft(logits, row, token, inside, vocabulary):
    """Load logits of one row; NaN becomes +inf, which makes the largest score infinite."""
    logit = tl.load(logits + row.to(tl.int64) * vocabulary + token, mask=inside, other=-float("inf"))
    return tl.where(logit < float("inf"), logit, float("inf"))


@triton.jit
def tried(data, first, child):
    """Return this child or the first sibling after it whose distribution is finite; -1: there is none."""
    ignored = tl.load(data.stats + (first + child) * STATS + Q_PER, mask=child >= 0, other=1.0) == 0
    while ignored:
        child = tl.load(data.links + (first + child) * LINKS + NEXT_SIBLING)
        ignored = tl.load(data.stats + (first + child) * STATS + Q_PER, mask=child >= 0, other=1.0) == 0
    return child


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
def target_prob(data, row, token, inside, target, vocabulary):
    """Return p of these tokens, f64. `target`: the truncation of this row."""
    temp = target.temperature
    logit = read(data.logits, row, token, inside, vocabulary)
    safe_temp = tl.where(temp > 0, temp, 1.0).to(tl.float64)
    stat = data.stats + row * STATS
    prob = tl.exp(tl.minimum(logit.to(tl.float64) / safe_temp - tl.load(stat + P_TOP), 0.0)) * tl.load(stat + P_PER)
    prob = tl.where(inside & is_kept(logit, token, target.thresholds, target.last_ids), prob, 0.0)
    best = tl.where(token == tl.load(data.links + row * LINKS + BEST), 1.0, 0.0).to(tl.float64)
    return tl.where(temp > 0, prob, best)


@triton.jit
def draft_prob(data, tokens, row, token, inside, gone, temp, vocabulary):
    """Return q of these tokens, f64: the distribution of the row's token without those `gone`, or one-hot."""
    prob = tl.where(token == tl.load(tokens + row), 1.0, 0.0).to(tl.float64)
    if data.draft_logits is not None:
        stat = data.stats + row * STATS
        per = tl.load(stat + Q_PER)
        safe_temp = tl.where(temp > 0, temp, 1.0).to(tl.float64)
        logit = read(data.draft_logits, row, token, tl.where(per >= 0, inside, False), vocabulary)
        score = logit.to(tl.float64) / safe_temp
        drawn = tl.exp(tl.minimum(score - tl.load(stat + Q_TOP), 0.0)) * (per * tl.load(stat + SCALE))
        prob = tl.where(per < 0, prob, tl.where(gone, 0.0, drawn))
    return prob


@triton.jit
def row_truncation(target, row, temp):
    """Load the truncation of one row with this temperature."""
    return Truncation(temp, tl.load(target.thresholds + row), tl.load(target.last_ids + row))


@triton.jit
def is_drawn_token(data, tokens, row, token, with_replacement: tl.constexpr):
    """Return where a token is the row's own, which later siblings cannot be unless sampled with replacement."""
    taken = token < 0
    if not with_replacement:
        taken = tl.where(tl.load(data.stats + row * STATS + Q_PER) > 0, token == tl.load(tokens + row), False)
    return taken


@triton.jit
def remaining(data, tokens, first, row, stop, token, inside, target, vocabulary, with_replacement: tl.constexpr):
    """Return the residual of p after the rejected children before `stop`, and the tokens that are gone from q.

    Each rejected child turns p into max(p - q, 0), normalised.
    """
    prob = target_prob(data, row, token, inside, target, vocabulary)
    gone = token < 0
    child = tl.load(data.links + row * LINKS + FIRST_CHILD)
    while child != stop:
        at = first + child
        less = draft_prob(data, tokens, at, token, inside, gone, target.temperature, vocabulary)
        per = tl.load(data.stats + at * STATS + LEFT)
        prob = tl.where(per > 0, tl.maximum(prob - less, 0.0) * per, prob)
        gone = gone | is_drawn_token(data, tokens, at, token, with_replacement)
        child = tl.load(data.links + at * LINKS + NEXT_SIBLING)
    return prob, gone


def verify_rejection(
    logits: Tensor, drafts: VerifyInputs, sampling: SamplingMetadata, block: bool, with_replacement: bool = False
) -> VerifyOutput:
    kept = empty_output(drafts)
    kept = replace(kept, nonfinite=torch.empty_like(kept.counts))
    (rows, vocabulary), (requests, columns), device = logits.shape, kept.tokens.shape, logits.device
    if not requests:
        return kept
    draft_logits = drafts.logits
    assert logits.is_contiguous() and (draft_logits is None or draft_logits.is_contiguous())
    whole = int(triton.next_power_of_2(vocabulary))
    piece = min(whole, PIECE)
    pieces = int(triton.cdiv(vocabulary, piece))
    split = Pieces(piece, pieces, int(triton.next_power_of_2(pieces)), padded_rows(drafts))
    thresholds, last_ids = find_thresholds(logits, sampling)
    parts = torch.empty((rows, pieces, 4), dtype=torch.float64, device=device)
    bests = torch.empty((rows, pieces), dtype=torch.int32, device=device)
    stats = torch.empty((rows, STATS.value), dtype=torch.float64, device=device)
    links = torch.empty((rows, LINKS.value), dtype=torch.int32, device=device)
    trees = Trees(drafts.starts, drafts.tokens, drafts.parents)
    data = RowData(logits, draft_logits, stats, links)
    target = Truncation(sampling.temperature, thresholds, last_ids)
    keys = NoiseKeys(sampling.seeds, sampling.positions, sampling.epochs)
    _partial_softmax[(requests * columns, pieces)](
        logits, draft_logits, drafts.drawn, trees, target, parts, bests, columns, vocabulary, pieces, piece, num_warps=8
    )
    _combine_parts[(requests * columns,)](
        draft_logits, drafts.drawn, trees, target, parts, bests, stats, links,
        columns, vocabulary, pieces, split.padded, split.padded_rows,
        num_warps=1,
    )  # fmt: skip
    if block:
        accept_blocks(data, trees, target, keys, parts, requests, columns, vocabulary, split)
    else:
        _try_children[(requests * columns,)](
            data, trees, target, keys, columns, vocabulary, min(whole, PASS), with_replacement, num_warps=16
        )
    sample_last(data, trees, target, keys, kept, with_replacement, split)
    return kept


# Integers that must not be specialized are no members of tuples: Triton specializes those always.
@triton.jit(do_not_specialize=["columns", "vocabulary", "pieces"])
def _partial_softmax(
    logits, draft_logits, drawn, trees, target, parts, bests, columns, vocabulary, pieces, piece: tl.constexpr
):
    request, split = tl.program_id(0) // columns, tl.program_id(1)
    first = tl.load(trees.starts + request)
    row = first + tl.program_id(0) % columns
    if row < tl.load(trees.starts + request + 1):
        token = split * piece + tl.arange(0, piece)
        inside = token < vocabulary
        out = (row * pieces + split).to(tl.int64)
        temp = tl.load(target.temperature + row)
        logit = read(logits, row, token, inside, vocabulary)
        kept = inside & tl.where(
            temp > 0, is_kept(logit, token, tl.load(target.thresholds + row), tl.load(target.last_ids + row)), True
        )
        score = logit.to(tl.float64) / tl.where(temp > 0, temp, 1.0).to(tl.float64)
        score = tl.where(kept, score, -float("inf"))
        top, mass = measure(score)
        tl.store(parts + out * 4, top)
        tl.store(parts + out * 4 + 1, mass)
        tl.store(bests + out, split * piece + tl.argmax(score, 0, tie_break_left=True))
        if draft_logits is not None:
            drawn_here = is_drawn(drawn, trees, target, first, row)
            if drawn_here:
                safe_temp = tl.load(target.temperature + first + tl.load(trees.parents + row)).to(tl.float64)
                top, mass = measure(read_draft(draft_logits, row, token, inside, vocabulary).to(tl.float64) / safe_temp)
                tl.store(parts + out * 4 + 2, top)
                tl.store(parts + out * 4 + 3, mass)


@triton.jit
def is_drawn(drawn, trees, target, first, row):
    """Return whether the row's token was sampled. At temperature 0 none is."""
    parent = tl.load(trees.parents + row)
    warm = tl.load(target.temperature + first + parent, mask=parent >= 0, other=0.0) > 0
    return warm & (tl.load(drawn + row) != 0)


@triton.jit(do_not_specialize=["columns", "vocabulary", "pieces"])
def _combine_parts(
    draft_logits, drawn, trees, target, parts, bests, stats, links, columns, vocabulary, pieces,
    many: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) // columns
    first = tl.load(trees.starts + request)
    index = tl.program_id(0) % columns
    row, rows = first + index, tl.load(trees.starts + request + 1) - first
    if index < rows:
        stat, link = stats + row * STATS, links + row * LINKS
        at = tl.arange(0, many)
        part = parts + (row * pieces + at).to(tl.int64) * 4
        tops = tl.load(part, mask=at < pieces, other=-float("inf"))
        top, per = softmax_stats(tops, tl.load(part + 1, mask=at < pieces, other=0.0))
        tl.store(stat + P_TOP, top)
        tl.store(stat + P_PER, per)
        best = tl.argmax(tops, 0, tie_break_left=True)
        tl.store(link + BEST, tl.load(bests + row.to(tl.int64) * pieces + best))
        own = tl.full((), 0.0, tl.float64)
        own_per = tl.full((), -1.0, tl.float64)
        if draft_logits is not None:
            drawn_here = is_drawn(drawn, trees, target, first, row)
            if drawn_here:
                tops = tl.load(part + 2, mask=at < pieces, other=-float("inf"))
                own, own_per = softmax_stats(tops, tl.load(part + 3, mask=at < pieces, other=0.0))
        tl.store(stat + Q_TOP, own)
        tl.store(stat + Q_PER, own_per)
        tl.store(stat + SCALE, 1.0)
        tl.store(stat + LEFT, 0.0)
        tl.store(stat + WEIGHT, 1.0)
        node = tl.arange(0, wide)
        parent = tl.load(trees.parents + first + node, mask=node < rows, other=-1)
        token = tl.load(trees.tokens + first + node, mask=node < rows, other=-1)
        real = (token >= 0) & (token < vocabulary)
        mine = tl.load(trees.parents + row)
        first_child = first_of((parent == index) & (node > index), real, node, wide)
        following = first_of((parent == mine) & (node > index) & (mine >= 0), real, node, wide)
        tl.store(link + FIRST_CHILD, first_child)
        tl.store(link + NEXT_SIBLING, following)


@triton.jit
def first_of(wanted, real, node, wide: tl.constexpr):
    """Return the first wanted node; -1 if there is none or it is a placeholder."""
    found = tl.min(tl.where(wanted, node, wide), 0)
    sound = tl.sum(((node == found) & real).to(tl.int32), 0) > 0
    return tl.where(sound, found, -1)


@triton.jit(do_not_specialize=["columns", "vocabulary"])
def _try_children(data, trees, target, keys, columns, vocabulary, block: tl.constexpr, with_replacement: tl.constexpr):
    request = tl.program_id(0) // columns
    first = tl.load(trees.starts + request)
    row = first + tl.program_id(0) % columns
    if row < tl.load(trees.starts + request + 1):
        temp = tl.load(target.temperature + row)
        truncation = row_truncation(target, row, temp)
        seed, position = tl.load(keys.seeds + row), tl.load(keys.positions + row)
        epoch = 0 if keys.epochs is None else tl.load(keys.epochs + row)
        kept = tl.full((), -1, tl.int32)
        child_index = tl.full((), 0, tl.int32)
        child = tried(data, first, tl.load(data.links + row * LINKS + FIRST_CHILD))
        while child >= 0:
            at = first + child
            drafted = tl.load(trees.tokens + at)
            p, gone = remaining(
                data, trees.tokens, first, row, child, drafted, drafted >= 0, truncation, vocabulary, with_replacement
            )
            q = draft_prob(data, trees.tokens, at, drafted, drafted >= 0, gone, temp, vocabulary)
            passed = (p > 0) & (uniform(seed, position, child_index, ACCEPT, epoch) * q <= p)
            following = tried(data, first, tl.load(data.links + at * LINKS + NEXT_SIBLING))
            kept = tl.where(passed, child, kept)
            if (temp > 0) & (following >= 0) & (passed == 0):
                _reject_child(
                    data, trees.tokens, first, row, child, following, truncation, vocabulary, block, with_replacement
                )
            child = tl.where(passed, -1, following)
            child_index += 1
        tl.store(data.links + row * LINKS + KEPT, kept)


@triton.jit
def _reject_child(
    data, tokens, first, row, child, following, target, vocabulary,
    block: tl.constexpr, with_replacement: tl.constexpr,
):  # fmt: skip
    """Store what a rejected child leaves of p, and the normalisation of q for its next sibling."""
    at, next_at = first + child, first + following
    left = tl.zeros((block,), tl.float64)
    scale = tl.zeros((block,), tl.float64)
    begin = tl.full((), 0, tl.int32)
    while begin < vocabulary:
        token = begin + tl.arange(0, block)
        inside = token < vocabulary
        p, gone = remaining(data, tokens, first, row, child, token, inside, target, vocabulary, with_replacement)
        q = draft_prob(data, tokens, at, token, inside, gone, target.temperature, vocabulary)
        left += tl.maximum(p - q, 0.0)
        gone = gone | is_drawn_token(data, tokens, at, token, with_replacement)
        scale += draft_prob(data, tokens, next_at, token, inside, gone, target.temperature, vocabulary)
        begin += block
    whole, part = tl.sum(left, 0), tl.sum(scale, 0)
    tl.debug_barrier()  # other threads may still read
    tl.store(data.stats + at * STATS + LEFT, tl.where(whole > 0, 1.0 / tl.where(whole > 0, whole, 1.0), 0.0))
    if not with_replacement:
        tl.store(data.stats + next_at * STATS + SCALE, tl.where(part > 0, 1.0 / tl.where(part > 0, part, 1.0), 0.0))
    tl.debug_barrier()  # all threads load these next


def sample_last(
    data: RowData,
    trees: Trees,
    target: Truncation,
    keys: NoiseKeys,
    kept: VerifyOutput,
    with_replacement: bool,
    split: Pieces,
) -> None:
    """Write `kept`: the accepted paths (links KEPT), and the token sampled at their ends."""
    logits, pieces = data.logits, split.count
    requests, columns = kept.tokens.shape
    scores = torch.empty((requests, pieces, 2), dtype=torch.float64, device=logits.device)
    found = torch.empty((requests, pieces, 2), dtype=torch.int32, device=logits.device)
    _sample_last[(requests, pieces)](
        data, trees, target, keys, scores, found, logits.shape[1], pieces, split.size, with_replacement, num_warps=8
    )
    _write[(requests,)](
        data, trees, target.temperature, scores, found, kept.tokens, kept.rows, kept.counts, kept.nonfinite,
        columns, logits.shape[1], pieces, split.padded, split.padded_rows,
        num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["vocabulary", "pieces"])
def _sample_last(
    data, trees, target, keys, scores, found, vocabulary, pieces,
    piece: tl.constexpr, with_replacement: tl.constexpr,
):  # fmt: skip
    request, split = tl.program_id(0), tl.program_id(1)
    first = tl.load(trees.starts + request)
    if first < tl.load(trees.starts + request + 1):
        row = first
        kept = tl.load(data.links + row * LINKS + KEPT)
        while kept >= 0:
            row = first + kept
            kept = tl.load(data.links + row * LINKS + KEPT)
        temp = tl.load(target.temperature + row)
        truncation = row_truncation(target, row, temp)
        seed, position = tl.load(keys.seeds + row), tl.load(keys.positions + row)
        token = split * piece + tl.arange(0, piece)
        inside = token < vocabulary
        stop = tried(data, first, tl.load(data.links + row * LINKS + FIRST_CHILD))
        if stop < 0:
            logit = read(data.logits, row, token, inside, vocabulary)
            score = tl.div_rn(logit, tl.where(temp > 0, temp, 1.0)) + gumbel(seed, position, token, TARGET, 0)
            score = tl.where(
                inside & is_kept(logit, token, truncation.thresholds, truncation.last_ids), score, -float("inf")
            ).to(tl.float64)
            spare = score
        else:
            following = tried(data, first, tl.load(data.links + (first + stop) * LINKS + NEXT_SIBLING))
            while following >= 0:
                stop = following
                following = tried(data, first, tl.load(data.links + (first + stop) * LINKS + NEXT_SIBLING))
            p, gone = remaining(
                data, trees.tokens, first, row, stop, token, inside, truncation, vocabulary, with_replacement
            )
            q = draft_prob(data, trees.tokens, first + stop, token, inside, gone, temp, vocabulary)
            epoch = 0 if keys.epochs is None else tl.load(keys.epochs + row)
            noise = gumbel(seed, position, token, RESIDUAL, epoch).to(tl.float64)
            score = log_or_none(tl.load(data.stats + row * STATS + WEIGHT) * p - q) + noise
            spare = log_or_none(p) + noise  # used if the residual is empty
        out = (request * pieces + split) * 2
        tl.store(scores + out, tl.max(score, 0))
        tl.store(found + out, split * piece + tl.argmax(score, 0, tie_break_left=True))
        tl.store(scores + out + 1, tl.max(spare, 0))
        tl.store(found + out + 1, split * piece + tl.argmax(spare, 0, tie_break_left=True))


@triton.jit
def log_or_none(mass):
    return tl.where(mass > 0, tl.log(tl.where(mass > 0, mass, 1.0)), -float("inf"))


@triton.jit(do_not_specialize=["columns", "vocabulary", "pieces"])
def _write(
    data, trees, temperature, scores, found, kept_tokens, kept_rows, counts, nonfinite, columns, vocabulary, pieces,
    many: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    first = tl.load(trees.starts + request)
    at = tl.arange(0, wide)
    path = tl.full((wide,), -1, tl.int32)
    taken = tl.full((wide,), -1, tl.int32)
    row = tl.full((), 0, tl.int32)
    depth = tl.full((), 0, tl.int32)
    end = tl.load(trees.starts + request + 1)
    going = first < end
    while going:
        kept = tl.load(data.links + (first + row) * LINKS + KEPT)
        going = kept >= 0
        if going:
            token = tl.load(trees.tokens + first + kept)
        else:
            token = _last_token(data.links, temperature, scores, found, first + row, request * pieces, pieces, many)
        path = tl.where(at == depth, row, path)
        taken = tl.where(at == depth, token, taken)
        row = tl.where(going, kept, row)
        depth += 1
    index = request.to(tl.int64) * columns + at
    tl.store(kept_tokens + index, taken, mask=at < columns)
    tl.store(kept_rows + index, path, mask=at < columns)
    tl.store(counts + request, depth)
    drafted = tl.load(trees.tokens + first + at, mask=first + at < end, other=-1)
    real = (drafted >= 0) & (drafted < vocabulary)
    per = tl.load(data.stats + (first + at) * STATS + Q_PER, mask=real, other=1.0)
    tl.store(nonfinite + request, tl.sum((per == 0).to(tl.int32), 0))


@triton.jit
def _last_token(links, temperature, scores, found, row, begin, pieces, many: tl.constexpr):
    token = tl.load(links + row * LINKS + BEST)
    if tl.load(temperature + row) > 0:
        at = tl.arange(0, many)
        score = tl.load(scores + (begin + at) * 2, mask=at < pieces, other=-float("inf"))
        spare = tl.load(scores + (begin + at) * 2 + 1, mask=at < pieces, other=-float("inf"))
        covered = (tl.max(score, 0) == -float("inf")).to(tl.int32)
        best = tl.argmax(tl.where(covered > 0, spare, score), 0, tie_break_left=True)
        token = tl.load(found + (begin + best) * 2 + covered)
    return token


def accept_blocks(
    data: RowData,
    trees: Trees,
    target: Truncation,
    keys: NoiseKeys,
    parts: Tensor,
    requests: int,
    columns: int,
    vocabulary: int,
    split: Pieces,
) -> None:
    """Write the links KEPT and the weights of residuals. `parts` [R, pieces, 4] is reused as scratch memory."""
    _cover[(requests * columns, split.count)](
        data, trees, target, parts, columns, vocabulary, split.count, split.size, num_warps=8
    )
    _accept[(requests,)](
        data, trees, target, keys, parts, vocabulary, split.count, split.padded, split.padded_rows, num_warps=1
    )


@triton.jit
def _token_probs(data, tokens, row, target, vocabulary):
    """Return p and q of the token after this row of a chain."""
    temp, drafted = tl.load(target.temperature + row), tl.load(tokens + row + 1)
    present = drafted >= 0
    p = target_prob(data, row, drafted, present, row_truncation(target, row, temp), vocabulary)
    return p, draft_prob(data, tokens, row + 1, drafted, present, drafted < 0, temp, vocabulary)


@triton.jit
def _weight_after(weight, p, q):
    """Return the weight after one more token: the part of the target's probability that the draft covers."""
    ratio = tl.minimum(weight * p / tl.where(q > 0, q, 1.0), 1.0)
    return tl.where(weight * p > 0, tl.where(q > 0, ratio, 1.0), 0.0)


@triton.jit(do_not_specialize=["columns", "vocabulary", "pieces"])
def _cover(data, trees, target, parts, columns, vocabulary, pieces, piece: tl.constexpr):
    """Sum max(weight * p - q, 0) over a piece of the vocabulary, at each row with a drafted token."""
    request, split = tl.program_id(0) // columns, tl.program_id(1)
    first = tl.load(trees.starts + request)
    row, end = first + tl.program_id(0) % columns, tl.load(trees.starts + request + 1)
    first_child = tl.load(data.links + row * LINKS + FIRST_CHILD, mask=row < end, other=-1)
    if (row > first) & (first_child >= 0):
        weight = tl.full((), 1.0, tl.float64)
        at = first
        while at < row:
            p, q = _token_probs(data, trees.tokens, at, target, vocabulary)
            weight = _weight_after(weight, p, q)
            at += 1
        temp, token = tl.load(target.temperature + row), split * piece + tl.arange(0, piece)
        inside = token < vocabulary
        p = target_prob(data, row, token, inside, row_truncation(target, row, temp), vocabulary)
        q = draft_prob(data, trees.tokens, row + 1, token, inside, token < 0, temp, vocabulary)
        left = tl.sum(tl.where(inside, tl.maximum(weight * p - q, 0.0), 0.0), 0)
        tl.store(parts + (row * pieces + split).to(tl.int64) * 4, left)


@triton.jit(do_not_specialize=["vocabulary", "pieces"])
def _accept(data, trees, target, keys, parts, vocabulary, pieces, many: tl.constexpr, wide: tl.constexpr):
    """Accept the chain up to the last token whose coin passes; a chain without samples up to the first failure."""
    request = tl.program_id(0)
    first, end = tl.load(trees.starts + request), tl.load(trees.starts + request + 1)
    node, piece = tl.arange(0, wide), tl.arange(0, many)
    weights = tl.full((wide,), 1.0, tl.float64)
    weight = tl.full((), 1.0, tl.float64)
    drawn = tl.full((), 0, tl.int32)  # whether any token was sampled
    plain = tl.full((), 0, tl.int32)  # tokens before the first failure
    longest = tl.full((), 0, tl.int32)
    depth = tl.full((), 0, tl.int32)
    child = tried(data, first, tl.load(data.links + first * LINKS + FIRST_CHILD, mask=first < end, other=-1))
    while child >= 0:
        row = first + depth
        p, q = _token_probs(data, trees.tokens, row, target, vocabulary)
        weight = _weight_after(weight, p, q)
        child = tried(data, first, tl.load(data.links + (row + 1) * LINKS + FIRST_CHILD))
        part = parts + ((row + 1) * pieces + piece).to(tl.int64) * 4
        left = tl.sum(tl.load(part, mask=(piece < pieces) & (child >= 0), other=0.0), 0)
        whole = left + 1 - weight
        bound = tl.where(whole > 0, left / tl.where(whole > 0, whole, 1.0), 1.0)
        bound = tl.where(child < 0, weight, bound)
        epoch = 0 if keys.epochs is None else tl.load(keys.epochs + row)
        coin = uniform(tl.load(keys.seeds + row), tl.load(keys.positions + row), depth * 0, ACCEPT, epoch)
        drawn = tl.where(tl.load(data.stats + (row + 1) * STATS + Q_PER) >= 0, 1, drawn)
        plain += ((plain == depth) & (p > 0) & (coin * q <= p)).to(tl.int32)
        depth += 1
        longest = tl.where(coin <= bound, depth, longest)
        weights = tl.where(node == depth, weight, weights)
    accepted = tl.where(drawn > 0, longest, plain)
    weights = tl.where(drawn > 0, weights, 1.0)
    inside = node < end - first
    tl.store(data.links + (first + node) * LINKS + KEPT, tl.where(node < accepted, node + 1, -1), mask=inside)
    tl.store(data.stats + (first + node) * STATS + WEIGHT, weights, mask=inside)
