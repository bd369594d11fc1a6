"""The laws over models with recurrent layers: rejected tokens leave no trace in a state, whatever the step was."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

import tiny_heads
from laws import oracle
from laws.mix import BASE, MIX, PROMPT, check, interrupted, plain, visible, with_options
from outrider import LLM, Output, SamplingParams

NAMES = ("greedy", "warm", "penalties", "stops", "two", "narrow", "beside", "predicted")
MODELS = ("qwen3-next", "qwen3-next-moe", "qwen3.5", "granite4", "granite4-moe")
SAMPLED = replace(BASE, temperature=0.8, logprobs=100)
DRAFTS = {
    "chain": {"wrong": 3, "width": 5},
    "long chain": {"wrong": 6, "width": 12},
    "tree": {"wrong": 4, "width": 8, "branches": 2},
    "wide tree": {"wrong": 5, "width": 24, "branches": 3},
}


LONG = random.Random(5).choices(range(3, 101), k=80)


def bits(output: Output) -> object:
    return output.completions[0].token_ids, output.completions[0].logprobs


def cached(output: Output) -> int:
    assert output.stats is not None
    return output.stats.cached_tokens


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
    source = random.Random(2)
    prompts = [[source.randrange(3, 101) for _ in range(source.randrange(1, 40))] for _ in range(16)]
    params = [replace(SAMPLED, seed=n, logprobs=None, max_tokens=5 + n) for n in range(16)]
    llm = tiny_llm(name, quantize=quantize)
    alone = bits(llm.generate(PROMPT, SAMPLED)[0])
    assert bits(llm.generate([*prompts, PROMPT], [*params, SAMPLED])[-1]) == alone
    for size in (1, 7):
        assert bits(tiny_llm(name, quantize=quantize, max_step_tokens=size).generate(PROMPT, SAMPLED)[0]) == alone


@pytest.mark.pairwise
@pytest.mark.parametrize("step_tokens", [None, 23], ids=["whole", "chunks"])
@pytest.mark.parametrize("shape", [None, "chain", "wide tree"])
@pytest.mark.parametrize("model", ["qwen3-next-moe", "qwen3.5", "granite4"])
def test_a_snapshot_changes_no_bit(tiny_llm, model: str, shape: str | None, step_tokens: int | None) -> None:
    """Prompts that begin as earlier ones, and the next turn of a conversation, continue from a snapshot."""
    params = replace(SAMPLED, max_tokens=16)
    cold = tiny_llm(model, prefix_cache=False)
    answer = cold.generate(LONG, params)[0].completions[0].token_ids
    prompts = [LONG, LONG, [*LONG, *answer, *LONG[:8]], [*LONG[:70], *LONG[:9]], [*LONG[:70], *LONG[5:9]], LONG[:77]]
    expected = [cold.generate(prompt, params)[0] for prompt in prompts]
    for prompt, output in zip(prompts, expected, strict=True):
        oracle.TEXTS[tuple(prompt)] = output.completions[0].token_ids
    speculate = "none" if shape is None else with_options("laws.oracle", adaptive="false", **DRAFTS[shape])
    llm = tiny_llm(model, speculate=speculate, max_step_tokens=step_tokens, page_size=4)
    outputs = [llm.generate(prompt, params)[0] for prompt in prompts]
    assert [bits(output) for output in outputs] == [bits(output) for output in expected]
    found = [cached(output) for output in outputs]
    assert found[0] == 0 and found[1] == 76, "the end of a prompt has no snapshot"
    assert found[2] == 92, "the end of an answer has no snapshot"
    assert found[4] == 68, "the branch of two texts has no snapshot"
    llm.engine.scheduler.check()


@pytest.mark.parametrize("snapshots", [0, 4])
def test_few_slots_change_no_bit(tiny_llm, monkeypatch: pytest.MonkeyPatch, snapshots: int) -> None:
    """Requests that share, branch, wait and are preempted, while snapshots are evicted."""
    source = random.Random(snapshots)
    prompts = [[*LONG[: source.choice((16, 48, 80))], *source.choices(range(3, 101), k=9)] for _ in range(8)] * 2
    params = [replace(SAMPLED, seed=n, logprobs=None, max_tokens=8 + n, n=1 + n % 3 // 2) for n in range(len(prompts))]
    expected = tiny_llm("qwen3-next", prefix_cache=False).generate(prompts, params)
    monkeypatch.setattr("outrider.engine.SNAPSHOT_SHARE", 0.0)
    llm = tiny_llm("qwen3-next", max_requests=5 + snapshots, max_step_tokens=64, cache_tokens=16 * 40)
    llm.engine.scheduler.max_requests = 5
    outputs = []
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        assert list(map(visible, outputs)) == list(map(visible, expected))
        llm.engine.scheduler.check()
    assert any(map(cached, outputs)) and len(llm.engine.scheduler.cache.snapshot_slots) <= 7 + snapshots


@pytest.mark.parametrize("name", ["eagle3", "draft_model"])
def test_adaptive_multi_step_runs_change_no_bit(tiny_llm, tmp_path: Path, name: str) -> None:
    """Their latency is measured at start-up by runs over the same state."""
    options = tiny_heads.make(name, tmp_path)
    expected = bits(tiny_llm("qwen3-next").generate(PROMPT, SAMPLED)[0])
    llm = tiny_llm("qwen3-next", speculate=with_options(name, **options), decode_steps=4)
    assert bits(llm.generate(PROMPT, SAMPLED)[0]) == expected


def test_preempted_requests_continue_from_a_snapshot(tiny_llm) -> None:
    params = replace(SAMPLED, max_tokens=40)
    expected = bits(tiny_llm("granite4", prefix_cache=False).generate(LONG, params)[0])
    llm = tiny_llm("granite4")
    outputs = []
    for count, output in enumerate(llm.stream(LONG, params)):
        outputs.append(output)
        if count in (20, 37):
            llm.engine.scheduler.preempt_all()
    assert bits(outputs[-1]) == expected
    assert llm.engine.scheduler.cache.hits == 96 + 112  # the full pages, both times


def test_keys_share_no_snapshot(tiny_llm) -> None:
    llm: LLM = tiny_llm("qwen3-next")

    def ask(salt: str) -> int:
        return cached(llm.generate(LONG, SamplingParams(max_tokens=4, cache_salt=salt))[0])

    assert [ask("a"), ask("b"), ask("a"), ask("b"), ask("c")] == [0, 0, 64, 64, 0]
