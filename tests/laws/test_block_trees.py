"""The second law over the trees of block heads: a child is drawn by its parent's token, or by its depth alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny_blocks
from laws.dice import TOKENS
from laws.test_distribution import excess
from outrider import LLM


class Plan(tiny_blocks.Plan):
    """A head that can say the tokens of the law alone."""

    @property
    def ids(self) -> Tensor:
        return torch.tensor(TOKENS)


PLANS = {
    "dflash": Plan(draft_vocabulary=len(TOKENS)),
    "dspark": Plan(method="dspark", draft_vocabulary=len(TOKENS)),
    "dspark with a memory": Plan(method="dspark", markov="rnn", from_anchor=False, draft_vocabulary=len(TOKENS)),
}
DRAWN = "verify=rejection,draft=probabilistic"


def engine(model: Path, folder: Path, name: str, options: str) -> LLM:
    plan = PLANS[name]
    given = tiny_blocks.write(plan, folder)["model"]
    return LLM(str(model), speculate=f"{plan.method}:model={given},{options},adaptive=no")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, f"{DRAWN},width=5,branches=2") for name in PLANS),
        *((name, f"{DRAWN},width=9,branches=3,replacement=yes") for name in ("dflash", "dspark")),
        ("dspark", "verify=rejection,draft=greedy,width=5,branches=2"),
        ("dspark", "verify=exact,draft=probabilistic,width=5,branches=2"),
    ],
)
def test_answers_after_trees_follow_the_target(tiny_folder, tmp_path: Path, name: str, options: str) -> None:
    found, length = excess(engine(tiny_folder(), tmp_path, name, options))
    assert found < 1
    assert length > 1.1


def test_a_tree_that_looks_at_what_was_drawn_breaks_the_law(tiny_folder, tmp_path: Path) -> None:
    llm = engine(tiny_folder(), tmp_path, "dspark", f"{DRAWN},width=3,branches=2")
    llm.engine.spec_manager.methods["dspark"].shape = None  # it goes where the likeliest tokens are
    assert excess(llm)[0] > 1
