"""The second law over Medusa's trees, whose nodes of one depth are all drawn from the same distribution."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
import tiny_medusa
from laws.dice import TOKENS
from laws.test_distribution import excess
from outrider import LLM
from outrider.speculation.drafters.tree_builder import best_first


def speculate(folder: Path, options: str) -> str:
    """Heads that can say the tokens of the law alone."""
    plan = tiny_medusa.Plan(heads=3, seed=2)
    found = tiny_medusa.blocks(plan)
    generator = torch.Generator().manual_seed(1)
    for head in range(plan.heads):
        found[f"lm_heads.{head}.weight"] = 0.1 * torch.randn(
            len(TOKENS), tiny.COMMON["hidden_size"], generator=generator
        )
    tiny_medusa.write(plan, folder, "vllm", found | {"token_map": torch.tensor(TOKENS)})
    return f"medusa:model={folder},{options},adaptive=no"


@pytest.mark.parametrize(
    "options",
    [
        "verify=rejection,draft=probabilistic,width=5,branches=2",
        "verify=rejection,draft=probabilistic,width=9,branches=3,replacement=yes",
        "verify=rejection,draft=probabilistic,tree=0/1/0.0/1.0/1.1",
        "verify=rejection,draft=greedy,width=5,branches=2",
        "verify=exact,draft=probabilistic,width=5,branches=2",
    ],
)
def test_drafted_trees_keep_the_distribution(tiny_folder, tmp_path: Path, options: str) -> None:
    found, length = excess(LLM(str(tiny_folder()), speculate=speculate(tmp_path, options)))
    assert found < 1
    assert length > 1.1


def test_a_tree_shape_that_depends_on_sampled_tokens_breaks_the_distribution(tiny_folder, tmp_path: Path) -> None:
    llm = LLM(
        str(tiny_folder()), speculate=speculate(tmp_path, "verify=rejection,draft=probabilistic,width=3,branches=2")
    )
    medusa = llm.engine.spec_manager.methods["medusa"]

    def most_probable(levels, row: int, width: int):
        def below(path):
            ranks = range(2) if len(path) < len(levels) else ()
            return [((*path, rank), levels[len(path)][1][row][rank]) for rank in ranks]

        return best_first(below(()), below, width)

    medusa.grow = most_probable
    assert excess(llm)[0] > 1
