"""Rejection sampling in a few launches that never wait for the host. Scores are in log space.

1. `_partial_softmax`: softmax sums of every row over pieces of the vocabulary; `_combine_parts` combines them.
2. `_try_children`: tries the children of every row against the residual of its p. Rows are independent, so that none
   waits for the path to reach it. Block verification: block_verification.py.
3. `sample_last`: samples the last token at the end of the accepted path, and writes the results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import philox
from ..structures import SamplingMetadata, VerifyInputs, VerifyOutput
from .block_verification import accept_blocks
from .noise import gumbel, uniform
from .rejection_probs import (
    BEST,
    FIRST_CHILD,
    KEPT,
    LEFT,
    LINKS,
    NEXT_SIBLING,
    P_PER,
    P_TOP,
    Q_PER,
    Q_TOP,
    SCALE,
    STATS,
    WEIGHT,
    draft_prob,
    is_drawn_token,
    measure,
    read,
    remaining,
    softmax_stats,
)
from .thresholds import find_thresholds, is_kept
from .verification import empty_output, padded_rows

ACCEPT = tl.constexpr(philox.ACCEPT)
TARGET = tl.constexpr(philox.TARGET)
RESIDUAL = tl.constexpr(philox.RESIDUAL)
PIECE = 1024  # tokens per program of the partial sums
PASS = 2048  # tokens per iteration of a program that reads a whole row


def verify_rejection(
    logits: Tensor, drafts: VerifyInputs, sampling: SamplingMetadata, block: bool, with_replacement: bool = False
) -> VerifyOutput:
    kept = empty_output(drafts)
    (rows, vocabulary), (requests, columns), device = logits.shape, kept.tokens.shape, logits.device
    if not requests:
        return kept
    draft_logits = drafts.logits
    assert logits.is_contiguous() and (draft_logits is None or draft_logits.is_contiguous())
    whole = int(triton.next_power_of_2(vocabulary))
    piece = min(whole, PIECE)
    pieces = int(triton.cdiv(vocabulary, piece))
    many, wide = int(triton.next_power_of_2(pieces)), padded_rows(drafts)
    thresholds, last_ids = find_thresholds(logits, sampling)
    parts = torch.empty((rows, pieces, 4), dtype=torch.float64, device=device)
    bests = torch.empty((rows, pieces), dtype=torch.int32, device=device)
    stats = torch.empty((rows, STATS.value), dtype=torch.float64, device=device)
    links = torch.empty((rows, LINKS.value), dtype=torch.int32, device=device)
    # Groups of arguments: kernels list each group on a line.
    trees = (drafts.starts, drafts.tokens, drafts.parents)
    row_data = (logits, draft_logits, stats, links)
    target = (sampling.temperature, thresholds, last_ids)
    noise_keys = (sampling.seeds, sampling.positions, sampling.epochs)
    _partial_softmax[(requests * columns, pieces)](
        logits,
        draft_logits,
        drafts.drawn,
        *trees,
        *target,
        parts,
        bests,
        columns,
        vocabulary,
        pieces,
        piece,
        num_warps=8,
    )
    _combine_parts[(requests * columns,)](
        draft_logits, drafts.drawn, *trees, *target, parts, bests, stats, links,
        columns, vocabulary, pieces, many, wide,
        num_warps=1,
    )  # fmt: skip
    if block:
        accept_blocks(
            row_data, trees, target, noise_keys, parts, requests, columns, vocabulary, (piece, pieces, many, wide)
        )
    else:
        _try_children[(requests * columns,)](
            *row_data,
            *trees,
            *target,
            *noise_keys,
            columns,
            vocabulary,
            min(whole, PASS),
            with_replacement,
            num_warps=16,
        )
    sample_last(row_data, trees, target, noise_keys, kept, with_replacement, (piece, pieces, many, wide))
    return kept


@triton.jit(do_not_specialize=["columns", "vocabulary", "pieces"])
def _partial_softmax(
    logits, draft_logits, drawn,
    starts, tokens, parents,
    temperature, thresholds, last_ids,
    parts, bests, columns, vocabulary, pieces,
    piece: tl.constexpr,
):  # fmt: skip
    request, split = tl.program_id(0) // columns, tl.program_id(1)
    first = tl.load(starts + request)
    row = first + tl.program_id(0) % columns
    if row < tl.load(starts + request + 1):
        token = split * piece + tl.arange(0, piece)
        inside = token < vocabulary
        out = (row * pieces + split).to(tl.int64)
        temp = tl.load(temperature + row)
        logit = read(logits, row, token, inside, vocabulary)
        kept = inside & tl.where(
            temp > 0, is_kept(logit, token, tl.load(thresholds + row), tl.load(last_ids + row)), True
        )
        score = logit.to(tl.float64) / tl.where(temp > 0, temp, 1.0).to(tl.float64)
        score = tl.where(kept, score, -float("inf"))
        top, mass = measure(score)
        tl.store(parts + out * 4, top)
        tl.store(parts + out * 4 + 1, mass)
        tl.store(bests + out, split * piece + tl.argmax(score, 0, tie_break_left=True))
        if draft_logits is not None:
            drawn_here = is_drawn(drawn, parents, temperature, first, row)
            if drawn_here:
                safe_temp = tl.load(temperature + first + tl.load(parents + row)).to(tl.float64)
                top, mass = measure(read(draft_logits, row, token, inside, vocabulary).to(tl.float64) / safe_temp)
                tl.store(parts + out * 4 + 2, top)
                tl.store(parts + out * 4 + 3, mass)


@triton.jit
def is_drawn(drawn, parents, temperature, first, row):
    """Return whether the row's token was sampled. At temperature 0 none is."""
    parent = tl.load(parents + row)
    warm = tl.load(temperature + first + parent, mask=parent >= 0, other=0.0) > 0
    return warm & (tl.load(drawn + row) != 0)


