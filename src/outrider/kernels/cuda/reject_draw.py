"""The last token of each request, and all that it goes on with: the end of rejection. See reject.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .. import VerifyOutput, philox
from .limits import is_kept
from .noise import gumbel
from .shares import BEST, ELDEST, FOLLOWING, KEPT, LAWS, LINKS, WEIGHT, draft_share, read, remaining

TARGET = tl.constexpr(philox.TARGET)
RESIDUAL = tl.constexpr(philox.RESIDUAL)


def draw(
    seen: tuple[Any, ...],
    trees: tuple[Any, ...],
    target: tuple[Any, ...],
    dice: tuple[Any, ...],
    kept: VerifyOutput,
    again: bool,
    sizes: tuple[int, int, int, int],
) -> None:
    """Fills `kept`: the paths that the links KEPT tell, and a token drawn by pieces of the vocabulary at their ends."""
    piece, pieces, many, wide = sizes
    logits, _, _, links = seen
    requests, columns = kept.tokens.shape
    scores = torch.empty((requests, pieces, 2), dtype=torch.float64, device=logits.device)
    found = torch.empty((requests, pieces, 2), dtype=torch.int32, device=logits.device)
    _draw[(requests, pieces)](
        *seen, *trees, *target, *dice, scores, found, logits.shape[1], pieces, piece, again, num_warps=8
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
    piece: tl.constexpr, again: tl.constexpr,
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
                vocabulary, again,
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
