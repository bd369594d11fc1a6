"""Verification in plain torch: what a step keeps of its drafts. See reference.py.

The first half is the maths of acceptance, on probabilities p of the target and q of the draft in float64, any number
of chains at once. The laws of tests/laws enumerate these very functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from . import Choice, Drafts, Kept
from .philox import ACCEPT, NONE, RESIDUAL, TARGET, uniform
from .reference_sample import draw, noise, portions, probabilities, softmax, without_nan


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Token by token: the probability of keeping a drafted token that has these probabilities."""
    return torch.where(p > 0, (p / q).clamp(max=1.0), 0.0)


def residual(p: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """What a rejected token's place is drawn from: max(weight * p - q, 0), normalised. p, q [..., V], weight [...]."""
    rest = (weight[..., None] * p - q).clamp(min=0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def block_weights(p: Tensor, q: Tensor) -> Tensor:
    """w_0 .. w_n: the part of the target's probability that the draft has covered. p, q [..., n] -> [..., n + 1]."""
    weights = [torch.ones(p.shape[:-1], dtype=torch.float64)]
    for step in range(p.shape[-1]):
        weights.append(acceptance(weights[-1] * p[..., step], q[..., step]))
    return torch.stack(weights, -1)


def block_acceptance(p: Tensor, q: Tensor, weights: Tensor, lengths: Tensor) -> Tensor:
    """h_1 .. h_n: the chain is kept up to the last i whose coin is at most h_i; the last token's is its weight.

    p, q [..., n, V]: the distributions of drafted tokens 1 .. n; weights [..., n + 1]; lengths [...] of the chains.
    """
    here = weights[..., 1:]  # [..., n]
    left = (here[..., :-1, None] * p[..., 1:, :] - q[..., 1:, :]).clamp(min=0.0).sum(-1)  # [..., n - 1]
    whole = left + 1 - here[..., :-1]
    inner = torch.where(whole > 0, left / whole, 1.0)
    last = torch.arange(here.shape[-1]) == lengths[..., None] - 1
    return torch.where(last, here, torch.cat([inner, here[..., -1:]], -1))


def expand(choice: Choice, drafts: Drafts) -> Choice:
    owners: list[int] = []
    depths: list[int] = []
    for request, (first, rows) in enumerate(_requests(drafts)):
        depth = [0] * rows
        for row, parent in enumerate(drafts.parents[first + 1 : first + rows].tolist(), 1):
            depth[row] = depth[parent] + 1
        owners += [request] * rows
        depths += depth
    wide = choice.take(owners)
    return replace(wide, positions=wide.positions + torch.tensor(depths, dtype=torch.int32))


def match(sampled: Tensor, drafts: Drafts) -> Kept:
    tokens, chosen = drafts.tokens.tolist(), sampled.tolist()

    def follow(row: int, _: int, children: list[int]) -> int | None:
        return next((child for child in children if tokens[child] == chosen[row] >= 0), None)

    return _walk(sampled, drafts, follow)


def force(sampled: Tensor, drafts: Drafts, rates: Tensor, choice: Choice) -> Kept:
    if rates.shape[0] < drafts.width:
        raise ValueError(f"{rates.shape[0]} rates cannot serve drafts of {drafts.width} tokens")
    tokens, bounds, coins = drafts.tokens.tolist(), rates.tolist(), _coins(choice).tolist()

    def follow(row: int, depth: int, children: list[int]) -> int | None:
        return children[0] if children and tokens[children[0]] >= 0 and coins[row] < bounds[depth] else None

    return _walk(sampled, drafts, follow)


def reject(logits: Tensor, drafts: Drafts, choice: Choice, block: bool) -> Kept:
    requests, parents = _requests(drafts), drafts.parents.tolist()
    for first, rows in requests:
        if parents[first : first + rows] != list(range(-1, rows - 1)):
            raise ValueError(f"the draft in rows {first} .. {first + rows - 1} is no chain: only `match` takes trees")
    kept = []
    for part in portions(len(requests), (drafts.width + 1) * logits.shape[1]):
        starts, lengths = torch.tensor(requests[part]).unbind(1)
        kept.append(_reject(logits, drafts, choice, block, starts, lengths))
    tokens, counts = (torch.cat(each) for each in zip(*kept, strict=True))
    columns = torch.arange(drafts.width + 1)
    chosen = torch.where(columns < counts[:, None], columns, -1)
    return Kept(tokens.int(), chosen.int(), counts.int())


@dataclass(frozen=True)
class _Chains:
    """Chains side by side, padded to the width, each up to its first placeholder."""

    at: Tensor  # [B, width + 1], logit rows
    tokens: Tensor  # [B, width], 0 where there is none
    real: Tensor  # [B, width] bool
    drawn: Tensor  # [B, width] bool
    p: Tensor  # [B, width + 1, V] f64
    q: Tensor  # [B, width, V] f64

    @property
    def lengths(self) -> Tensor:
        return self.real.sum(1)


def _reject(
    logits: Tensor, drafts: Drafts, choice: Choice, block: bool, first: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens [B, width + 1] and counts [B] of the requests that have these rows."""
    chains = _lay_out(logits, drafts, choice, first, rows)
    accepted, weights = _accept(chains, choice, block)
    width, vocabulary = drafts.width, logits.shape[1]
    out = torch.full((len(first), width + 1), -1)
    out[:, :-1] = torch.where(torch.arange(width) < accepted[:, None], chains.tokens, -1)
    ends = chains.at.gather(1, accepted[:, None])[:, 0]
    last = draw(logits[ends], replace(choice.take(ends), stream=TARGET, epochs=None)).long()
    stopped = (accepted < chains.lengths).nonzero()[:, 0]
    if len(stopped):
        depth = accepted[stopped]
        rest = residual(chains.p[stopped, depth], chains.q[stopped, depth], weights[stopped, depth])  # [stopped, V]
        dice = noise(replace(choice.take(ends[stopped]), stream=RESIDUAL), vocabulary)
        last[stopped] = (rest.log() + dice).argmax(-1)
    return out.scatter(1, accepted[:, None], last[:, None]), accepted + 1


def _lay_out(logits: Tensor, drafts: Drafts, choice: Choice, first: Tensor, rows: Tensor) -> _Chains:
    width, vocabulary = drafts.width, logits.shape[1]
    at = first[:, None] + torch.arange(width + 1).clamp(max=rows[:, None] - 1)
    tokens = drafts.tokens[at[:, 1:]].long()
    real = (torch.arange(width) < rows[:, None] - 1) & (tokens >= 0) & (tokens < vocabulary)
    real = real.cumprod(1).bool()
    tokens = torch.where(real, tokens, 0)
    p = probabilities(logits[at.flatten()], choice.take(at.flatten())).view(*at.shape, vocabulary)
    drawn, q = _proposals(drafts, at[:, 1:], tokens, choice.temperature[at[:, :-1]], vocabulary)
    return _Chains(at, tokens, real, drawn & real, p, q)


def _accept(chains: _Chains, choice: Choice, block: bool) -> tuple[Tensor, Tensor]:
    """How many tokens are kept [B], and the weights that residuals are taken with [B, width + 1]."""
    p, places = chains.p[:, :-1], chains.tokens[..., None]
    p_token, q_token = p.gather(-1, places)[..., 0], chains.q.gather(-1, places)[..., 0]  # [B, width]
    coins = _coins(choice.take(chains.at.flatten())).view(chains.at.shape)[:, :-1]
    weights = torch.ones(chains.at.shape, dtype=torch.float64)
    passed = (coins <= acceptance(p_token, q_token)) & chains.real
    accepted = passed.cumprod(1).sum(1)
    blocks = chains.drawn.any(1) & block  # of drafts that were not drawn a block keeps as much as tokens do
    if blocks.any():
        weights = torch.where(blocks[:, None], block_weights(p_token, q_token), weights)
        passed = (coins <= block_acceptance(p, chains.q, weights, chains.lengths)) & chains.real
        longest = torch.where(passed, torch.arange(1, passed.shape[1] + 1), 0).amax(1)
        accepted = torch.where(blocks, longest, accepted)
    return accepted, weights


def _proposals(
    drafts: Drafts, at: Tensor, tokens: Tensor, temperature: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Whether each token was drawn [B, width], and what from [B, width, V] f64; one-hot where it was not drawn."""
    certain = torch.zeros(*tokens.shape, vocabulary, dtype=torch.float64).scatter(-1, tokens[..., None], 1.0)
    if drafts.logits is None or drafts.drawn is None:
        return torch.zeros_like(tokens, dtype=torch.bool), certain
    drawn = drafts.drawn[at].bool() & (temperature > 0)
    warm = torch.where(temperature > 0, temperature, 1.0).flatten()
    q = softmax(without_nan(drafts.logits[at.flatten()]), warm).view(certain.shape)
    return drawn, torch.where(drawn[..., None], q, certain)


def _coins(choice: Choice) -> Tensor:
    """One for each row, in (0, 1): [R] f64."""
    epochs = NONE if choice.epochs is None else choice.epochs
    return uniform(choice.seeds, choice.positions, torch.tensor(0), ACCEPT, epochs)


def _requests(drafts: Drafts) -> list[tuple[int, int]]:
    """The first row of each request and how many it has; refuses what is no forest."""
    starts, parents = drafts.starts.tolist(), drafts.parents.tolist()
    if starts[0] != 0 or starts[-1] != len(parents) or len(parents) != drafts.tokens.shape[0]:
        raise ValueError(f"`starts` runs from {starts[0]} to {starts[-1]}, but there are {len(parents)} rows")
    for request, (first, end) in enumerate(pairwise(starts)):
        if not 1 <= end - first <= drafts.width + 1:
            raise ValueError(f"`starts` gives request {request} {end - first} rows: expected 1 to {drafts.width + 1}")
        if parents[first] != -1 or not all(0 <= parents[row] < row - first for row in range(first + 1, end)):
            raise ValueError(f"a parent in request {request} does not lie before its child")
    return [(first, end - first) for first, end in pairwise(starts)]


def _walk(sampled: Tensor, drafts: Drafts, follow: Callable[[int, int, list[int]], int | None]) -> Kept:
    """From the first row of each request, `follow(row, depth, children)` from child to child until it gives none."""
    requests, tokens, chosen = _requests(drafts), drafts.tokens.tolist(), sampled.tolist()
    shape = (len(requests), drafts.width + 1)
    out = Kept(torch.full(shape, -1).int(), torch.full(shape, -1).int(), torch.empty(len(requests)).int())
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