@triton.jit(do_not_specialize=["columns", "vocabulary", "pieces"])
def _combine_parts(
    draft_logits, drawn,
    starts, tokens, parents,
    temperature, thresholds, last_ids,
    parts, bests, stats, links, columns, vocabulary, pieces,
    many: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) // columns
    first = tl.load(starts + request)
    index = tl.program_id(0) % columns
    row, rows = first + index, tl.load(starts + request + 1) - first
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
            drawn_here = is_drawn(drawn, parents, temperature, first, row)
            if drawn_here:
                tops = tl.load(part + 2, mask=at < pieces, other=-float("inf"))
                own, own_per = softmax_stats(tops, tl.load(part + 3, mask=at < pieces, other=0.0))
        tl.store(stat + Q_TOP, own)
        tl.store(stat + Q_PER, own_per)
        tl.store(stat + SCALE, 1.0)
        tl.store(stat + LEFT, 0.0)
        tl.store(stat + WEIGHT, 1.0)
        node = tl.arange(0, wide)
        parent = tl.load(parents + first + node, mask=node < rows, other=-1)
        token = tl.load(tokens + first + node, mask=node < rows, other=-1)
        real = (token >= 0) & (token < vocabulary)
        mine = tl.load(parents + row)
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
def _try_children(
    logits, draft_logits, stats, links,
    starts, tokens, parents,
    temperature, thresholds, last_ids,
    seeds, positions, epochs,
    columns, vocabulary,
    block: tl.constexpr, with_replacement: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) // columns
    first = tl.load(starts + request)
    row = first + tl.program_id(0) % columns
    if row < tl.load(starts + request + 1):
        temp, threshold, last = tl.load(temperature + row), tl.load(thresholds + row), tl.load(last_ids + row)
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        epoch = 0 if epochs is None else tl.load(epochs + row)
        kept = tl.full((), -1, tl.int32)
        child_index = tl.full((), 0, tl.int32)
        child = tl.load(links + row * LINKS + FIRST_CHILD)
        while child >= 0:
            at = first + child
            drafted = tl.load(tokens + at)
            p, gone = remaining(
                logits, draft_logits, stats, links, tokens, first, row, child, drafted, drafted >= 0,
                temp, threshold, last,
                vocabulary, with_replacement,
            )  # fmt: skip
            q = draft_prob(draft_logits, stats, tokens, at, drafted, drafted >= 0, gone, temp, vocabulary)
            passed = (p > 0) & (uniform(seed, position, child_index, ACCEPT, epoch) * q <= p)
            following = tl.load(links + at * LINKS + NEXT_SIBLING)
            kept = tl.where(passed, child, kept)
            if (temp > 0) & (following >= 0) & (passed == 0):
                _reject_child(
                    logits, draft_logits, stats, links, tokens, first, row, child, following, temp, threshold, last,
                    vocabulary, block, with_replacement,
                )  # fmt: skip
            child = tl.where(passed, -1, following)
            child_index += 1
        tl.store(links + row * LINKS + KEPT, kept)


