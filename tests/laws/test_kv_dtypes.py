"""The laws hold over quantized keys and values: against plain decoding with the same format, to the bit.

The reference takes minutes for all of it. What it computes is compared with the other backends instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import tiny_heads
from backends import backends, settings
from laws.mix import MIX, PROMPT, check, interrupted, plain, visible, with_options
from outrider import LLM, Output, SamplingParams

NAMES = ("greedy", "warm", "truncated", "penalties", "two")
LONG = [random.Random(1).randrange(3, 101) for _ in range(83)]
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=11, logprobs=100, ignore_eos=True)
TREE = {"width": 9, "branches": 3, "max_depth": 3}
# Chains, a tree of a head with KV of its own, a model as drafter, a block of mask tokens, and drafts that are found.
DRAFTERS = {"ngram": {}, "eagle3": {}, "eagle": TREE, "draft_model": {"width": 4}, "dflash": {}, "medusa": TREE}


@pytest.fixture(scope="module", params=backends("cpu"))
def tiny_llm(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path]) -> Callable[..., LLM]:
    def make(name: str = "llama", **options: object) -> LLM:
        return LLM(str(tiny_folder(name)), **{**settings(request.param), **options})

    return make


@pytest.fixture(scope="module", params=["int8", "fp8"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(tiny_llm, kv_dtype: str) -> dict[str, object]:
    outputs = tiny_llm(kv_dtype=kv_dtype).generate([PROMPT] * len(NAMES), [plain(MIX[name]) for name in NAMES])
    return dict(zip(NAMES, map(visible, outputs), strict=True))


@pytest.mark.parametrize("method", DRAFTERS)
def test_drafts_keep_the_text(tiny_llm, tmp_path_factory, expected, kv_dtype: str, method: str) -> None:
    options = tiny_heads.make(method, tmp_path_factory.mktemp(method))
    speculate = with_options(method, adaptive="no", **options, **DRAFTERS[method])
    llm = tiny_llm(speculate=speculate, kv_dtype=kv_dtype)
    outputs = check(llm, expected, NAMES)
    assert any(output.stats.speculation.drafted for output in outputs)
    check(llm, expected, NAMES)  # the prefix cache is hot
    assert visible(interrupted(llm, MIX["warm"], {2, 3, 6})) == expected["warm"]
    check(tiny_llm(speculate=speculate, kv_dtype=kv_dtype, max_step_tokens=7), expected, NAMES[:2])
    check(tiny_llm(speculate=speculate, kv_dtype=kv_dtype, cache_tokens=16 * 9), expected, NAMES)


def bits(output: Output) -> object:
    return output.completions[0].token_ids, output.completions[0].logprobs


def test_a_request_does_not_depend_on_its_neighbours_or_chunks(tiny_llm, kv_dtype: str) -> None:
    alone = bits(tiny_llm(kv_dtype=kv_dtype, prefix_cache=False).generate(LONG, PARAMS)[0])
    llm = tiny_llm(kv_dtype=kv_dtype)
    prompts = [LONG[n : 3 * n + 2] for n in range(8)] + [LONG] + [LONG[7 * n :] for n in range(8)]
    params = [replace(PARAMS, seed=n, logprobs=None, max_tokens=5 + 3 * n) for n in range(17)]
    params[8] = PARAMS
    assert bits(llm.generate(prompts, params)[8]) == alone
    assert bits(llm.generate(LONG, PARAMS)[0]) == alone  # with the prefix cache hot
    for chunk in (1, 7, 64):
        assert bits(tiny_llm(kv_dtype=kv_dtype, max_step_tokens=chunk).generate(LONG, PARAMS)[0]) == alone


def test_windows_that_give_pages_back_keep_the_text(tiny_llm, kv_dtype: str) -> None:
    names = ("greedy", "warm")
    llm = tiny_llm("smollm3-window", kv_dtype=kv_dtype)
    wanted = {name: visible(llm.generate(PROMPT, plain(MIX[name]))[0]) for name in names}
    check(tiny_llm("smollm3-window", kv_dtype=kv_dtype, speculate="ngram:adaptive=no"), wanted, names)
    check(tiny_llm("smollm3-window", kv_dtype=kv_dtype, max_step_tokens=5, cache_tokens=16 * 9), wanted, names)


def test_quantized_values_are_close_to_full_ones_but_not_equal(tiny_llm, kv_dtype: str) -> None:
    params = replace(PARAMS, temperature=0, max_tokens=1)
    full, found = (tiny_llm(kv_dtype=name).generate(LONG, params)[0] for name in ("float32", kv_dtype))
    assert 0 < difference(found, full) < 0.2


def test_the_reference_agrees(tiny_llm, kv_dtype: str) -> None:
    params = replace(PARAMS, max_tokens=4)
    found, expected = (
        tiny_llm(kv_dtype=kv_dtype, **options).generate(LONG, params)[0] for options in ({}, {"backend": "reference"})
    )
    assert found.completions[0].token_ids == expected.completions[0].token_ids
    # A number may be rounded either way, and a step of e4m3 is an eighth of it: attention in fp16 changes some numbers.
    assert difference(found, expected) < {"int8": 0.01, "fp8": 0.1}[kv_dtype]


def difference(found: Output, expected: Output) -> float:
    """Return the largest difference between log-probabilities of the first token."""
    found_logprobs, logprobs = (dict(one.completions[0].logprobs[0].top) for one in (found, expected))
    return max(abs(found_logprobs[token] - logprobs[token]) for token in logprobs)
