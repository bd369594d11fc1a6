"""Rejection sampling on the device, in log space, in a few launches that never wait for the host.

1. `_weigh`: partial sums of every row, over pieces of the vocabulary; `_sum_up` makes one law of them.
2. `_try_children`: a row's children against what is left of its p. No row waits for the path to reach it, since
   nothing here depends on the rows before it. Or, by blocks, reject_block.py.
3. The last token, drawn at the end of the path that was kept: reject_draw.py.
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
    ELDEST,
    FOLLOWING,
    KEPT,
    LAWS,
    LEFT,
    LINKS,
    P_PER,
    P_TOP,
    Q_PER,
    Q_TOP,
    SCALE,
    WEIGHT,
    draft_share,
    is_taken,
    law_of,
    measure,
    read,
    remaining,
)
from .thresholds import is_kept, limits
from .verification import empty_kept, padded_rows

ACCEPT = tl.constexpr(philox.ACCEPT)
TARGET = tl.constexpr(philox.TARGET)
RESIDUAL = tl.constexpr(philox.RESIDUAL)
PIECE = 1024  # tokens that one program weighs
PASS = 2048  # tokens that a program weighs at once when it weighs them all


def verify_rejection(
    logits: Tensor, drafts: VerifyInputs, sampling: SamplingMetadata, block: bool, with_replacement: bool = False
) -> VerifyOutput:
    kept = empty_kept(drafts)
    (rows, vocabulary), (requests, columns), device = logits.shape, kept.tokens.shape, logits.device
    if not requests:
        return kept
    guesses = drafts.logits
    assert logits.is_contiguous() and (guesses is None or guesses.is_contiguous())
    whole = int(triton.next_power_of_2(vocabulary))
    piece = min(whole, PIECE)
    pieces = int(triton.cdiv(vocabulary, piece))
    many, wide = int(triton.next_power_of_2(pieces)), padded_rows(drafts)
    borders, lasts = limits(logits, sampling)
    parts = torch.empty((rows, pieces, 4), dtype=torch.float64, device=device)
    bests = torch.empty((rows, pieces), dtype=torch.int32, device=device)
    laws = torch.empty((rows, LAWS.value), dtype=torch.float64, device=device)
    links = torch.empty((rows, LINKS.value), dtype=torch.int32, device=device)
    # Arguments that go together: a line each where kernels take them.
    trees = (drafts.starts, drafts.tokens, drafts.parents)
    seen = (logits, guesses, laws, links)
    target = (sampling.temperature, borders, lasts)
    dice = (sampling.seeds, sampling.positions, sampling.epochs)
    _weigh[(requests * columns, pieces)](
        logits, guesses, drafts.drawn, *trees, *target, parts, bests, columns, vocabulary, pieces, piece, num_warps=8
    )
    _sum_up[(requests * columns,)](
        guesses, drafts.drawn, *trees, *target, parts, bests, laws, links, columns, vocabulary, pieces, many, wide,
        num_warps=1,
    )  # fmt: skip
    if block:
        accept_blocks(seen, trees, target, dice, parts, requests, columns, vocabulary, (piece, pieces, many, wide))
    else:
        _try_children[(requests * columns,)](
            *seen, *trees, *target, *dice, columns, vocabulary, min(whole, PASS), with_replacement, num_warps=16
        )
    draw(seen, trees, target, dice, kept, with_replacement, (piece, pieces, many, wide))
    return kept


@triton.jit(do_not_specialize=["columns", "vocabulary", "pieces"])
def _weigh(
    logits, guesses, drawn,
    starts, tokens, parents,
    temperature, borders, lasts,
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
        warmth = tl.load(temperature + row)
        logit = read(logits, row, token, inside, vocabulary)
        kept = inside & tl.where(warmth > 0, is_kept(logit, token, tl.load(borders + row), tl.load(lasts + row)), True)
        score = logit.to(tl.float64) / tl.where(warmth > 0, warmth, 1.0).to(tl.float64)
        score = tl.where(kept, score, -float("inf"))
        top, mass = measure(score)
        tl.store(parts + out * 4, top)
        tl.store(parts + out * 4 + 1, mass)
        tl.store(bests + out, split * piece + tl.argmax(score, 0, tie_break_left=True))
        if guesses is not None:
            drawn_here = is_drawn(drawn, parents, temperature, first, row)
            if drawn_here:
                heat = tl.load(temperature + first + tl.load(parents + row)).to(tl.float64)
                top, mass = measure(read(guesses, row, token, inside, vocabulary).to(tl.float64) / heat)
                tl.store(parts + out * 4 + 2, top)
                tl.store(parts + out * 4 + 3, mass)


@triton.jit
def is_drawn(drawn, parents, temperature, first, row):
    """Whether the row's token was drawn. At temperature 0 nothing is."""
    parent = tl.load(parents + row)
    warm = tl.load(temperature + first + parent, mask=parent >= 0, other=0.0) > 0
    return warm & (tl.load(drawn + row) != 0)


