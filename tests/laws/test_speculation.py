"""Speculation changes nothing but the speed: the same tokens, texts, reasons and log-probabilities as plain decoding.

Over every method of `available()`, and over a drafter that is right as often as a test wants. No tolerance anywhere.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from laws import oracle
from laws.mix import BASE, FINDING, MIX, PROMPT, check, interrupted, plain, visible, with_options
from outrider import SamplingParams, UserError


@pytest.fixture(scope="module")
def expected(tiny_llm) -> dict[str, object]:
    outputs = tiny_llm().generate([PROMPT] * len(MIX), [plain(params) for params in MIX.values()])
    return dict(zip(MIX, map(visible, outputs), strict=True))


def test_every_parameter_in_one_batch_cold_and_hot(tiny_llm, method: str, expected) -> None:
    llm = tiny_llm(speculate=method)
    outputs = check(llm, expected)
    assert any(output.stats.speculation.drafted for output in outputs if output.stats)
    hot = check(llm, expected)
    # A prompt whose log-probabilities are asked for must run.
    assert all(output.stats.cached_tokens >= 32 for output in hot if output.stats and not output.prompt_logprobs)


def test_the_method_that_auto_chooses_changes_no_text(tiny_llm, expected) -> None:
    check(tiny_llm(speculate="auto"), expected)


@pytest.mark.pairwise
@pytest.mark.parametrize("options", [{"max_step_tokens": 7}, {"cache_tokens": 16 * 9}], ids=["chunks", "few pages"])
def test_in_chunks_and_with_few_pages(tiny_llm, method: str, expected, options: dict[str, int]) -> None:
    names = ("greedy", "warm", "penalties", "stops", "ends", "two", "narrow", "beside", "predicted")
    outputs = check(tiny_llm(speculate=method, **options), expected, names)
    if "cache_tokens" in options:
        assert sum(output.stats.preemptions for output in outputs if output.stats) > 0


def test_requests_alone_and_interrupted_keep_the_text(tiny_llm, method: str, expected) -> None:
    llm = tiny_llm(speculate=method)
    for name in ("greedy", "warm", "penalties"):
        assert visible(interrupted(llm, MIX[name], {2, 3, 6})) == expected[name], name


@pytest.mark.pairwise
@pytest.mark.parametrize("draft", ["greedy", "probabilistic"])
@pytest.mark.parametrize("width", [1, 7])
def test_any_width_with_probabilistic_and_greedy_drafts_keeps_the_text(
    tiny_llm, method: str, expected, width: int, draft: str
) -> None:
    if draft == "probabilistic" and method.partition(":")[0] in FINDING:
        with pytest.raises(UserError, match="copies its drafts"):
            tiny_llm(speculate=f"{method},draft={draft}")
        return
    llm = tiny_llm(speculate=f"{method},width={width},draft={draft}")
    names = ("greedy", "warm", "truncated")
    outputs = llm.generate([PROMPT] * 3, [MIX[name] for name in names])
    assert [visible(output) for output in outputs] == [expected[name] for name in names]


# ---- the mechanism, at any acceptance ----

SHAPES = {
    "all right": {"wrong": 1000, "width": 5},
    "half right": {"wrong": 2, "width": 3},
    "always wrong": {"wrong": 1, "width": 6},
    "one at a time": {"wrong": 3, "width": 1},
    "deep": {"wrong": 9, "width": 20},
    "tree of two": {"wrong": 4, "width": 8, "branches": 2},
    "tree of three": {"wrong": 1000, "width": 15, "branches": 3},
    "only branches": {"wrong": 5, "width": 4, "branches": 4},
}


@pytest.fixture(scope="module", params=[0, 0.8])
def known(request: pytest.FixtureRequest, tiny_llm) -> tuple[SamplingParams, object]:
    """Parameters, and what plain decoding says to them; the oracle knows it too."""
    params = replace(BASE, temperature=request.param, max_tokens=40, logprobs=5)
    output = tiny_llm().generate(PROMPT, params)[0]
    oracle.TEXTS[tuple(PROMPT)] = output.completions[0].token_ids
    return params, visible(output)


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [512, 9])
def test_chains_and_trees_at_any_acceptance(tiny_llm, known, shape: str, chunk: int) -> None:
    params, expected = known
    llm = tiny_llm(speculate=with_options("laws.oracle", adaptive="false", **SHAPES[shape]), max_step_tokens=chunk)
    outputs = llm.generate([PROMPT[:9], PROMPT, PROMPT[:30]], [replace(BASE, speculate=False), params, plain(params)])
    assert visible(outputs[1]) == expected
    spec_stats = outputs[1].stats.speculation
    assert spec_stats.accepted + spec_stats.steps == 40
    if shape == "all right" and chunk == 512:
        assert spec_stats.accepted == spec_stats.drafted > 30
    if shape == "always wrong":
        assert spec_stats.accepted == 0 < spec_stats.drafted
    assert not llm.engine.spec_manager.methods["laws.oracle"].live


@pytest.mark.parametrize("shape", ["half right", "tree of three"])
def test_trees_survive_preemption_and_a_cleared_cache(tiny_llm, known, shape: str) -> None:
    params, expected = known
    llm = tiny_llm(speculate=with_options("laws.oracle", adaptive="false", **SHAPES[shape]))
    output = interrupted(llm, params, {1, 4, 5})
    assert output.stats.preemptions == 3 and visible(output) == expected
    again = llm.generate(PROMPT + output.completions[0].token_ids[:20], replace(params, max_tokens=20))[0]
    # The kept path of a tree was closed up in the pages that this prompt now shares.
    assert again.stats.cached_tokens >= 48
    assert again.completions[0].token_ids == output.completions[0].token_ids[20:]


def test_a_drafter_that_fails_takes_only_its_own_speculation(tiny_llm, known) -> None:
    params, expected = known
    llm = tiny_llm(speculate="laws.oracle:wrong=3,fails=true,adaptive=false")
    outputs = llm.generate([PROMPT, PROMPT[:31]], [params, replace(BASE, speculate="ngram")])
    assert visible(outputs[0]) == expected
    assert 0 < outputs[0].stats.speculation.drafted < 40
    assert outputs[1].completions[0].finish_reason == "length"


def test_adaptive_width_changes_no_token(tiny_llm, known) -> None:
    params, expected = known
    for options in ({"wrong": 2}, {"wrong": 1000, "width": 9}):
        llm = tiny_llm(speculate=with_options("laws.oracle", **options))
        assert visible(llm.generate(PROMPT, params)[0]) == expected


def test_aborted_requests_leave_nothing_behind(tiny_llm, method: str) -> None:
    llm = tiny_llm(speculate=method)
    engine = llm.engine
    names = [engine.add(PROMPT[:20], BASE) for _ in range(3)]
    for _ in range(4):
        engine.step()
    for name in names:
        engine.abort(name)
    engine.scheduler.check()
    assert engine.is_idle and engine.scheduler.cache.available == engine.scheduler.cache.pages
    assert not engine.spec_manager.controller.num_requests


def test_samples_that_alternate_beside_another_request_keep_their_texts(tiny_llm, method: str) -> None:
    llm = tiny_llm(speculate=method)
    many = replace(BASE, max_tokens=10, n=9, temperature=1.5, seed=3)
    one = replace(many, max_tokens=24, n=1)
    alone = [llm.generate([PROMPT], params)[0] for params in (many, one)]
    rows: list[int] = []
    step = llm.engine.runner.step
    llm.engine.runner.step = lambda planned: (rows.append(len(planned.rows)), step(planned))[1]
    together = llm.generate([PROMPT, PROMPT], [many, one])
    for before, after in zip(alone, together, strict=True):
        assert [each.token_ids for each in before.completions] == [each.token_ids for each in after.completions]
    assert 4 in rows  # three samples at a time beside the other request
    llm.engine.scheduler.check()
