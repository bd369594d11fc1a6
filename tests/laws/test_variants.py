"""Corners of the first law: drafters with another vocabulary, mask tokens or a short memory; forced acceptance."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import tiny_heads
from laws import oracle
from laws.mix import BASE, PROMPT, visible, with_options
from outrider import SamplingParams
from outrider.speculation.adaptive.latency_model import LatencyModel

SAMPLED = replace(BASE, temperature=0.8, logprobs=4)


@pytest.fixture(scope="module")
def expected(tiny_llm) -> dict[SamplingParams, object]:
    return {params.temperature: visible(tiny_llm().generate(PROMPT, params)[0]) for params in (BASE, SAMPLED)}


def masked(folder: Path) -> dict[str, str]:
    """A draft model whose configuration says that it was trained to read mask tokens."""
    options = tiny_heads.make("draft_model", folder)
    config = Path(options["model"]) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "pard_token": 100}))
    return options


VARIANTS = {
    "strings": lambda folder: ("draft_model", {**tiny_heads.make("draft_model", folder), "vocabulary": "strings"}),
    "other weights": lambda folder: ("draft_model", tiny_heads.make("draft_model", folder, draft="qwen3")),
    "parallel": lambda folder: ("draft_model", masked(folder)),
    "short memory": lambda folder: ("draft_model", {**tiny_heads.make("draft_model", folder), "max_context": 50}),
    "own embedding": lambda folder: ("eagle3", tiny_heads.make("eagle3", folder, own_embedding=True, norm_output=True)),
    "a module for each token": lambda folder: (
        "mtp",
        {**tiny_heads.make("mtp", folder, layout="deepseek", modules=3), "width": 3},
    ),
    "two layers": lambda folder: ("eagle3", tiny_heads.make("eagle3", folder, layers=2, fc_norm=True)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_drafter_keeps_the_text(tiny_llm, tmp_path: Path, expected, variant: str) -> None:
    method, options = VARIANTS[variant](tmp_path)
    for draft in ("greedy", "probabilistic"):
        llm = tiny_llm(speculate=with_options(method, adaptive="no", draft=draft, **options))
        outputs = llm.generate([PROMPT, PROMPT], [BASE, SAMPLED])
        assert [visible(output) for output in outputs] == [expected[0], expected[0.8]]
        assert all(output.stats.speculation.drafted for output in outputs)


def test_a_text_that_outgrows_the_drafter_loses_only_its_speculation(tiny_llm, tmp_path: Path) -> None:
    options = {**tiny_heads.make("draft_model", tmp_path), "max_context": 50}
    llm = tiny_llm(speculate=with_options("draft_model", adaptive="no", **options))
    params = replace(BASE, max_tokens=30)
    long, short = llm.generate([PROMPT, PROMPT[:20]], [params, params])
    assert [visible(one) for one in (long, short)] == [
        visible(one) for one in llm.generate([PROMPT, PROMPT[:20]], replace(params, speculate=False))
    ]
    # The draft is the target itself, so every step that drafts keeps all of it.
    assert long.stats.speculation.tokens_per_step < 2 < short.stats.speculation.tokens_per_step


@pytest.mark.parametrize(("rates", "length"), [("1/1/1", 4.0), ("0/0/0", 1.0), ("1/0/0", 2.0)])
def test_a_forced_rate_is_kept_whatever_the_drafts_are(tiny_llm, rates: str, length: float) -> None:
    oracle.TEXTS[tuple(PROMPT)] = [7] * 60
    llm = tiny_llm(speculate=f"laws.oracle:width=3,wrong=2,verify=synthetic,rates={rates}")
    output = llm.generate(PROMPT, replace(BASE, max_tokens=41))[0]
    spec_stats = output.stats.speculation
    # The first step has no draft yet, and the last one has room for less.
    assert spec_stats.accepted == pytest.approx((spec_stats.steps - 1) * (length - 1), abs=3)


def test_the_width_may_depend_on_how_many_run(tiny_llm) -> None:
    oracle.TEXTS[tuple(PROMPT)] = [7] * 60
    config = {
        "method": "laws.oracle",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 8, 1]],
    }
    llm = tiny_llm(speculative_config=config)
    cost = llm.engine.spec_manager.controller.latency = LatencyModel()  # as if further tokens were free
    for requests in (1, 2):
        cost.observe(requests, 0, 1.0)
        cost.observe(requests, 4, 1.0)
    cost.observe = lambda *_: None
    alone = llm.generate(PROMPT, BASE)[0].stats.speculation
    beside = llm.generate([PROMPT, PROMPT[:9]], [BASE, replace(BASE, speculate=False)])[0].stats.speculation
    assert len(alone.drafted_per_depth) == 4 and len(beside.drafted_per_depth) == 1
