"""Trees as lists of paths: by their definition, path after path from scratch, and as drafters list them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from fake_target import Stage
from test_autoregressive import Same
from torch import Tensor

import tiny
from outrider.kernels import Kernels, load
from outrider.models import Model, build
from outrider.request import Request
from outrider.speculation import DraftBatch, DraftContext
from outrider.speculation.drafters.autoregressive import Autoregressive

WIDTH, BRANCHES, LEVELS = 9, 3, 4
Oracle = Callable[[Sequence[int]], Tensor]  # drafted tokens -> logits [V] of what comes after them


class Leaf(NamedTuple):
    path: tuple[int, ...]
    log_prob: float


def play(ops: Kernels, context: int = 128, shape: Sequence[int] = (WIDTH, BRANCHES, LEVELS), **options: Any) -> Stage:
    """A stage whose drafter is the target itself; it grows trees of that shape."""
    stage = Stage(ops, pages=80, **options)
    width, branches, levels = shape
    stage.begin(Autoregressive(Same(stage, context), stage.target, width, branches=branches, max_depth=levels))
    return stage


@functools.cache
def swift() -> Model:
    """The target on the quicker backend: nearly the same numbers."""
    return build(tiny.checkpoint("llama"), load("cpu"))


def after(request: Request, model: Model | None = None) -> Oracle:
    """From scratch, each path by itself."""
    text = request.prompt + request.output
    return lambda path: tiny.run(model or swift(), [*text, *path], chunk=200)[0][-1]


def forest(
    oracle: Oracle, width: int, branches: int = BRANCHES, levels: int = LEVELS, floor: float = 0.0
) -> list[Leaf]:
    """EAGLE-2 by its definition: expand the best of each level, then take the best of everything that was seen."""
    found: list[Leaf] = []
    level = [Leaf((), 0.0)]
    for _ in range(levels):
        children = []
        for leaf in level:
            shares = torch.log_softmax(oracle(leaf.path).double(), -1)
            for token in shares.argsort(descending=True)[:branches].tolist():
                children.append(Leaf((*leaf.path, token), leaf.log_prob + float(shares[token])))
        children = [leaf for leaf in children if math.exp(leaf.log_prob) >= floor]
        found += children
        level = sorted(children, key=lambda leaf: -leaf.log_prob)[:branches]
    return sorted(found, key=lambda leaf: -leaf.log_prob)[:width]


def leaves(draft: DraftBatch | None, row: int) -> list[Leaf]:
    """A row of a draft; parents come first."""
    assert draft is not None
    tokens = draft.drafts()[row].tokens
    if not tokens:
        return []
    assert draft.parents is not None and draft.confidence is not None
    found: list[Leaf] = []
    for token, parent, share in zip(tokens, draft.drafts()[row].parents, draft.confidence[row], strict=True):
        assert -1 <= parent < len(found)
        before = found[parent] if parent >= 0 else Leaf((), 0.0)
        found.append(Leaf((*before.path, token), before.log_prob + math.log(share)))
    return found


def assert_tree(draft: DraftBatch | None, row: int, expected: Sequence[Leaf]) -> None:
    found = leaves(draft, row)
    assert [leaf.path for leaf in found] == [leaf.path for leaf in expected]
    assert [leaf.log_prob for leaf in found] == pytest.approx([leaf.log_prob for leaf in expected], abs=1e-4)


def context(stage: Stage, request: Request, width: int, floor: float = 0.0) -> DraftContext:
    """The prompt has run, and the target said 9."""
    stage.reach(request, request.length + WIDTH + 5)
    stage.run([(request.prompt, 0, request.pages)])
    return DraftContext(request, 0, request.length, [9], width, 0, floor)


def propose(stage: Stage, *contexts: DraftContext) -> DraftBatch:
    last = torch.tensor([9] * len(contexts), dtype=torch.int32)
    return stage.proposer.propose(contexts, last, None)
