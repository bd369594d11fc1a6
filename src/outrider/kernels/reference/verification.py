"""Verification in plain torch: exact and synthetic (by tokens alone), then rejection sampling.

`acceptance` and the functions after it are the maths of rejection sampling on float64 probabilities p of the target and
q of the draft, for any number of chains or nodes at once. The tests in tests/laws enumerate them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

import torch
from torch import Tensor

from ..philox import ACCEPT, NONE, RESIDUAL, TARGET, uniform
from ..structures import SamplingMetadata, VerifyInputs, VerifyOutput
from .sampling import draw, noise, probabilities, row_chunks, softmax, without_nan


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


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Return the acceptance probability of a drafted token with these probabilities, token by token."""
    return torch.where(p > 0, (p / q).clamp(max=1.0), 0.0)


def residual(p: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """Return the residual distribution max(weight * p - q, 0), normalised. p, q [..., V], weight [...]."""
    rest = (weight[..., None] * p - q).clamp(min=0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def without(q: Tensor, taken: Tensor) -> Tensor:
    """Return q [..., V] after these tokens [..., V] bool were sampled without replacement."""
    rest = q.masked_fill(taken, 0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(taken.any(-1, keepdim=True), torch.where(total > 0, rest / total, 0.0), q)


def attempt(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the acceptance probability of a child, and the residual if it is rejected. p, q [..., V], tokens [...]."""
    index = tokens[..., None]
    prob = acceptance(p.gather(-1, index), q.gather(-1, index))[..., 0]
    return prob, residual(p, q, torch.ones_like(prob))


def block_weights(p: Tensor, q: Tensor) -> Tensor:
    """Return w_0 .. w_n: the part of the target's probability that the draft covers. p, q [..., n] -> [..., n + 1]."""
    weights = [torch.ones(p.shape[:-1], dtype=torch.float64)]
    for step in range(p.shape[-1]):
        weights.append(acceptance(weights[-1] * p[..., step], q[..., step]))
    return torch.stack(weights, -1)


def block_acceptance(p: Tensor, q: Tensor, weights: Tensor, lengths: Tensor) -> Tensor:
    """Return h_1 .. h_n: the chain is accepted up to the last i whose coin is at most h_i; h_n is the last weight.

    p, q [..., n, V]: the distributions of drafted tokens 1 .. n; weights [..., n + 1]; lengths [...] of the chains.
    """
    here = weights[..., 1:]  # [..., n]
    left = (here[..., :-1, None] * p[..., 1:, :] - q[..., 1:, :]).clamp(min=0.0).sum(-1)  # [..., n - 1]
    whole = left + 1 - here[..., :-1]
    inner = torch.where(whole > 0, left / whole, 1.0)
    last = torch.arange(here.shape[-1]) == lengths[..., None] - 1
    return torch.where(last, here, torch.cat([inner, here[..., -1:]], -1))


def verify_rejection(
    logits: Tensor, drafts: VerifyInputs, sampling: SamplingMetadata, block: bool, with_replacement: bool = False
) -> VerifyOutput:
    requests, parents = request_rows(drafts), drafts.parents.tolist()
    for first, rows in requests if block else []:
        if parents[first : first + rows] != list(range(-1, rows - 1)):
            raise ValueError(f"the draft in rows {first} .. {first + rows - 1} is no chain: `block` takes chains alone")
    nonfinite = _nonfinite(drafts, sampling, logits.shape[1])
    children = _children(drafts, logits.shape[1], nonfinite)
    kept = []
    for part in row_chunks(len(requests), (drafts.width + 1) * logits.shape[1]):
        starts, lengths = torch.tensor(requests[part]).unbind(1)
        if block:
            kept.append(_verify_chains(logits, drafts, sampling, starts, lengths, nonfinite))
        else:
            kept.append(_TreeRejection(logits, drafts, sampling, with_replacement, children).run(starts))
    tokens, rows_kept, counts = (torch.cat(each).int() for each in zip(*kept, strict=True))
    ignored = torch.tensor([int(nonfinite[first : first + rows].sum()) for first, rows in requests], dtype=torch.int32)
    return VerifyOutput(tokens, rows_kept, counts, ignored)


def _nonfinite(drafts: VerifyInputs, sampling: SamplingMetadata, vocabulary: int) -> Tensor:
    """Return which tokens were sampled from logits that are no distribution: [R] bool."""
    if drafts.logits is None or drafts.drawn is None:
        return torch.zeros_like(drafts.tokens, dtype=torch.bool)
    sampled = drafts.drawn.bool() & (drafts.tokens >= 0) & (drafts.tokens < vocabulary) & (drafts.parents >= 0)
    return sampled & (sampling.temperature > 0) & ~drafts.logits.amax(-1).isfinite()  # the maximum of NaN is NaN


def _children(drafts: VerifyInputs, vocabulary: int, nonfinite: Tensor) -> Tensor:
    """Return the children of each row in order, up to the first placeholder, without those in `nonfinite` [R].

    [R, most], padded with -1.
    """
    parents = drafts.parents.tolist()
    found: list[list[int]] = [[] for _ in parents]
    for first, rows in request_rows(drafts):
        for row in range(first + 1, first + rows):
            found[first + parents[row]].append(row)
    real = ((drafts.tokens >= 0) & (drafts.tokens < vocabulary)).tolist()
    ignored = nonfinite.tolist()
    tried = [[row for row in takewhile(real.__getitem__, each) if not ignored[row]] for each in found]
    most = max(map(len, tried), default=0)
    return torch.tensor([each + [-1] * (most - len(each)) for each in tried]).view(len(tried), most)


@dataclass(frozen=True)
class _TreeRejection:
    """Token-by-token rejection on trees: from the first row of each request to its accepted children, in lockstep."""

    logits: Tensor
    drafts: VerifyInputs
    sampling: SamplingMetadata
    with_replacement: bool
    children: Tensor  # [R, most]

    def run(self, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [B, width + 1], rows [B, width + 1] and counts [B] of the requests that begin at these rows."""
        shape = (len(first), self.drafts.width + 1)
        tokens, rows, counts = torch.full(shape, -1), torch.full(shape, -1), torch.zeros(len(first)).long()
        live, row_index = torch.arange(len(first)), first
        for depth in range(shape[1]):
            child, left = self.try_children(row_index)
            ended = child < 0
            rows[live, depth] = row_index - first[live]
            tokens[live, depth] = self.drafts.tokens[child].long()
            tokens[live[ended], depth] = self.last(row_index[ended], left[ended])
            counts[live] = depth + 1
            live, row_index = live[~ended], child[~ended]
        return tokens, rows, counts

    def try_children(self, row_index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the accepted child of each of these rows [N], -1 for none, and the residual of p [N, V] f64."""
        sampling, vocabulary = self.sampling.take(row_index), self.logits.shape[1]
        left, kept = probabilities(self.logits[row_index], sampling), torch.full_like(row_index, -1)
        taken = torch.zeros(len(row_index), vocabulary, dtype=torch.bool)
        for child_index in range(self.children.shape[1]):
            child = self.children[row_index, child_index]
            tried = ((child >= 0) & (kept < 0)).nonzero()[:, 0]
            row = child[tried]
            tokens = self.drafts.tokens[row].long()
            drawn, q = _draft_probs(self.drafts, row, tokens, sampling.temperature[tried], vocabulary)
            prob, rest = attempt(left[tried], without(q, taken[tried] & drawn[:, None]), tokens)
            passed = accept_coins(sampling.take(tried), child_index) <= prob
            kept[tried] = torch.where(passed, row, -1)
            left[tried] = torch.where(passed[:, None], left[tried], rest)
            taken[tried, tokens] |= drawn & (not self.with_replacement)
        return kept, left

    def last(self, row_index: Tensor, left: Tensor) -> Tensor:
        """Sample the token of rows without an accepted child: from the residual, or from p if no child was tried."""
        sampling = self.sampling.take(row_index)
        own = draw(self.logits[row_index], replace(sampling, stream=TARGET, epochs=None)).long()
        if not self.children.shape[1]:
            return own
        gumbel_noise = noise(replace(sampling, stream=RESIDUAL), left.shape[1])
        return torch.where(self.children[row_index, 0] >= 0, (left.log() + gumbel_noise).argmax(-1), own)


@dataclass(frozen=True)
class _Chains:
    """Chains padded to the width, each up to its first placeholder or token that is ignored."""

    rows: Tensor  # [B, width + 1], logit rows
    tokens: Tensor  # [B, width], 0 where there is none
    real: Tensor  # [B, width] bool
    drawn: Tensor  # [B, width] bool
    p: Tensor  # [B, width + 1, V] f64
    q: Tensor  # [B, width, V] f64

    @property
    def lengths(self) -> Tensor:
        return self.real.sum(1)


def _verify_chains(
    logits: Tensor, drafts: VerifyInputs, sampling: SamplingMetadata, first: Tensor, rows: Tensor, nonfinite: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [B, width + 1], rows [B, width + 1] and counts [B] of chains, by block verification."""
    chains = _chain_rows(logits, drafts, sampling, first, rows, nonfinite)
    accepted, weights = _accept(chains, sampling)
    width, vocabulary = drafts.width, logits.shape[1]
    out = torch.full((len(first), width + 1), -1)
    out[:, :-1] = torch.where(torch.arange(width) < accepted[:, None], chains.tokens, -1)
    ends = chains.rows.gather(1, accepted[:, None])[:, 0]
    last = draw(logits[ends], replace(sampling.take(ends), stream=TARGET, epochs=None)).long()
    stopped = (accepted < chains.lengths).nonzero()[:, 0]
    if len(stopped):
        depth = accepted[stopped]
        rest = residual(chains.p[stopped, depth], chains.q[stopped, depth], weights[stopped, depth])  # [stopped, V]
        gumbel_noise = noise(replace(sampling.take(ends[stopped]), stream=RESIDUAL), vocabulary)
        last[stopped] = (rest.log() + gumbel_noise).argmax(-1)
    columns = torch.arange(width + 1)
    accepted_rows = torch.where(columns <= accepted[:, None], columns, -1)
    return out.scatter(1, accepted[:, None], last[:, None]), accepted_rows, accepted + 1


def _chain_rows(
    logits: Tensor, drafts: VerifyInputs, sampling: SamplingMetadata, first: Tensor, rows: Tensor, nonfinite: Tensor
) -> _Chains:
    width, vocabulary = drafts.width, logits.shape[1]
    row_index = first[:, None] + torch.arange(width + 1).clamp(max=rows[:, None] - 1)
    tokens = drafts.tokens[row_index[:, 1:]].long()
    real = (torch.arange(width) < rows[:, None] - 1) & (tokens >= 0) & (tokens < vocabulary)
    real = (real & ~nonfinite[row_index[:, 1:]]).cumprod(1).bool()
    tokens = torch.where(real, tokens, 0)
    p = probabilities(logits[row_index.flatten()], sampling.take(row_index.flatten())).view(
        *row_index.shape, vocabulary
    )
    drawn, q = _draft_probs(drafts, row_index[:, 1:], tokens, sampling.temperature[row_index[:, :-1]], vocabulary)
    return _Chains(row_index, tokens, real, drawn & real, p, q)


def _accept(chains: _Chains, sampling: SamplingMetadata) -> tuple[Tensor, Tensor]:
    """Return the accepted tokens of each chain [B], and the weights of the residuals [B, width + 1]."""
    p, index = chains.p[:, :-1], chains.tokens[..., None]
    p_token, q_token = p.gather(-1, index)[..., 0], chains.q.gather(-1, index)[..., 0]  # [B, width]
    coins = accept_coins(sampling.take(chains.rows.flatten())).view(chains.rows.shape)[:, :-1]
    weights = torch.ones(chains.rows.shape, dtype=torch.float64)
    passed = (coins <= acceptance(p_token, q_token)) & chains.real
    accepted = passed.cumprod(1).sum(1)
    blocks = chains.drawn.any(1)  # without samples, block verification accepts as much as token by token
    if blocks.any():
        weights = torch.where(blocks[:, None], block_weights(p_token, q_token), weights)
        passed = (coins <= block_acceptance(p, chains.q, weights, chains.lengths)) & chains.real
        longest = torch.where(passed, torch.arange(1, passed.shape[1] + 1), 0).amax(1)
        accepted = torch.where(blocks, longest, accepted)
    return accepted, weights


def _draft_probs(
    drafts: VerifyInputs, row_index: Tensor, tokens: Tensor, temperature: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Return whether each token was sampled [...], and its q [..., V] f64; one-hot if it was not."""
    certain = torch.zeros(*tokens.shape, vocabulary, dtype=torch.float64).scatter(-1, tokens[..., None], 1.0)
    if drafts.logits is None or drafts.drawn is None:
        return torch.zeros_like(tokens, dtype=torch.bool), certain
    drawn = drafts.drawn[row_index].bool() & (temperature > 0)
    warm = torch.where(temperature > 0, temperature, 1.0).flatten()
    q = softmax(without_nan(drafts.logits[row_index.flatten()]), warm).view(certain.shape)
    return drawn, torch.where(drawn[..., None], q, certain)
