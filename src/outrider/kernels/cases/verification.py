"""Cases of verification: exact, synthetic, by rejection. Items are requests. See case.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Generator, Tensor

from ..protocol import Kernels
from ..structures import SamplingMetadata, VerifyInputs, VerifyOutput
from . import inputs as make
from .case import Case, Run, listed

# Parents of each request's rows: no draft, chains, two branches, a bush, a tree whose second branch is the deep one.
TREES = [[-1], [-1, 0], [-1, 0, 1, 2], [-1, 0, 0, 1, 1, 2, 2], [-1, 0, 0, 0, 0], [-1, 0, 0, 2, 3, 4, 1], [-1, 0, 1]]
CHAINS = [[*range(-1, length)] for length in (4, 0, 3, 4, 1, 2, 4, 4, 3, 4, 2, 4)]
# Fifteen drafted tokens: three, then two each, then one each.
BUSH = [-1, *[0] * 3, *[1] * 2, *[2] * 2, *[3] * 2, 4, 5, 6, 7, 8, 9]


def make_drafts(parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> VerifyInputs:
    """Requests of parents (counted from the request's first row) and tokens, -1 in the first row."""
    counts = torch.tensor([0, *map(len, parents)])
    return VerifyInputs(
        starts=counts.cumsum(0).to(torch.int32),
        tokens=torch.tensor([token for tree in tokens for token in tree], dtype=torch.int32),
        parents=torch.tensor([parent for tree in parents for parent in tree], dtype=torch.int32),
        width=max(map(len, parents), default=1) - 1,
    )


def rows_of(drafts: VerifyInputs, requests: Sequence[int]) -> list[int]:
    starts = drafts.starts.tolist()
    return [row for request in requests for row in range(starts[request], starts[request + 1])]


def take_drafts(drafts: VerifyInputs, requests: Sequence[int]) -> VerifyInputs:
    """These requests alone, at the same width."""
    rows = rows_of(drafts, requests)
    counts = torch.cat([torch.zeros(1), drafts.starts.diff()[list(requests)]])
    return replace(
        drafts,
        starts=counts.cumsum(0).to(torch.int32),
        tokens=drafts.tokens[rows],
        parents=drafts.parents[rows],
        logits=None if drafts.logits is None else drafts.logits[rows],
        drawn=None if drafts.drawn is None else drafts.drawn[rows],
    )


def _random_tokens(random: Generator, parents: Sequence[Sequence[int]], vocabulary: int) -> list[list[int]]:
    return [
        [-1, *torch.randint(0, vocabulary, (len(tree) - 1,), generator=random).tolist()] if tree else []
        for tree in parents
    ]


def draw_sampling(count: int, seed: int) -> SamplingMetadata:
    sampling = make.make_sampling(
        [make.REQUEST_SETTINGS[index % len(make.REQUEST_SETTINGS)] for index in range(count)], seed
    )
    return replace(sampling, epochs=sampling.positions // 2 + 1)


def results(kept: VerifyOutput) -> tuple[Tensor, ...]:
    return kept.tokens, kept.rows, kept.counts


def expand_sampling(epochs: bool) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        drafts = make_drafts(TREES, _random_tokens(make.generator(seed), TREES, 50))
        sampling = draw_sampling(len(TREES), seed)
        sampling = sampling if epochs else replace(sampling, epochs=None)

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            indices = listed(items, len(TREES))
            part = take_drafts(drafts, indices)
            wide = ops.expand_sampling(sampling.take(indices), part)
            columns = [value for value in vars(wide).values() if isinstance(value, Tensor)]
            return tuple(_padded(column, part) for column in columns)

        return run

    return Case("expand_sampling", "with epochs" if epochs else "without epochs", len(TREES), 0.0, build)


def _padded(column: Tensor, drafts: VerifyInputs) -> Tensor:
    """[R] as [B, width + 1], zeros after a request's last row."""
    out = column.new_zeros(drafts.starts.shape[0] - 1, drafts.width + 1)
    for request, (first, end) in enumerate(pairwise(drafts.starts.tolist())):
        out[request, : end - first] = column[first:end]
    return out


def verify_exact(vocabulary: int) -> Case:
    """Draft from few ids, so that many drafted tokens are accepted."""

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        trees = TREES * 6
        drafts = make_drafts(trees, _random_tokens(random, trees, vocabulary))
        drafts.tokens[20::29] = -1
        sampled = torch.randint(0, vocabulary, drafts.tokens.shape, dtype=torch.int32, generator=random)

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            indices = listed(items, len(trees))
            return results(ops.verify_exact(sampled[rows_of(drafts, indices)], take_drafts(drafts, indices)))

        return run

    return Case("verify_exact", f"trees of {vocabulary} ids", 6 * len(TREES), 0.0, build)


def match_logits(vocabulary: int, width: int) -> Case:
    """Exact verification end to end: sample each row, then verify."""

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        logits = 2.5 * make.normal(random, width + 1, vocabulary)  # [R, V]
        settings: list[dict[str, float]] = [{"temperature": 0.0}]
        sampling = make.make_sampling(settings, seed)
        tokens = [-1, *logits[:-1].argmax(-1).tolist()]
        drafts = make_drafts([[*range(-1, width)]], [tokens])
        return lambda _: results(ops.verify_exact(ops.sample(logits, ops.expand_sampling(sampling, drafts)), drafts))

    size = (width + 1) * vocabulary * 4
    return Case("verify_exact", f"greedy, {width} of {vocabulary}", 1, 0.0, build, size, timed=True)


def verify_synthetic(name: str, rates: Sequence[float]) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        trees = TREES * 4
        drafts = make_drafts(trees, _random_tokens(random, trees, 50))
        drafts.tokens[20::29] = -1
        sampled = torch.randint(0, 50, drafts.tokens.shape, dtype=torch.int32, generator=random)
        bounds, sampling = torch.tensor(rates), draw_sampling(len(trees), seed)

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            indices = listed(items, len(trees))
            part = take_drafts(drafts, indices)
            return results(
                ops.verify_synthetic(
                    sampled[rows_of(drafts, indices)], part, bounds, ops.expand_sampling(sampling.take(indices), part)
                )
            )

        return run

    return Case("verify_synthetic", name, 4 * len(TREES), 0.0, build)


def _plant_nonfinite(logits: Tensor) -> None:
    """Make some rows no distributions: one NaN, one +inf, nothing but -inf or NaN. A few -inf are allowed."""
    logits[1::5, -1], logits[3::7, 0], logits[5::11], logits[8::17] = torch.nan, torch.inf, -torch.inf, torch.nan
    logits[2::5, ::3] = -torch.inf


def _rejection_results(kept: VerifyOutput) -> tuple[Tensor, ...]:
    assert kept.nonfinite is not None
    return *results(kept), kept.nonfinite


def _drawn_drafts(
    random: Generator, kind: str, chains: Sequence[Sequence[int]], logits: Tensor, sampling: SamplingMetadata
) -> VerifyInputs:
    """Sample drafts near the target: each token from the previous row's logits plus noise."""
    vocabulary = logits.shape[1]
    drafts = make_drafts(chains, [[-1] * len(chain) for chain in chains])
    owners = torch.repeat_interleave(torch.arange(len(chains)), drafts.starts.diff())
    noisy_logits = logits.roll(1, 0) + 0.7 * make.normal(random, *logits.shape)  # [R, V]
    temperature = sampling.temperature[owners].clamp(min=0.05)[:, None]
    tokens = torch.multinomial(torch.softmax(noisy_logits / temperature, -1), 1, generator=random)[:, 0].int()
    if kind == "certain":
        tokens = noisy_logits.argmax(-1).int()
    if kind == "placeholders":
        tokens[4::7], tokens[6::11] = -1, vocabulary
    tokens = torch.where(drafts.parents < 0, -1, tokens)
    drawn = torch.ones_like(tokens, dtype=torch.uint8)
    if kind == "mixed":
        drawn[2::3] = 0
    if kind == "nonfinite":
        drawn[7::9] = 0
        _plant_nonfinite(noisy_logits)
    with_logits = kind != "certain"
    return replace(
        drafts, tokens=tokens, logits=noisy_logits if with_logits else None, drawn=drawn if with_logits else None
    )


def verify_rejection(
    kind: str, block: bool, vocabulary: int, chains: Sequence[Sequence[int]] = CHAINS, timed: bool = False
) -> Case:
    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        logits = 3.5 * make.normal(random, sum(map(len, chains)), vocabulary)  # [R, V]
        sampling = draw_sampling(len(chains), seed)
        drafts = _drawn_drafts(random, kind, chains, logits, sampling)

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            indices = listed(items, len(chains))
            part = take_drafts(drafts, indices)
            wide = ops.expand_sampling(sampling.take(indices), part)
            return _rejection_results(ops.verify_rejection(logits[rows_of(drafts, indices)], part, wide, block))

        return run

    name = f"{'block' if block else 'token'}, {kind}, {len(chains)} of {vocabulary}"
    size = sum(map(len, chains)) * vocabulary * 8
    return Case("verify_rejection", name, len(chains), 0.0, build, size, timed)


def _drawn_trees(
    random: Generator,
    kind: str,
    trees: Sequence[Sequence[int]],
    logits: Tensor,
    sampling: SamplingMetadata,
    with_replacement: bool,
) -> VerifyInputs:
    """Sample drafts near the target: siblings from their parent's logits plus noise, which they share."""
    vocabulary = logits.shape[1]
    drafts = make_drafts(trees, [[-1] * len(tree) for tree in trees])
    noisy_logits = logits + 0.7 * make.normal(random, *logits.shape)  # [R, V]
    draft_logits, tokens = noisy_logits.clone(), drafts.tokens.clone()
    for request, first in enumerate(drafts.starts[:-1].tolist()):
        warm = float(sampling.temperature[request].clamp(min=0.05))
        for parent in set(trees[request]) - {-1}:
            own = [first + row for row, above in enumerate(trees[request]) if above == parent]
            share = torch.softmax(noisy_logits[first + parent] / warm, -1)
            draft_logits[own] = noisy_logits[first + parent]
            count = (
                len(own) if with_replacement else min(len(own), int((share > 0).sum()))
            )  # placeholders where that is fewer
            tokens[own[:count]] = torch.multinomial(share, count, with_replacement, generator=random).int()
    drawn = torch.ones_like(tokens, dtype=torch.uint8)
    if kind == "mixed":
        drawn[2::3] = 0
    if kind == "placeholders":
        tokens[4::7], tokens[6::11] = -1, vocabulary
    if kind == "nonfinite":
        _plant_nonfinite(draft_logits)
    with_logits = kind != "certain"
    tokens = torch.where(drafts.parents < 0, -1, tokens)
    return replace(
        drafts, tokens=tokens, logits=draft_logits if with_logits else None, drawn=drawn if with_logits else None
    )


def reject_tree(
    kind: str, with_replacement: bool, vocabulary: int, trees: Sequence[Sequence[int]] = TREES, timed: bool = False
) -> Case:
    """Items are requests."""

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        logits = 3.5 * make.normal(random, sum(map(len, trees)), vocabulary)  # [R, V]
        sampling = draw_sampling(len(trees), seed)
        drafts = _drawn_trees(random, kind, trees, logits, sampling, with_replacement)

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            indices = listed(items, len(trees))
            part = take_drafts(drafts, indices)
            wide = ops.expand_sampling(sampling.take(indices), part)
            own = logits[rows_of(drafts, indices)]
            return _rejection_results(ops.verify_rejection(own, part, wide, False, with_replacement))

        return run

    name = f"trees {'with' if with_replacement else 'without'} replacement, {kind}, {len(trees)} of {vocabulary}"
    size = sum(map(len, trees)) * vocabulary * 8
    return Case("verify_rejection", name, len(trees), 0.0, build, size, timed)


def _all() -> list[Case]:
    found = [expand_sampling(True), expand_sampling(False), verify_exact(2), verify_exact(50), match_logits(49_152, 4)]
    found += [verify_synthetic("half", [0.5] * 6), verify_synthetic("falling", [0.9, 0.8, 0.5, 0.3, 0.2, 0.1])]
    found += [verify_synthetic("all", [1.0] * 6), verify_synthetic("none", [0.0] * 6)]
    for block in (False, True):
        found += [
            verify_rejection(kind, block, 1000, CHAINS * 3)
            for kind in ("drawn", "certain", "mixed", "placeholders", "nonfinite")
        ]
        found += [verify_rejection("drawn", block, size, CHAINS[:4]) for size in (7, 100, 8193)]
        found += [verify_rejection("nonfinite", block, size, CHAINS[:4]) for size in (100, 4097)]
        found.append(verify_rejection("drawn", block, 151_936, CHAINS[4:6]))
        found.append(verify_rejection("drawn", block, 49_152, CHAINS[:1], timed=True))
    found += _tree_cases()
    return found


def _tree_cases() -> list[Case]:
    found = [
        reject_tree(kind, with_replacement, 1000, TREES * 3 + CHAINS)
        for with_replacement in (False, True)
        for kind in ("drawn", "certain", "mixed", "placeholders", "nonfinite")
    ]
    found += [reject_tree("drawn", False, size, [*TREES, BUSH]) for size in (1, 2, 7, 65, 8193)]
    found += [reject_tree("nonfinite", again, 65, [*TREES, BUSH]) for again in (False, True)]
    found.append(reject_tree("mixed", False, 151_936, [TREES[3], TREES[5]]))
    found.append(reject_tree("drawn", False, 49_152, [BUSH], timed=True))
    return found


VERIFY_CASES = _all()
