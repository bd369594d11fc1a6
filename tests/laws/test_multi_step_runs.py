"""Rounds without the host give what steps with it give: tokens, texts, reasons, and what was drafted and kept.

Drafts are the same as well: a drafter that goes on from what the rounds left must not know less than one that was
asked after every step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

import tiny_heads
from backends import backends
from laws.mix import BASE, FINDING, PROMPT, told, with_options
from laws.test_variants import VARIANTS
from outrider import LLM, Output, SamplingParams

# Rounds are the same code on every backend; `reference`, which is slow, runs those that differ most.
FAST = pytest.mark.parametrize("tiny_llm", backends("cpu"), indirect=True)

STEADY = [
    replace(BASE, max_tokens=30),
    replace(BASE, temperature=0.8),
    replace(BASE, temperature=1.2, top_k=9, top_p=0.9, min_p=0.05, max_tokens=25),
    replace(BASE, temperature=1.0, ignore_eos=False, max_tokens=40),
    replace(BASE, max_tokens=1),
]
PROMPTS = [PROMPT, PROMPT[:11], PROMPT[3:33], PROMPT[::-1], PROMPT[:1]]


def count(output: Output) -> tuple[object, ...]:
    spec_stats = output.stats.speculation
    return (
        spec_stats.steps,
        spec_stats.drafted,
        spec_stats.accepted,
        spec_stats.drafted_per_depth,
        spec_stats.accepted_per_depth,
    )


def flights(llm: LLM) -> list[int]:
    """The rounds of every step that had several, from now on."""
    found: list[int] = []
    fly = llm.engine.runner.multi_step.run

    def watched(step):  # type: ignore[no-untyped-def]
        results = fly(step)
        if results is not None:
            found.append(step.decode_steps)
        return results

    llm.engine.runner.multi_step.run = watched  # type: ignore[method-assign]
    return found


def same(stepwise: LLM, llm: LLM, params: list[SamplingParams] = STEADY) -> None:
    flown = flights(llm)
    expected, found = (one.generate(PROMPTS[: len(params)], params) for one in (stepwise, llm))
    assert [told(output) for output in found] == [told(output) for output in expected]
    assert [count(output) for output in found] == [count(output) for output in expected]
    assert flown and max(flown) > 1
    llm.engine.scheduler.check()


@pytest.mark.parametrize("rounds", [2, 5, 32])
def test_plain_decoding(tiny_llm, rounds: int) -> None:
    same(tiny_llm(), tiny_llm(decode_steps=rounds))


@FAST
@pytest.mark.parametrize("draft", ["greedy", "probabilistic"])
def test_every_method_that_drafts_without_the_host(tiny_llm, method: str, draft: str) -> None:
    if method.partition(":")[0] in FINDING:
        llm = tiny_llm(speculate=method, decode_steps=4)
        flown = flights(llm)
        llm.generate(PROMPTS, STEADY)
        assert not flown  # their drafts are the host's
        return
    options = f"{method},draft={draft}"
    same(tiny_llm(speculate=options), tiny_llm(speculate=options, decode_steps=4))


@FAST
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_drafter(tiny_llm, tmp_path: Path, variant: str) -> None:
    name, options = VARIANTS[variant](tmp_path)
    speculate = with_options(name, adaptive="no", **options)
    same(tiny_llm(speculate=speculate), tiny_llm(speculate=speculate, decode_steps=3))


@pytest.mark.parametrize("verify", ["rejection", "block", "synthetic"])
def test_other_ways_to_verify(tiny_llm, tmp_path: Path, verify: str) -> None:
    options = {**tiny_heads.make("eagle3", tmp_path), "verify": verify, "adaptive": "no"}
    options |= {"rates": "0.8/0.5/0.4/0.1"} if verify == "synthetic" else {"draft": "probabilistic"}
    speculate = with_options("eagle3", **options)
    same(tiny_llm(speculate=speculate), tiny_llm(speculate=speculate, decode_steps=4))


@FAST
def test_few_pages_and_chunks(tiny_llm, tmp_path: Path) -> None:
    speculate = with_options("eagle3", adaptive="no", **tiny_heads.make("eagle3", tmp_path))
    options = {"speculate": speculate, "cache_tokens": 16 * 7, "max_step_tokens": 16}
    stepwise, llm = tiny_llm(**options), tiny_llm(**options, decode_steps=6)
    expected, found = (one.generate(PROMPTS, STEADY) for one in (stepwise, llm))
    assert [told(output) for output in found] == [told(output) for output in expected]
    assert sum(output.stats.preemptions for output in found) > 0
    llm.engine.scheduler.check()


@FAST
def test_a_hot_cache_knows_what_rounds_left(tiny_llm, tmp_path: Path) -> None:
    """Pages that rounds filled serve the next request, the drafter's part of them included."""
    speculate = with_options("eagle3", adaptive="no", **tiny_heads.make("eagle3", tmp_path))
    params = replace(BASE, max_tokens=40)
    stepwise, llm = tiny_llm(speculate=speculate), tiny_llm(speculate=speculate, decode_steps=7)
    text = PROMPT + stepwise.generate(PROMPT, params)[0].completions[0].token_ids
    assert llm.generate(PROMPT, params)[0].completions[0].token_ids == text[len(PROMPT) :]
    outputs = [one.generate(text[:-1], params)[0] for one in (stepwise, llm)]
    assert outputs[1].stats.cached_tokens >= len(text) // 16 * 16 - 16
    assert told(outputs[0]) == told(outputs[1])
    assert count(outputs[0]) == count(outputs[1])


@FAST
def test_the_host_steps_in_where_a_request_needs_it(tiny_llm, tmp_path: Path) -> None:
    """Rows that need the host run beside those that do not; both give what they give alone."""
    speculate = with_options("eagle3", adaptive="no", **tiny_heads.make("eagle3", tmp_path))
    params = [BASE, replace(BASE, logprobs=2), replace(BASE, frequency_penalty=0.5), replace(BASE, speculate=False)]
    stepwise, llm = tiny_llm(speculate=speculate), tiny_llm(speculate=speculate, decode_steps=4)
    for chosen in (params, params[:1] + params[3:], params[:2]):
        expected, found = (one.generate([PROMPT] * len(chosen), chosen) for one in (stepwise, llm))
        assert [told(output) for output in found] == [told(output) for output in expected]


@FAST
@pytest.mark.parametrize("name", ["draft_model", "eagle3", "dflash"])
def test_a_drafter_that_only_follows_can_draft_again(tiny_llm, tmp_path: Path, name: str) -> None:
    """Flights with drafts and without, in turn, several requests side by side."""
    speculate = with_options(name, adaptive="no", **tiny_heads.make(name, tmp_path))
    stepwise, llm = tiny_llm(speculate=speculate), tiny_llm(speculate=speculate, decode_steps=3)
    widths = cycle([0, 3, 0, 2])
    llm.engine.runner.multi_step.planner.width = lambda name, requests: next(widths)  # type: ignore[method-assign]
    params = [replace(BASE, max_tokens=36)] * 3
    expected, found = (one.generate(PROMPTS[:3], params) for one in (stepwise, llm))
    assert [told(output) for output in found] == [told(output) for output in expected]
    method_stats = [output.stats.speculation for output in found]
    assert all({0, 2, 3} <= set(spec_stats.widths) for spec_stats in method_stats)
    if name == "draft_model":  # it is the target itself: whoever knows the text is always right
        assert all(spec_stats.accepted == spec_stats.drafted for spec_stats in method_stats)