@triton.jit(do_not_specialize=["columns", "vocabulary", "pieces"])
def _sum_up(
    guesses, drawn,
    starts, tokens, parents,
    temperature, borders, lasts,
    parts, bests, laws, links, columns, vocabulary, pieces,
    many: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) // columns
    first = tl.load(starts + request)
    place = tl.program_id(0) % columns
    row, rows = first + place, tl.load(starts + request + 1) - first
    if place < rows:
        law, link = laws + row * LAWS, links + row * LINKS
        at = tl.arange(0, many)
        part = parts + (row * pieces + at).to(tl.int64) * 4
        tops = tl.load(part, mask=at < pieces, other=-float("inf"))
        top, per = law_of(tops, tl.load(part + 1, mask=at < pieces, other=0.0))
        tl.store(law + P_TOP, top)
        tl.store(law + P_PER, per)
        best = tl.argmax(tops, 0, tie_break_left=True)
        tl.store(link + BEST, tl.load(bests + row.to(tl.int64) * pieces + best))
        own = tl.full((), 0.0, tl.float64)
        own_per = tl.full((), -1.0, tl.float64)
        if guesses is not None:
            drawn_here = is_drawn(drawn, parents, temperature, first, row)
            if drawn_here:
                tops = tl.load(part + 2, mask=at < pieces, other=-float("inf"))
                own, own_per = law_of(tops, tl.load(part + 3, mask=at < pieces, other=0.0))
        tl.store(law + Q_TOP, own)
        tl.store(law + Q_PER, own_per)
        tl.store(law + SCALE, 1.0)
        tl.store(law + LEFT, 0.0)
        tl.store(law + WEIGHT, 1.0)
        node = tl.arange(0, wide)
        parent = tl.load(parents + first + node, mask=node < rows, other=-1)
        token = tl.load(tokens + first + node, mask=node < rows, other=-1)
        real = (token >= 0) & (token < vocabulary)
        mine = tl.load(parents + row)
        eldest = first_of((parent == place) & (node > place), real, node, wide)
        following = first_of((parent == mine) & (node > place) & (mine >= 0), real, node, wide)
        tl.store(link + ELDEST, eldest)
        tl.store(link + FOLLOWING, following)


@triton.jit
def first_of(wanted, real, node, wide: tl.constexpr):
    """The first wanted node; -1 where there is none, or where it is a placeholder."""
    found = tl.min(tl.where(wanted, node, wide), 0)
    sound = tl.sum(((node == found) & real).to(tl.int32), 0) > 0
    return tl.where(sound, found, -1)


@triton.jit(do_not_specialize=["columns", "vocabulary"])
def _try_children(
    logits, guesses, laws, links,
    starts, tokens, parents,
    temperature, borders, lasts,
    seeds, positions, epochs,
    columns, vocabulary,
    block: tl.constexpr, with_replacement: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) // columns
    first = tl.load(starts + request)
    row = first + tl.program_id(0) % columns
    if row < tl.load(starts + request + 1):
        warmth, border, last = tl.load(temperature + row), tl.load(borders + row), tl.load(lasts + row)
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        epoch = 0 if epochs is None else tl.load(epochs + row)
        kept = tl.full((), -1, tl.int32)
        turn = tl.full((), 0, tl.int32)
        child = tl.load(links + row * LINKS + ELDEST)
        while child >= 0:
            at = first + child
            guess = tl.load(tokens + at)
            p, gone = remaining(
                logits, guesses, laws, links, tokens, first, row, child, guess, guess >= 0, warmth, border, last,
                vocabulary, with_replacement,
            )  # fmt: skip
            q = draft_share(guesses, laws, tokens, at, guess, guess >= 0, gone, warmth, vocabulary)
            passed = (p > 0) & (uniform(seed, position, turn, ACCEPT, epoch) * q <= p)
            following = tl.load(links + at * LINKS + FOLLOWING)
            kept = tl.where(passed, child, kept)
            if (warmth > 0) & (following >= 0) & (passed == 0):
                _leave(
                    logits, guesses, laws, links, tokens, first, row, child, following, warmth, border, last,
                    vocabulary, block, with_replacement,
                )  # fmt: skip
            child = tl.where(passed, -1, following)
            turn += 1
        tl.store(links + row * LINKS + KEPT, kept)


