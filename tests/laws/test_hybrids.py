"""The laws over models with recurrent layers: rejected tokens leave no trace in a state, whatever the step was."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from laws import oracle
from laws.mix import BASE, MIX, PROMPT, check, interrupted, plain, visible, with_options
from outrider import Output

NAMES = ("greedy", "warm", "penalties", "stops", "two", "narrow", "beside", "predicted")
MODELS = ("qwen3-next", "qwen3-next-moe", "qwen3.5", "granite4", "granite4-moe")
SAMPLED = replace(BASE, temperature=0.8, logprobs=100)
DRAFTS = {
    "chain": {"wrong": 3, "width": 5},
    "long chain": {"wrong": 6, "width": 12},
    "tree": {"wrong": 4, "width": 8, "branches": 2},
    "wide tree": {"wrong": 5, "width": 24, "branches": 3},
}


@pytest.fixture(scope="module")
def expected(tiny_llm) -> dict[str, object]:
    outputs = tiny_llm("qwen3-next").generate([PROMPT] * len(NAMES), [plain(MIX[name]) for name in NAMES])
    return dict(zip(NAMES, map(visible, outputs), strict=True))


@pytest.mark.pairwise
@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 7, "cache_tokens": 16 * 9}], ids=["all", "few"])
def test_no_method_changes_a_text(tiny_llm, method: str, expected, options: dict[str, int]) -> None:
    outputs = check(tiny_llm("qwen3-next", speculate=method, **options), expected, NAMES)
    assert any(output.stats.speculation.drafted for output in outputs if output.stats)


@pytest.mark.pairwise
def test_interrupted_requests_keep_their_text(tiny_llm, method: str, expected) -> None:
    llm = tiny_llm("qwen3-next", speculate=method)
    assert visible(interrupted(llm, MIX["warm"], {2, 3, 6})) == expected["warm"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", DRAFTS)
def test_rejected_tokens_leave_no_trace_in_a_state(tiny_llm, model: str, shape: str) -> None:
    params = replace(SAMPLED, max_tokens=40)
    output = tiny_llm(model).generate(PROMPT, params)[0]
    oracle.TEXTS[tuple(PROMPT)] = output.completions[0].token_ids
    llm = tiny_llm(model, speculate=with_options("laws.oracle", adaptive="false", **DRAFTS[shape]))
    drafted = llm.generate(PROMPT, params)[0]
    assert visible(drafted) == visible(output)
    assert 0 < drafted.stats.speculation.accepted < drafted.stats.speculation.drafted


@pytest.mark.pairwise
@pytest.mark.parametrize("quantize", [None, "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_neighbours_and_chunks_change_no_bit(tiny_llm, name: str, quantize: str | None) -> None:
    def bits(output: Output) -> object:
        return output.completions[0].token_ids, output.completions[0].logprobs

    source = random.Random(2)
    prompts = [[source.randrange(3, 101) for _ in range(source.randrange(1, 40))] for _ in range(16)]
    params = [replace(SAMPLED, seed=n, logprobs=None, max_tokens=5 + n) for n in range(16)]
    llm = tiny_llm(name, quantize=quantize)
    alone = bits(llm.generate(PROMPT, SAMPLED)[0])
    assert bits(llm.generate([*prompts, PROMPT], [*params, SAMPLED])[-1]) == alone
    for size in (1, 7):
        assert bits(tiny_llm(name, quantize=quantize, max_step_tokens=size).generate(PROMPT, SAMPLED)[0]) == alone
