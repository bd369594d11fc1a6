"""The invariants hold for what single architectures add to a layer: soft caps, partial rotary, no rope, other norms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laws import oracle
from laws.mix import BASE, PROMPT, visible, with_options

# What differs from a Llama, and the tiny model that has it.
FEATURES = {
    "soft caps and two norms around each block": "gemma2",
    "partial rotary, LongRoPE, fused projections": "phi3-long",
    "layers without rope": "smollm3-window",
    "norms behind each block and over all heads": "olmo2",
    "multipliers": "granite",
    "YaRN": "qwen2-yarn",
    "sinks, biases of experts, clamped activation": "gpt-oss",
}
SAMPLED = replace(BASE, temperature=0.8, logprobs=100)
DRAFTS = {
    "chain": {"wrong": 3, "width": 5},
    "tree": {"wrong": 4, "width": 8, "branches": 2},
}


@pytest.fixture(scope="module", params=FEATURES)
def model(request: pytest.FixtureRequest) -> str:
    return FEATURES[request.param]


@pytest.fixture(scope="module")
def alone(tiny_llm, model: str) -> object:
    """What plain decoding answers to one request; the oracle drafts from it."""
    output = tiny_llm(model, prefix_cache=False).generate(PROMPT, SAMPLED)[0]
    oracle.TEXTS[tuple(PROMPT)] = output.completions[0].token_ids
    return visible(output)


@pytest.mark.parametrize("shape", DRAFTS)
def test_drafts_change_no_bit(tiny_llm, model: str, alone, shape: str) -> None:
    llm = tiny_llm(model, speculate=with_options("laws.oracle", adaptive="false", **DRAFTS[shape]))
    output = llm.generate(PROMPT, SAMPLED)[0]
    assert visible(output) == alone
    assert 0 < output.stats.speculation.accepted < output.stats.speculation.drafted


def test_neighbours_chunks_and_cached_prefixes_change_no_bit(tiny_llm, model: str, alone) -> None:
    llm = tiny_llm(model, max_step_tokens=9)
    prompts = [PROMPT[:7], PROMPT, PROMPT[3:30]]
    for _ in range(2):  # cold, then with the prompt in the prefix cache
        output = llm.generate(prompts, [BASE, SAMPLED, replace(BASE, temperature=0.5)])[1]
        assert visible(output) == alone
    assert output.stats.cached_tokens >= 16


def test_a_text_in_few_pages_behind_its_windows_keeps_every_bit(tiny_llm) -> None:
    """All layers of a Mistral have a window, so that a cache of 96 tokens serves a text of 100."""
    params = replace(SAMPLED, max_tokens=60)
    expected = tiny_llm("mistral").generate(PROMPT, params)[0]
    for drafts in ({}, {"speculate": "ngram:adaptive=false"}):
        llm = tiny_llm("mistral", cache_tokens=16 * 6, max_step_tokens=8, **drafts)
        output = llm.generate(PROMPT, params)[0]
        assert visible(output) == visible(expected)
        llm.engine.scheduler.check()
