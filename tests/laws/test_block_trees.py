"""Rejection sampling over the trees of block heads: every Markov kind, every verification mode, exact probabilities.

A child is sampled given its parent's token (DSpark) or given its depth alone (DFlash).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny_blocks
from laws.dice import TOKENS
from laws.test_distribution import SAMPLES, excess
from outrider import LLM


class Plan(tiny_blocks.Plan):
    """A head whose draft vocabulary is `TOKENS`."""

    @property
    def ids(self) -> Tensor:
        return torch.tensor(TOKENS)


PLANS = {
    "dflash": Plan(draft_vocabulary=len(TOKENS)),
    "dspark": Plan(method="dspark", draft_vocabulary=len(TOKENS)),
    "dspark gated": Plan(method="dspark", markov="gated", draft_vocabulary=len(TOKENS)),
    "dspark rnn": Plan(method="dspark", markov="rnn", from_anchor=False, draft_vocabulary=len(TOKENS)),
}
SAMPLED = "verify=rejection,draft=probabilistic"
LONG = (f"{SAMPLED},width=5,branches=2", f"{SAMPLED},width=9,branches=3,replacement=yes")
SHORT = (
    "verify=rejection,draft=greedy,width=5,branches=2",
    "verify=exact,draft=probabilistic,width=5,branches=2",
    "verify=block,draft=probabilistic,width=3",  # chains: block verification refuses trees
)
FEW = 500  # answers: enough to detect a shape that depends on sampled tokens, which needs 350


def engine(model: Path, folder: Path, name: str, options: str) -> LLM:
    plan = PLANS[name]
    head = tiny_blocks.write(plan, folder)["model"]
    return LLM(str(model), speculate=f"{plan.method}:model={head},{options},adaptive=no")


@pytest.mark.parametrize(
    ("name", "options", "samples"),
    [
        *((name, LONG[0], SAMPLES) for name in ("dflash", "dspark", "dspark rnn")),
        *((name, LONG[1], SAMPLES) for name in ("dflash", "dspark")),
        ("dspark gated", LONG[0], FEW),
        ("dspark gated", LONG[1], FEW),
        ("dspark rnn", LONG[1], FEW),
        *((name, options, FEW) for name in PLANS for options in SHORT),
    ],
)
def test_drafts_of_block_heads_keep_the_distribution(
    tiny_folder, tmp_path: Path, name: str, options: str, samples: int
) -> None:
    largest, mean_length = excess(engine(tiny_folder(), tmp_path, name, options), samples)
    assert largest < 1
    assert mean_length > 1.1


def test_a_tree_shape_that_depends_on_sampled_tokens_breaks_the_distribution(tiny_folder, tmp_path: Path) -> None:
    llm = engine(tiny_folder(), tmp_path, "dspark", f"{SAMPLED},width=3,branches=2")
    llm.engine.spec_manager.methods["dspark"].shape = None  # the tree grows where the most probable tokens are
    assert excess(llm)[0] > 1
