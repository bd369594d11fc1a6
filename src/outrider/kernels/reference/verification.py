"""Verification by tokens alone, in plain torch: exact and synthetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..philox import ACCEPT, NONE, uniform
from ..structures import SamplingMetadata, VerifyInputs, VerifyOutput


def expand_sampling(sampling: SamplingMetadata, drafts: VerifyInputs) -> SamplingMetadata:
    owners: list[int] = []
    depths: list[int] = []
    for request, (first, rows) in enumerate(request_rows(drafts)):
        depth = [0] * rows
        for row, parent in enumerate(drafts.parents[first + 1 : first + rows].tolist(), 1):
            depth[row] = depth[parent] + 1
        owners += [request] * rows
        depths += depth
    wide = sampling.take(owners)
    return replace(wide, positions=wide.positions + torch.tensor(depths, dtype=torch.int32))


def verify_exact(sampled: Tensor, drafts: VerifyInputs) -> VerifyOutput:
    tokens, chosen = drafts.tokens.tolist(), sampled.tolist()

    def follow(row: int, _: int, children: list[int]) -> int | None:
        return next((child for child in children if tokens[child] == chosen[row] >= 0), None)

    return _follow_tree(sampled, drafts, follow)


def verify_synthetic(sampled: Tensor, drafts: VerifyInputs, rates: Tensor, sampling: SamplingMetadata) -> VerifyOutput:
    if rates.shape[0] < drafts.width:
        raise ValueError(f"{rates.shape[0]} rates cannot serve drafts of {drafts.width} tokens")
    tokens, bounds, coins = drafts.tokens.tolist(), rates.tolist(), accept_coins(sampling).tolist()

    def follow(row: int, depth: int, children: list[int]) -> int | None:
        return children[0] if children and tokens[children[0]] >= 0 and coins[row] < bounds[depth] else None

    return _follow_tree(sampled, drafts, follow)


def accept_coins(sampling: SamplingMetadata, child: int = 0) -> Tensor:
    """Return the coins of each row for the child at this index: [R] f64 in (0, 1)."""
    epochs = NONE if sampling.epochs is None else sampling.epochs
    return uniform(sampling.seeds, sampling.positions, torch.tensor(child), ACCEPT, epochs)


def request_rows(drafts: VerifyInputs) -> list[tuple[int, int]]:
    """Return the first row and the number of rows of each request, after checking that `parents` is a forest."""
    starts, parents = drafts.starts.tolist(), drafts.parents.tolist()
    if starts[0] != 0 or starts[-1] != len(parents) or len(parents) != drafts.tokens.shape[0]:
        raise ValueError(f"`starts` runs from {starts[0]} to {starts[-1]}, but there are {len(parents)} rows")
    for request, (first, end) in enumerate(pairwise(starts)):
        if not 1 <= end - first <= drafts.width + 1:
            raise ValueError(f"`starts` gives request {request} {end - first} rows: expected 1 to {drafts.width + 1}")
        if parents[first] != -1 or not all(0 <= parents[row] < row - first for row in range(first + 1, end)):
            raise ValueError(f"a parent in request {request} does not lie before its child")
    return [(first, end - first) for first, end in pairwise(starts)]


def _follow_tree(
    sampled: Tensor, drafts: VerifyInputs, follow: Callable[[int, int, list[int]], int | None]
) -> VerifyOutput:
    """Follow each tree from its first row: `follow(row, depth, children)` returns the accepted child or None."""
    requests, tokens, chosen = request_rows(drafts), drafts.tokens.tolist(), sampled.tolist()
    shape = (len(requests), drafts.width + 1)
    out = VerifyOutput(torch.full(shape, -1).int(), torch.full(shape, -1).int(), torch.empty(len(requests)).int())
    for request, (first, rows) in enumerate(requests):
        parents = drafts.parents[first : first + rows].tolist()
        taken: list[int] = []
        path = [0]
        while True:
            row = path[-1]
            children = [first + child for child in range(row + 1, rows) if parents[child] == row]
            child = follow(first + row, len(taken), children)
            taken.append(chosen[first + row] if child is None else tokens[child])
            if child is None:
                break
            path.append(child - first)
        out.tokens[request, : len(taken)] = torch.tensor(taken, dtype=torch.int32)
        out.rows[request, : len(path)] = torch.tensor(path, dtype=torch.int32)
        out.counts[request] = len(taken)
    return out
