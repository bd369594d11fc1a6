"""The laws over mixtures of experts: a token has the same experts, and the same bits, whatever its neighbours are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from laws.mix import BASE, MIX, PROMPT, check, interrupted, plain, visible
from outrider import Output

NAMES = ("greedy", "warm", "penalties", "stops", "two", "narrow", "beside", "predicted")
MODELS = ("mixtral", "gpt-oss", "olmoe", "qwen2-moe", "qwen3-moe")
ALONE = replace(BASE, temperature=0.8, logprobs=100)


@pytest.fixture(scope="module")
def expected(tiny_llm) -> dict[str, object]:
    outputs = tiny_llm("qwen3-moe").generate([PROMPT] * len(NAMES), [plain(MIX[name]) for name in NAMES])
    return dict(zip(NAMES, map(visible, outputs), strict=True))


@pytest.mark.pairwise
@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 7, "cache_tokens": 16 * 9}], ids=["all", "few"])
def test_no_method_changes_a_text(tiny_llm, method: str, expected, options: dict[str, int]) -> None:
    outputs = check(tiny_llm("qwen3-moe", speculate=method, **options), expected, NAMES)
    assert any(output.stats.speculation.drafted for output in outputs if output.stats)


@pytest.mark.pairwise
def test_interrupted_requests_keep_their_text(tiny_llm, method: str, expected) -> None:
    llm = tiny_llm("qwen3-moe", speculate=method)
    assert visible(interrupted(llm, MIX["warm"], {2, 3, 6})) == expected["warm"]


@pytest.mark.pairwise
@pytest.mark.parametrize("quantize", [None, "int4", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_neighbours_and_chunks_change_no_bit(tiny_llm, name: str, quantize: str | None) -> None:
    def bits(output: Output) -> object:
        return output.completions[0].token_ids, output.completions[0].logprobs

    source = random.Random(2)
    prompts = [[source.randrange(3, 101) for _ in range(source.randrange(1, 40))] for _ in range(16)]
    params = [replace(ALONE, seed=n, logprobs=None, max_tokens=5 + n) for n in range(16)]
    llm = tiny_llm(name, quantize=quantize, prefix_cache=False)
    alone = bits(llm.generate(PROMPT, ALONE)[0])
    assert bits(llm.generate([*prompts, PROMPT], [*params, ALONE])[-1]) == alone
    assert bits(tiny_llm(name, quantize=quantize, max_step_tokens=7).generate(PROMPT, ALONE)[0]) == alone
