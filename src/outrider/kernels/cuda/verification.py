"""Verification by tokens alone: exact and synthetic. One program follows the tree of one request.

Padding: a request without rows accepts nothing; rows without a request get neutral sampling parameters.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import philox
from ..structures import SamplingMetadata, VerifyInputs, VerifyOutput
from .noise import uniform

ACCEPT = tl.constexpr(philox.ACCEPT)


def expand_sampling(sampling: SamplingMetadata, drafts: VerifyInputs) -> SamplingMetadata:
    rows, requests, device = drafts.tokens.shape[0], sampling.seeds.shape[0], sampling.seeds.device
    wide = replace(
        sampling,
        temperature=torch.empty(rows, dtype=torch.float32, device=device),
        top_k=torch.empty(rows, dtype=torch.int32, device=device),
        top_p=torch.empty(rows, dtype=torch.float32, device=device),
        min_p=torch.empty(rows, dtype=torch.float32, device=device),
        seeds=torch.empty(rows, dtype=torch.int64, device=device),
        positions=torch.empty(rows, dtype=torch.int32, device=device),
        epochs=None if sampling.epochs is None else torch.empty(rows, dtype=torch.int32, device=device),
    )
    _expand[(requests + 1,)](
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seeds,
        sampling.positions,
        sampling.epochs,
        drafts.starts,
        drafts.parents,
        wide.temperature,
        wide.top_k,
        wide.top_p,
        wide.min_p,
        wide.seeds,
        wide.positions,
        wide.epochs,
        requests,
        rows,
        block=padded_rows(drafts),
        num_warps=1,
    )
    return wide


@triton.jit(
    do_not_specialize=["requests", "rows"],
    do_not_specialize_on_alignment=[
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seeds",
        "positions",
        "epochs",
        "starts",
        "parents",
        "wide_temperature",
        "wide_top_k",
        "wide_top_p",
        "wide_min_p",
        "wide_seeds",
        "wide_positions",
        "wide_epochs",
    ],
)
def _expand(
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    epochs,
    starts,
    parents,
    wide_temperature,
    wide_top_k,
    wide_top_p,
    wide_min_p,
    wide_seeds,
    wide_positions,
    wide_epochs,
    requests,
    rows,
    block: tl.constexpr,
):
    request = tl.program_id(0)
    real = request < requests
    first = tl.load(starts + request)
    end = tl.load(starts + request + 1, mask=real, other=0)
    end = tl.where(real, end, rows)  # the last program fills the remaining rows
    temperature = tl.load(temperature + request, mask=real, other=0.0)
    top_k = tl.load(top_k + request, mask=real, other=0)
    top_p = tl.load(top_p + request, mask=real, other=1.0)
    min_p = tl.load(min_p + request, mask=real, other=0.0)
    seed = tl.load(seeds + request, mask=real, other=0)
    position = tl.load(positions + request, mask=real, other=0)
    begin = first
    while begin < end:
        row = begin + tl.arange(0, block)
        inside = row < end
        depth = tl.zeros([block], tl.int32)
        above = tl.load(parents + row, mask=inside & real, other=-1)
        while tl.max(above, 0) >= 0:
            depth += (above >= 0).to(tl.int32)
            above = tl.load(parents + first + above, mask=above >= 0, other=-1)
        tl.store(wide_temperature + row, temperature, mask=inside)
        tl.store(wide_top_k + row, top_k, mask=inside)
        tl.store(wide_top_p + row, top_p, mask=inside)
        tl.store(wide_min_p + row, min_p, mask=inside)
        tl.store(wide_seeds + row, seed, mask=inside)
        tl.store(wide_positions + row, position + depth, mask=inside)
        if epochs is not None:
            tl.store(wide_epochs + row, tl.load(epochs + request, mask=real, other=0), mask=inside)
        begin += block


def verify_exact(sampled: Tensor, drafts: VerifyInputs) -> VerifyOutput:
    return _follow(sampled, drafts)


def verify_synthetic(sampled: Tensor, drafts: VerifyInputs, rates: Tensor, sampling: SamplingMetadata) -> VerifyOutput:
    assert rates.shape[0] >= drafts.width, f"{rates.shape[0]} rates cannot serve drafts of {drafts.width} tokens"
    return _follow(sampled, drafts, rates, sampling.seeds, sampling.positions, sampling.epochs)


def _follow(
    sampled: Tensor,
    drafts: VerifyInputs,
    rates: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    epochs: Tensor | None = None,
) -> VerifyOutput:
    accepted = empty_output(drafts)
    if accepted.counts.shape[0]:
        _follow_tree[accepted.counts.shape](
            sampled,
            drafts.starts,
            drafts.tokens,
            drafts.parents,
            rates,
            seeds,
            positions,
            epochs,
            accepted.tokens,
            accepted.rows,
            accepted.counts,
            drafts.width + 1,
            block=padded_rows(drafts),
            num_warps=1,
        )
    return accepted


def empty_output(drafts: VerifyInputs) -> VerifyOutput:
    requests = drafts.starts.shape[0] - 1
    out = torch.empty((2, requests, drafts.width + 1), dtype=torch.int32, device=drafts.tokens.device)
    return VerifyOutput(out[0], out[1], torch.empty(requests, dtype=torch.int32, device=drafts.tokens.device))


def padded_rows(drafts: VerifyInputs) -> int:
    return max(int(triton.next_power_of_2(drafts.width + 1)), 2)


@triton.jit(
    do_not_specialize=["columns"],
    do_not_specialize_on_alignment=[
        "sampled",
        "starts",
        "tokens",
        "parents",
        "rates",
        "seeds",
        "positions",
        "epochs",
        "accepted_tokens",
        "accepted_rows",
        "counts",
    ],
)
def _follow_tree(
    sampled,
    starts,
    tokens,
    parents,
    rates,  # None: accept the child that equals the sampled token; else the first child, by coin
    seeds,
    positions,
    epochs,
    accepted_tokens,
    accepted_rows,
    counts,
    columns,
    block: tl.constexpr,
):
    request = tl.program_id(0)
    first = tl.load(starts + request)
    rows = tl.load(starts + request + 1) - first
    at = tl.arange(0, block)
    token = tl.load(tokens + first + at, mask=at < rows, other=-1)
    parent = tl.load(parents + first + at, mask=at < rows, other=-1)
    path = tl.full([block], -1, tl.int32)
    taken = tl.full([block], -1, tl.int32)
    row = 0
    depth = 0
    going = rows > 0
    while going:
        chosen = tl.load(sampled + first + row)
        child = (parent == row) & (at > row)
        if rates is None:
            accepted = tl.min(tl.where(child & (token == chosen) & (token >= 0), at, block), 0)
        else:
            accepted = tl.min(tl.where(child, at, block), 0)
            drafted = tl.sum(tl.where(at == accepted, token, 0), 0)
            epoch = 0 if epochs is None else tl.load(epochs + first + row)
            seed, position = tl.load(seeds + first + row), tl.load(positions + first + row)
            coin = uniform(seed, position, depth * 0, ACCEPT, epoch)
            rate = tl.load(rates + depth, mask=accepted < block, other=0.0).to(tl.float64)
            accepted = tl.where((drafted >= 0) & (coin < rate), accepted, block)
        going = accepted < block
        chosen = tl.where(going, tl.sum(tl.where(at == accepted, token, 0), 0), chosen)
        taken = tl.where(at == depth, chosen, taken)
        path = tl.where(at == depth, row, path)
        row = tl.where(going, accepted, row)
        depth += 1
    index = request.to(tl.int64) * columns + at
    tl.store(accepted_tokens + index, taken, mask=at < columns)
    tl.store(accepted_rows + index, path, mask=at < columns)
    tl.store(counts + request, depth)