@triton.jit
def _leave(
    logits, guesses, laws, links, tokens, first, row, child, following, warmth, border, last, vocabulary,
    block: tl.constexpr, with_replacement: tl.constexpr,
):  # fmt: skip
    """What a rejected child leaves of p, and the part of q that the sibling after it was drawn from."""
    at, next_at = first + child, first + following
    left = tl.zeros((block,), tl.float64)
    scale = tl.zeros((block,), tl.float64)
    begin = tl.full((), 0, tl.int32)
    while begin < vocabulary:
        token = begin + tl.arange(0, block)
        inside = token < vocabulary
        p, gone = remaining(
            logits, guesses, laws, links, tokens, first, row, child, token, inside, warmth, border, last,
            vocabulary, with_replacement,
        )  # fmt: skip
        q = draft_share(guesses, laws, tokens, at, token, inside, gone, warmth, vocabulary)
        left += tl.maximum(p - q, 0.0)
        gone = gone | is_taken(laws, tokens, at, token, with_replacement)
        scale += draft_share(guesses, laws, tokens, next_at, token, inside, gone, warmth, vocabulary)
        begin += block
    whole, part = tl.sum(left, 0), tl.sum(scale, 0)
    tl.debug_barrier()  # others may still read
    tl.store(laws + at * LAWS + LEFT, tl.where(whole > 0, 1.0 / tl.where(whole > 0, whole, 1.0), 0.0))
    if not with_replacement:
        tl.store(laws + next_at * LAWS + SCALE, tl.where(part > 0, 1.0 / tl.where(part > 0, part, 1.0), 0.0))
    tl.debug_barrier()  # what one thread stores here all load next


def draw(
    seen: tuple[Any, ...],
    trees: tuple[Any, ...],
    target: tuple[Any, ...],
    dice: tuple[Any, ...],
    kept: VerifyOutput,
    with_replacement: bool,
    sizes: tuple[int, int, int, int],
) -> None:
    """Fills `kept`: the paths that the links KEPT tell, and a token drawn by pieces of the vocabulary at their ends."""
    piece, pieces, many, wide = sizes
    logits, _, _, links = seen
    requests, columns = kept.tokens.shape
    scores = torch.empty((requests, pieces, 2), dtype=torch.float64, device=logits.device)
    found = torch.empty((requests, pieces, 2), dtype=torch.int32, device=logits.device)
    _draw[(requests, pieces)](
        *seen, *trees, *target, *dice, scores, found, logits.shape[1], pieces, piece, with_replacement, num_warps=8
    )
    results = (kept.tokens, kept.rows, kept.counts)
    _write[(requests,)](links, *trees, target[0], scores, found, *results, columns, pieces, many, wide, num_warps=1)


@triton.jit(do_not_specialize=["vocabulary", "pieces"])
def _draw(
    logits, guesses, laws, links,
    starts, tokens, parents,
    temperature, borders, lasts,
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
        warmth, border, last = tl.load(temperature + row), tl.load(borders + row), tl.load(lasts + row)
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        token = split * piece + tl.arange(0, piece)
        inside = token < vocabulary
        stop = tl.load(links + row * LINKS + ELDEST)
        if stop < 0:
            logit = read(logits, row, token, inside, vocabulary)
            score = tl.div_rn(logit, tl.where(warmth > 0, warmth, 1.0)) + gumbel(seed, position, token, TARGET, 0)
            score = tl.where(inside & is_kept(logit, token, border, last), score, -float("inf")).to(tl.float64)
            spare = score
        else:
            following = tl.load(links + (first + stop) * LINKS + FOLLOWING)
            while following >= 0:
                stop = following
                following = tl.load(links + (first + stop) * LINKS + FOLLOWING)
            p, gone = remaining(
                logits, guesses, laws, links, tokens, first, row, stop, token, inside, warmth, border, last,
                vocabulary, with_replacement,
            )  # fmt: skip
            q = draft_share(guesses, laws, tokens, first + stop, token, inside, gone, warmth, vocabulary)
            epoch = 0 if epochs is None else tl.load(epochs + row)
            noise = gumbel(seed, position, token, RESIDUAL, epoch).to(tl.float64)
            score = log_or_none(tl.load(laws + row * LAWS + WEIGHT) * p - q) + noise
            spare = log_or_none(p) + noise  # where p is wholly covered, p it is
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
    place = request.to(tl.int64) * columns + at
    tl.store(kept_tokens + place, taken, mask=at < columns)
    tl.store(kept_rows + place, path, mask=at < columns)
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
