"""Draft logits that are not finite change no text: their tokens are ignored, counted, and reported once.

A head may give NaN or infinite logits because its weights are damaged or overflow their type. Under `rejection` and
`block` such logits are no distribution that a token could be verified against.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny_heads
from backends import backends
from laws.mix import BASE, PROMPT, visible, with_options
from laws.test_graphs import HEADS, TREES
from laws.test_multi_step_runs import count
from outrider.models.heads import MedusaHeads
from outrider.speculation.drafters.chain_builder import ChainBuilder
from outrider.speculation.drafters.tree_builder import TreeBuilder

FAST = pytest.mark.parametrize("tiny_llm", backends("cpu"), indirect=True)
WRONG = {"one nan": (5, torch.nan), "one inf": (5, torch.inf), "nan": (..., torch.nan), "banned": (..., -torch.inf)}
MODES = ("rejection", "block")
PARAMS = [
    replace(BASE, temperature=1.0),
    replace(BASE, temperature=1.2, top_k=9, top_p=0.9, min_p=0.05, seed=8),
    replace(BASE, temperature=0.7, seed=9),
]
PROMPTS = [PROMPT, PROMPT[:11], PROMPT[3:33]]


def plant(patch: pytest.MonkeyPatch, wrong: list[str], depths: tuple[int, ...]) -> None:
    """Damage the logits that chains and trees sample from at these depths; wrong: how, its last item."""

    def damaged(logits: Tensor) -> Tensor:
        at, value = WRONG[wrong[-1]]
        logits = logits.clone()
        logits[:, at] = value
        return logits

    put_chain, put_tree, medusa_logits = ChainBuilder.put, TreeBuilder.put, MedusaHeads.logits

    def chain(self, depth, logits, confidence=None):  # type: ignore[no-untyped-def]
        return put_chain(self, depth, damaged(logits) if depth in depths else logits, confidence)

    def tree(self, parents, depth, logits, ids=None):  # type: ignore[no-untyped-def]
        return put_tree(self, parents, depth, damaged(logits) if depth in depths else logits, ids)

    def medusa(self, hidden, count):  # type: ignore[no-untyped-def]
        for depth, logits in enumerate(medusa_logits(self, hidden, count)):
            yield damaged(logits) if depth in depths else logits

    patch.setattr(MedusaHeads, "logits", medusa)
    patch.setattr(ChainBuilder, "put", chain)
    patch.setattr(TreeBuilder, "put", tree)


def speculate(name: str, folder: Path, verify: str, **options: object) -> str:
    method = TREES.get(name, name)
    options |= {"branches": 2, "width": 5} if name in TREES else {"width": 3}
    made = tiny_heads.make(method, folder)
    return with_options(method, **{**made, "draft": "probabilistic", "verify": verify, **options})


@FAST
@pytest.mark.parametrize(
    ("name", "verify"), [*((name, mode) for name in HEADS for mode in MODES), *((name, "rejection") for name in TREES)]
)
def test_a_head_without_finite_logits_gives_the_text_of_plain_decoding(
    tiny_llm, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, verify: str
) -> None:
    wrong = list(WRONG)
    plant(monkeypatch, wrong, tuple(range(9)))
    llm = tiny_llm(speculate=speculate(name, tmp_path, verify, adaptive="no"))
    expected = llm.generate(PROMPTS, [replace(params, speculate=False) for params in PARAMS])
    while wrong:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [visible(one) for one in outputs] == [visible(one) for one in expected], wrong[-1]
        for stats in (one.stats.speculation for one in outputs):
            assert 0 < stats.drafted == stats.nonfinite and stats.accepted == 0, wrong[-1]
        wrong.pop()
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f"`{TREES.get(name, name)}` drafts from logits that are not finite" in warning.getMessage()


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ["eagle3", "dspark", "medusa"])
@pytest.mark.parametrize("verify", MODES)
def test_tokens_before_nonfinite_logits_are_accepted_in_every_kind_of_step(
    tiny_llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, verify: str
) -> None:
    """The tokens after them are ignored as well, by the host's steps and in multi-step runs."""
    plant(monkeypatch, ["one nan"], (1,))
    given = speculate(name, tmp_path, verify, adaptive="no")
    stepwise, runs = (tiny_llm(speculate=given, decode_steps=steps) for steps in (1, 4))
    expected, found = (llm.generate(PROMPTS, PARAMS) for llm in (stepwise, runs))
    assert [visible(one) for one in found] == [visible(one) for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert count(one) == count(other)
        stats = other.stats.speculation
        assert len(stats.accepted_per_depth) == 3 and sum(stats.accepted_per_depth[1:]) == 0
        assert stats.nonfinite == stats.drafted_per_depth[1]
        assert one.stats.speculation.nonfinite >= stats.nonfinite  # a run may go on behind the end of a text
    assert sum(one.stats.speculation.accepted for one in expected) > 0


@FAST
def test_a_head_without_finite_logits_is_soon_not_asked(
    tiny_llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, ["nan"], (0,))
    llm = tiny_llm(speculate=speculate("eagle3", tmp_path, "rejection", adaptive="yes"))
    output = llm.generate(PROMPT, replace(PARAMS[0], max_tokens=60, seed=None))[0]  # a seed keeps the width
    stats = output.stats.speculation
    assert stats.accepted == 0 and stats.widths[0] > 30


@FAST
def test_greedy_drafts_need_no_distribution(tiny_llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At temperature 0, and under `draft=greedy`, the argmax counts: NaN is never the largest."""
    plant(monkeypatch, ["one nan"], (0, 1, 2))
    llm = tiny_llm(speculate=speculate("eagle3", tmp_path, "rejection", adaptive="no"))
    output = llm.generate(PROMPT, BASE)[0]
    assert visible(output) == visible(llm.generate(PROMPT, replace(BASE, speculate=False))[0])
    assert output.stats.speculation.drafted > 0 == output.stats.speculation.nonfinite
