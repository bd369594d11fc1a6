"""Logits become tokens: each part of a row finds its best, then each row the best of its parts. See limits.py.

A row is cut at the same places whatever the batch, so that not even a log-probability depends on its neighbours. Scores
travel as their integer keys (limits.float_key): integers have no NaN, and leave room for `taken` below -inf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import ChildTokens, SamplingMetadata
from .noise import as_gumbel, philox_run
from .pdl import LAUNCH, wait
from .thresholds import LOWEST, MOST, NOTHING, float_key, is_kept, limits

PART = 2048  # tokens that a program looks at


def sample(logits: Tensor, sampling: SamplingMetadata, out: Tensor | None = None) -> Tensor:
    rows = logits.shape[0]
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out  # [R]
    _choose(logits, sampling, 1, tokens, None)
    return tokens


def sample_children(logits: Tensor, sampling: SamplingMetadata, count: int) -> ChildTokens:
    rows = logits.shape[0]
    tokens = torch.empty((rows, count), dtype=torch.int32, device=logits.device)
    logprobs = torch.empty((rows, count), dtype=torch.float32, device=logits.device)
    if count:
        _choose(logits, sampling, count, tokens, logprobs)
    return ChildTokens(tokens, logprobs)


def _choose(logits: Tensor, sampling: SamplingMetadata, count: int, tokens: Tensor, logprobs: Tensor | None) -> None:
    """The best tokens of each row, with their log-probabilities if these are wanted."""
    rows, vocabulary = logits.shape
    if not rows:
        return
    borders, lasts = (None, None) if sampling.greedy else limits(logits, sampling)
    found = Found(logits, count, logprobs is not None)
    _best[(rows, found.parts)](
        logits,
        logits.stride(0),
        vocabulary,
        sampling.temperature,
        sampling.seeds,
        sampling.positions,
        sampling.epochs,
        borders,
        lasts,
        found.keys,
        found.tokens,
        found.peaks,
        found.masses,
        sampling.stream,
        count=found.count,
        part=PART,
        num_warps=8,
        **LAUNCH,
    )
    merge(logits, found, sampling.temperature, tokens, logprobs)


class Found:
    """What the parts of each row found."""

    def __init__(self, logits: Tensor, count: int, shares: bool) -> None:
        rows, vocabulary = logits.shape
        self.parts, self.count = triton.cdiv(vocabulary, PART), min(count, PART)
        ids = torch.empty((2, rows, self.parts, self.count), dtype=torch.int32, device=logits.device)
        self.keys, self.tokens = ids.unbind()  # [R, parts, count], the best first
        sums = torch.empty((2, rows, self.parts), dtype=torch.float32, device=logits.device) if shares else None
        # [R, parts]: the largest logit, and the sum of exp((logit - that) / temperature)
        self.peaks: Tensor | None = None if sums is None else sums[0]
        self.masses: Tensor | None = None if sums is None else sums[1]


def merge(
    logits: Tensor,
    found: Found,
    temperature: Tensor | None,
    tokens: Tensor,
    logprobs: Tensor | None,
    banned: bool = False,
) -> None:
    """The best of each row, tokens [R] or [R, count]. Tokens of logit -inf are listed only if `banned`."""
    count = 1 if tokens.ndim == 1 else tokens.shape[1]
    _merge[(logits.shape[0],)](
        logits,
        logits.stride(0),
        logits.shape[1],
        temperature,
        found.keys,
        found.tokens,
        found.peaks,
        found.masses,
        tokens,
        tokens.stride(0),
        logprobs,
        found.parts * found.count,
        parts=found.parts,
        padded_parts=triton.next_power_of_2(found.parts),
        padded=triton.next_power_of_2(found.parts * found.count),
        count=count,
        banned=banned,
        num_warps=4,
        **LAUNCH,
    )


@triton.jit(do_not_specialize=["purpose"])
def _best(
    logits,
    stride,
    vocabulary,
    temperature,
    seeds,
    positions,
    epochs,
    borders,
    lasts,
    keys,
    tokens,
    peaks,
    masses,
    purpose,
    count: tl.constexpr,
    part: tl.constexpr,
):
    wait()
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    warmth = tl.load(temperature + row)
    logit, token = read_part(logits + row * stride, place, vocabulary, part)
    score = logit
    if borders is not None:  # noqa: SIM102 - it is known when this is compiled, the other is not
        if warmth > 0:
            seed, position = tl.load(seeds + row), tl.load(positions + row)
            epoch = 0 if epochs is None else tl.load(epochs + row)
            noise = as_gumbel(philox_run(seed, position, place * part, purpose, epoch, part))
            kept = is_kept(logit, token, tl.load(borders + row), tl.load(lasts + row))
            score = tl.where(kept, tl.div_rn(logit, warmth) + noise, -float("inf"))
    at = row * tl.num_programs(1) + place
    key = tl.where(token < vocabulary, float_key(score), LOWEST)
    store_best(key, place * part, keys + at * count, tokens + at * count, count, part)
    if peaks is not None:
        store_mass(logit, tl.where(warmth > 0, warmth, 1.0), peaks + at, masses + at)


@triton.jit
def read_part(row, place, vocabulary, part: tl.constexpr):
    """The logits of a part, -inf where there is none or NaN, and their ids."""
    token = place * part + tl.arange(0, part)
    logit = tl.load(row + token, mask=token < vocabulary, other=-float("inf"))
    return tl.where(logit == logit, logit, -float("inf")), token


@triton.jit
def store_best(key, first, keys, tokens, count: tl.constexpr, part: tl.constexpr):
    """The `count` largest keys of a part, the lower id first among equals."""
    column = tl.arange(0, part)
    for index in range(count):
        best, at = tl.max(key, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(keys + index, best)
        tl.store(tokens + index, first + at)
        key = tl.where(column == at, LOWEST, key)


@triton.jit
def store_mass(logit, warmth, peak, mass):
    """The largest logit of a part, and the sum of exp((logit - that) / temperature)."""
    finite = tl.minimum(logit, MOST)
    most = tl.maximum(tl.max(finite, 0), -MOST)  # a number, so that the difference is none of two infinities
    tl.store(peak, most)
    tl.store(mass, tl.sum(tl.exp((finite - most) / warmth), 0))


@triton.jit
def total_mass(peaks, masses, warmth, parts: tl.constexpr, padded: tl.constexpr):
    """The largest logit of a row, and the logarithm of the sum of exp((logit - that) / temperature), float64."""
    column = tl.arange(0, padded)
    inside = column < parts
    peak = tl.load(peaks + column, mask=inside, other=-MOST).to(tl.float64)
    mass = tl.load(masses + column, mask=inside, other=0.0).to(tl.float64)
    most = tl.max(peak, 0)
    total = tl.sum(mass * tl.exp((peak - most) / warmth), 0)
    return most, tl.log(tl.where(total > 0, total, 1.0))


@triton.jit
def share_of(logit, warmth, most, size):
    """The log-probability of a logit; -inf where no token has a probability."""
    usable = (logit == logit) & (logit > -float("inf"))
    away = (tl.minimum(logit, MOST).to(tl.float64) - most) / warmth - size
    return tl.where(usable, away, -float("inf")).to(tl.float32)


@triton.jit
def _merge(
    logits,
    stride,
    vocabulary,
    temperature,
    keys,
    tokens,
    peaks,
    masses,
    out,
    out_stride,
    logprobs,
    candidates,
    parts: tl.constexpr,
    padded_parts: tl.constexpr,
    padded: tl.constexpr,
    count: tl.constexpr,
    banned: tl.constexpr,
):
    wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    key = tl.load(keys + row * candidates + column, mask=column < candidates, other=LOWEST)
    if logprobs is not None:
        warmth = 1.0 if temperature is None else tl.load(temperature + row)
        warmth = tl.where(warmth > 0, warmth, 1.0).to(tl.float64)
        most, size = total_mass(peaks + row * parts, masses + row * parts, warmth, parts, padded_parts)
    for index in range(count):
        # Parts are in order, and so are the equals of a part: the leftmost has the lowest id.
        best, at = tl.max(key, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.load(tokens + row * candidates + tl.minimum(at, candidates - 1))
        taken = (best > NOTHING) | (index == 0) | banned
        tl.store(out + row * out_stride + index, tl.where(taken, token, -1))
        if logprobs is not None:
            logit = tl.load(logits + row * stride + tl.minimum(token, vocabulary - 1))
            share = share_of(logit, warmth, most, size)
            tl.store(logprobs + row * count + index, tl.where(taken, share, -float("inf")))
        key = tl.where(column == at, LOWEST, key)