@triton.jit
def _reject_child(
    logits, draft_logits, stats, links, tokens, first, row, child, following, temp, threshold, last, vocabulary,
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
        p, gone = remaining(
            logits, draft_logits, stats, links, tokens, first, row, child, token, inside, temp, threshold, last,
            vocabulary, with_replacement,
        )  # fmt: skip
        q = draft_prob(draft_logits, stats, tokens, at, token, inside, gone, temp, vocabulary)
        left += tl.maximum(p - q, 0.0)
        gone = gone | is_drawn_token(stats, tokens, at, token, with_replacement)
        scale += draft_prob(draft_logits, stats, tokens, next_at, token, inside, gone, temp, vocabulary)
        begin += block
    whole, part = tl.sum(left, 0), tl.sum(scale, 0)
    tl.debug_barrier()  # other threads may still read
    tl.store(stats + at * STATS + LEFT, tl.where(whole > 0, 1.0 / tl.where(whole > 0, whole, 1.0), 0.0))
    if not with_replacement:
        tl.store(stats + next_at * STATS + SCALE, tl.where(part > 0, 1.0 / tl.where(part > 0, part, 1.0), 0.0))
    tl.debug_barrier()  # all threads load these next


def sample_last(
    row_data: tuple[Any, ...],
    trees: tuple[Any, ...],
    target: tuple[Any, ...],
    noise_keys: tuple[Any, ...],
    kept: VerifyOutput,
    with_replacement: bool,
    sizes: tuple[int, int, int, int],
) -> None:
    """Write `kept`: the accepted paths (links KEPT), and the token sampled at their ends."""
    piece, pieces, many, wide = sizes
    logits, _, _, links = row_data
    requests, columns = kept.tokens.shape
    scores = torch.empty((requests, pieces, 2), dtype=torch.float64, device=logits.device)
    found = torch.empty((requests, pieces, 2), dtype=torch.int32, device=logits.device)
    _sample_last[(requests, pieces)](
        *row_data,
        *trees,
        *target,
        *noise_keys,
        scores,
        found,
        logits.shape[1],
        pieces,
        piece,
        with_replacement,
        num_warps=8,
    )
    results = (kept.tokens, kept.rows, kept.counts)
    _write[(requests,)](links, *trees, target[0], scores, found, *results, columns, pieces, many, wide, num_warps=1)


@triton.jit(do_not_specialize=["vocabulary", "pieces"])
def _sample_last(
    logits, draft_logits, stats, links,
    starts, tokens, parents,
    temperature, thresholds, last_ids,
    seeds, positions, epochs,
    scores, found, vocabulary, pieces,
    piece: tl.constexpr, with_replacement: tl.constexpr,
):  # fmt: skip
    request, split = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts + request)
    if first < tl.load(starts + request + 1):
        row = first
        kept = tl.load(links + row * LINKS + KEPT)
        while kept >= 0:
            row = first + kept
            kept = tl.load(links + row * LINKS + KEPT)
        temp, threshold, last = tl.load(temperature + row), tl.load(thresholds + row), tl.load(last_ids + row)
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        token = split * piece + tl.arange(0, piece)
        inside = token < vocabulary
        stop = tl.load(links + row * LINKS + FIRST_CHILD)
        if stop < 0:
            logit = read(logits, row, token, inside, vocabulary)
            score = tl.div_rn(logit, tl.where(temp > 0, temp, 1.0)) + gumbel(seed, position, token, TARGET, 0)
            score = tl.where(inside & is_kept(logit, token, threshold, last), score, -float("inf")).to(tl.float64)
            spare = score
        else:
            following = tl.load(links + (first + stop) * LINKS + NEXT_SIBLING)
            while following >= 0:
                stop = following
                following = tl.load(links + (first + stop) * LINKS + NEXT_SIBLING)
            p, gone = remaining(
                logits, draft_logits, stats, links, tokens, first, row, stop, token, inside, temp, threshold, last,
                vocabulary, with_replacement,
            )  # fmt: skip
            q = draft_prob(draft_logits, stats, tokens, first + stop, token, inside, gone, temp, vocabulary)
            epoch = 0 if epochs is None else tl.load(epochs + row)
            noise = gumbel(seed, position, token, RESIDUAL, epoch).to(tl.float64)
            score = log_or_none(tl.load(stats + row * STATS + WEIGHT) * p - q) + noise
            spare = log_or_none(p) + noise  # used if the residual is empty
        out = (request * pieces + split) * 2
        tl.store(scores + out, tl.max(score, 0))
        tl.store(found + out, split * piece + tl.argmax(score, 0, tie_break_left=True))
        tl.store(scores + out + 1, tl.max(spare, 0))
        tl.store(found + out + 1, split * piece + tl.argmax(spare, 0, tie_break_left=True))


@triton.jit
def log_or_none(mass):
    return tl.where(mass > 0, tl.log(tl.where(mass > 0, mass, 1.0)), -float("inf"))


@triton.jit(do_not_specialize=["columns", "pieces"])
def _write(
    links,
    starts, tokens, parents,
    temperature, scores, found,
    kept_tokens, kept_rows, counts, columns, pieces,
    many: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    first = tl.load(starts + request)
    at = tl.arange(0, wide)
    path = tl.full((wide,), -1, tl.int32)
    taken = tl.full((wide,), -1, tl.int32)
    row = tl.full((), 0, tl.int32)
    depth = tl.full((), 0, tl.int32)
    going = first < tl.load(starts + request + 1)
    while going:
        kept = tl.load(links + (first + row) * LINKS + KEPT)
        going = kept >= 0
        if going:
            token = tl.load(tokens + first + kept)
        else:
            token = _last_token(links, temperature, scores, found, first + row, request * pieces, pieces, many)
        path = tl.where(at == depth, row, path)
        taken = tl.where(at == depth, token, taken)
        row = tl.where(going, kept, row)
        depth += 1
    index = request.to(tl.int64) * columns + at
    tl.store(kept_tokens + index, taken, mask=at < columns)
    tl.store(kept_rows + index, path, mask=at < columns)
    tl.store(counts + request, depth)


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
