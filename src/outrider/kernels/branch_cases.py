"""The cases of several tokens after one: branch, and the rejection of trees. See cases.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Generator, Tensor, inf, nan

from . import Kernels, SamplingMetadata, VerifyInputs
from . import inputs as make
from .case import Case, Run, listed, pick
from .verify_cases import CHAINS, SETTINGS, TREES, draw_choice, make_drafts, results, rows_of, take_drafts

# Fifteen guesses: three, then two each, then one each.
BUSH = [-1, *[0] * 3, *[1] * 2, *[2] * 2, *[3] * 2, 4, 5, 6, 7, 8, 9]


def branch(name: str, count: int, rows: int, vocabulary: int, timed: bool = False) -> Case:
    """Items are rows of logits."""
    settings = [{"temperature": 0.0}] * rows if name == "greedy" else [SETTINGS[at % 7] for at in range(rows)]

    def build(ops: Kernels, seed: int) -> Run:
        logits = 2.5 * make.normal(make.generator(seed), rows, vocabulary)  # [R, V]
        if name == "ties":
            logits = logits.round()
        if name == "banned":
            logits[:, 5:] = -inf
            logits[3], logits[4, :3], logits[5, 2] = -inf, nan, inf
        choice = make.make_choice(settings, seed)

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            part = choice if items is None else choice.take(list(items))
            found = ops.branch(pick(logits, items), part, count)
            return found.tokens, found.logprobs

        return run

    size = rows * vocabulary * 4
    return Case("branch", f"{name}, {count} of {rows}x{vocabulary}", rows, 1e-5, build, size, timed)


def _drawn_trees(
    random: Generator, kind: str, trees: Sequence[Sequence[int]], logits: Tensor, choice: SamplingMetadata, again: bool
) -> VerifyInputs:
    """Guesses near the target's: siblings are drawn from their parent's logits, blurred, and so share a row."""
    vocabulary = logits.shape[1]
    drafts = make_drafts(trees, [[-1] * len(each) for each in trees])
    blurred = logits + 0.7 * make.normal(random, *logits.shape)  # [R, V]
    guesses, tokens = blurred.clone(), drafts.tokens.clone()
    for request, first in enumerate(drafts.starts[:-1].tolist()):
        warm = float(choice.temperature[request].clamp(min=0.05))
        for parent in set(trees[request]) - {-1}:
            own = [first + row for row, each in enumerate(trees[request]) if each == parent]
            share = torch.softmax(blurred[first + parent] / warm, -1)
            guesses[own] = blurred[first + parent]
            count = len(own) if again else min(len(own), int((share > 0).sum()))  # placeholders where that is fewer
            tokens[own[:count]] = torch.multinomial(share, count, again, generator=random).int()
    drawn = torch.ones_like(tokens, dtype=torch.uint8)
    if kind == "mixed":
        drawn[2::3] = 0
    if kind == "placeholders":
        tokens[4::7], tokens[6::11] = -1, vocabulary
    known = kind != "certain"
    tokens = torch.where(drafts.parents < 0, -1, tokens)
    return replace(drafts, tokens=tokens, logits=guesses if known else None, drawn=drawn if known else None)


def reject(
    kind: str, again: bool, vocabulary: int, trees: Sequence[Sequence[int]] = TREES, timed: bool = False
) -> Case:
    """Items are requests."""

    def build(ops: Kernels, seed: int) -> Run:
        random = make.generator(seed)
        logits = 3.5 * make.normal(random, sum(map(len, trees)), vocabulary)  # [R, V]
        choice = draw_choice(len(trees), seed)
        drafts = _drawn_trees(random, kind, trees, logits, choice, again)

        def run(items: Sequence[int] | None) -> tuple[Tensor, ...]:
            at = listed(items, len(trees))
            part = take_drafts(drafts, at)
            wide = ops.expand(choice.take(at), part)
            return results(ops.reject(logits[rows_of(drafts, at)], part, wide, False, again))

        return run

    name = f"trees {'with' if again else 'without'} replacement, {kind}, {len(trees)} of {vocabulary}"
    size = sum(map(len, trees)) * vocabulary * 8
    return Case("reject", name, len(trees), 0.0, build, size, timed)


def _rejections() -> list[Case]:
    found = [
        reject(kind, again, 1000, TREES * 3 + CHAINS)
        for again in (False, True)
        for kind in ("drawn", "certain", "mixed", "placeholders")
    ]
    found += [reject("drawn", False, size, [*TREES, BUSH]) for size in (1, 2, 7, 65, 8193)]
    found.append(reject("mixed", False, 151_936, [TREES[3], TREES[5]]))
    found.append(reject("drawn", False, 49_152, [BUSH], timed=True))
    return found


def _all() -> list[Case]:
    return [
        *[branch(name, count, 14, 1000) for name in ("mixture", "greedy", "ties", "banned") for count in (1, 8)],
        *[branch("mixture", count, 9, 77) for count in (0, 63, 64, 78)],
        branch("mixture", 4, 7, 2),
        branch("mixture", 64, 3, 8193),
        branch("mixture", 8, 8, 49_152, timed=True),
        branch("greedy", 8, 1, 49_152, timed=True),
        branch("warm", 8, 1, 49_152, timed=True),
        *_rejections(),
    ]


BRANCH_CASES = _all()
