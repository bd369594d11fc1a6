"""Multi-step runs give the same tokens, texts, finish reasons, drafts and acceptance as single steps.

A drafter that continues after a multi-step run must draft as one that is called after every step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import tiny_heads
from backends import backends
from laws.mix import BASE, FINDING, MIX, PROMPT, visible, with_options
from laws.test_variants import VARIANTS
from outrider import LLM, Output, SamplingParams
from outrider.device.cpu import Cpu
from outrider.speculation.adaptive.controller import AdaptiveController
from outrider.speculation.adaptive.latency_model import LatencyCurve, LatencyModel
from outrider.speculation.interface import DraftContext
from outrider.speculation.methods.ngram import NgramDrafter
from outrider.types import StructuredOutput

# Multi-step runs share their code across backends; `reference`, which is slow, runs a selection.
FAST = pytest.mark.parametrize("tiny_llm", backends("cpu"), indirect=True)

MULTI_STEP = [
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


def watch_runs(llm: LLM) -> list[int]:
    """Return a list that records the decode steps of each multi-step run from now on."""
    runs: list[int] = []
    run = llm.engine.runner.multi_step.run

    def record(step):  # type: ignore[no-untyped-def]
        results = run(step)
        if results is not None:
            runs.append(step.decode_steps)
        return results

    llm.engine.runner.multi_step.run = record  # type: ignore[method-assign]
    return runs


def same(stepwise: LLM, llm: LLM, params: list[SamplingParams] = MULTI_STEP) -> None:
    runs = watch_runs(llm)
    expected, outputs = (one.generate(PROMPTS[: len(params)], params) for one in (stepwise, llm))
    assert [visible(output) for output in outputs] == [visible(output) for output in expected]
    assert [count(output) for output in outputs] == [count(output) for output in expected]
    assert runs and max(runs) > 1
    llm.engine.scheduler.check()


@pytest.mark.parametrize("decode_steps", [2, 5, 32])
def test_plain_decoding_is_the_same_in_multi_step_runs(tiny_llm, decode_steps: int) -> None:
    same(tiny_llm(), tiny_llm(decode_steps=decode_steps))


@FAST
@pytest.mark.parametrize("draft", ["greedy", "probabilistic"])
def test_every_method_drafts_the_same_in_multi_step_runs(tiny_llm, method: str, draft: str) -> None:
    name = method.partition(":")[0]
    if name in FINDING:
        if draft == "greedy":
            predicted = [replace(params, prediction=PROMPT) for params in MULTI_STEP]
            params = predicted if name == "prediction" else MULTI_STEP
            same(tiny_llm(speculate=method), tiny_llm(speculate=method, decode_steps=4), params)
        return
    options = f"{method},draft={draft}"
    same(tiny_llm(speculate=options), tiny_llm(speculate=options, decode_steps=4))


@FAST
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_drafts_the_same_in_multi_step_runs(tiny_llm, tmp_path: Path, variant: str) -> None:
    name, options = VARIANTS[variant](tmp_path)
    speculate = with_options(name, adaptive="no", **options)
    same(tiny_llm(speculate=speculate), tiny_llm(speculate=speculate, decode_steps=3))


@pytest.mark.parametrize("tiny_llm", ["cpu"], indirect=True)  # a GPU has CUDA graphs instead
@pytest.mark.parametrize("name", ["eagle3", "plain"])
def test_decode_steps_of_a_run_are_replayed_on_the_cpu(tiny_llm, tmp_path: Path, name: str) -> None:
    options = {**tiny_heads.make("eagle3", tmp_path), "adaptive": "no"}
    llm = tiny_llm(decode_steps=4, **({} if name == "plain" else {"speculate": with_options(name, **options)}))
    llm.generate(PROMPTS[:1], MULTI_STEP[:1])
    (buffers, *_) = llm.engine.runner.multi_step.buffers.values()
    assert set(buffers.replays) == ({"target"} if name == "plain" else {"target", "extend", "decode"})
    assert all(replay is not None for replay in buffers.replays.values())


@pytest.mark.parametrize("verify", ["rejection", "block", "synthetic"])
def test_every_verification_mode_is_the_same_in_multi_step_runs(tiny_llm, tmp_path: Path, verify: str) -> None:
    options = {**tiny_heads.make("eagle3", tmp_path), "verify": verify, "adaptive": "no"}
    options |= {"rates": "0.8/0.5/0.4/0.1"} if verify == "synthetic" else {"draft": "probabilistic"}
    speculate = with_options("eagle3", **options)
    same(tiny_llm(speculate=speculate), tiny_llm(speculate=speculate, decode_steps=4))


class Dear(LatencyCurve):
    """Following a text takes a fifth of a step, a drafted token nine steps."""

    def seconds(self, count: int) -> float:
        return 0.2 + 9.0 * count

    def table(self, last: int) -> list[float]:
        return [self.seconds(count) for count in range(last + 1)]


@FAST
@pytest.mark.parametrize("mixed", [False, True], ids=["all drafting", "beside one without"])
def test_drafters_that_do_not_pay_are_dropped_before_a_run(
    tiny_llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixed: bool
) -> None:
    params = [replace(BASE, max_tokens=60), replace(BASE, max_tokens=51, speculate=not mixed)]  # ends within a run
    expected = tiny_llm().generate(PROMPTS[:2], params)
    steep = lambda self, batch_size, drafted: [1.0 + 9.0 * count for count in range(drafted + 1)]  # noqa: E731
    monkeypatch.setattr(LatencyModel, "table", steep)
    monkeypatch.setattr(LatencyModel, "seconds", lambda self, batch_size, drafted: 1.0 + 9.0 * drafted)
    monkeypatch.setattr(AdaptiveController, "draft_latency", lambda self, method: Dear())
    monkeypatch.setattr(Cpu, "defaults", replace(Cpu.defaults, decode_steps=4))  # so drafters cannot be suspended
    head = tiny_heads.make("eagle3", tmp_path)
    llm = tiny_llm(speculate=with_options("eagle3", adaptive="yes", **head), decode_steps=4)
    for batch_size in (1, 2):
        llm.engine.spec_manager.controller.latency.observe(batch_size, 0, 1.0)
    runs: list[str] = []  # the drafter of each run
    planner = llm.engine.runner.multi_step.planner
    learn, finish_plain = planner.learn, planner.finish_plain
    monkeypatch.setattr(planner, "learn", lambda name, *rest: runs.append(name) or learn(name, *rest))
    monkeypatch.setattr(planner, "finish_plain", lambda *given: runs.append("") or finish_plain(*given))
    outputs = llm.generate(PROMPTS[:2], params)
    assert [visible(output) for output in outputs] == [visible(output) for output in expected]
    assert runs.count("eagle3") <= (0 if mixed else 2) and runs.count("") >= 5
    counted = [output.stats.speculation for output in outputs]
    assert counted[0].suspended >= 55  # after the drop too
    assert all(spec_stats.suspended <= spec_stats.widths[0] for spec_stats in counted)
    llm.engine.scheduler.check()


def test_lookups_miss_runs_without_drafts(tiny_llm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a run has no drafter. Later ones draft again, from the whole text."""
    params = [replace(BASE, max_tokens=60)] * 3
    expected = tiny_llm().generate(PROMPTS[:3], params)
    llm = tiny_llm(speculate="ngram", decode_steps=3)
    runner, widths, runs = llm.engine.runner.multi_step, cycle([0, 0, 3, 0, 2]), []
    monkeypatch.setattr(runner.planner, "width", lambda *given: next(widths))
    launch = runner._launch
    monkeypatch.setattr(runner, "_launch", lambda buffers, key, *rest: runs.append(key) or launch(buffers, key, *rest))
    outputs = llm.generate(PROMPTS[:3], params)
    assert [visible(output) for output in outputs] == [visible(output) for output in expected]
    assert {key[:3:2] for key in runs} == {("", 0), ("ngram", 3), ("ngram", 2)}
    assert sum(output.stats.speculation.accepted for output in outputs) > 0
    llm.engine.scheduler.check()


@pytest.mark.parametrize("method", ["suffix", "prediction"])
def test_lookups_forget_the_tokens_of_a_run_that_failed(tiny_llm, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """They were not added to the texts, so that later drafts would not continue these."""
    params = [replace(BASE, max_tokens=60, prediction=tuple(PROMPT) if method == "prediction" else None)] * 2
    expected = tiny_llm(speculate=f"{method}:adaptive=no").generate(PROMPTS[:2], params)
    llm = tiny_llm(speculate=f"{method}:adaptive=no", decode_steps=9)
    tokens, read = DraftContext.tokens, []
    monkeypatch.setattr(
        DraftContext, "tokens", lambda self, start, stop: read.append(stop - start) or tokens(self, start, stop)
    )
    runner, calls = llm.engine.runner.multi_step, []
    draft = runner._draft_on_host

    def fail(*given: Any) -> None:
        calls.append(given)
        if len(calls) == 4:  # in the first run
            raise RuntimeError("a kernel failed")
        draft(*given)

    monkeypatch.setattr(runner, "_draft_on_host", fail)
    runs = watch_runs(llm)
    outputs = llm.generate(PROMPTS[:2], params)
    assert runs and len(calls) > 4
    assert min(read) > 0  # no drafter knows more of a text than it has
    assert [visible(output) for output in outputs] == [visible(output) for output in expected]
    drafter = llm.engine.spec_manager.methods[method]
    assert not drafter.states
    llm.engine.scheduler.check()


def test_the_host_makes_no_lookups_while_runs_have_no_drafts(tiny_llm, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a prompt: the run that follows would not verify it. Beside rows that need the host no run follows."""
    lookups: list[int] = []
    draft = NgramDrafter.draft
    monkeypatch.setattr(NgramDrafter, "draft", lambda self, *given: lookups.append(given[-1]) or draft(self, *given))
    llm = tiny_llm(speculate="ngram", decode_steps=3)
    free, other = replace(BASE, max_tokens=20), replace(BASE, max_tokens=20, speculate="suffix")
    for suspended, params, count in (
        ({"ngram"}, [free], 0),
        (set(), [free], 1),
        ({"another"}, [free], 1),
        ({"ngram"}, [free, other], 1),
    ):
        llm.engine.spec_manager.controller.suspended_runs = suspended
        for each in params:
            llm.engine.add(PROMPT, each)
        llm.engine.step()
        assert len(lookups) == count
        lookups.clear()
        for name in list(llm.engine.parents):
            llm.engine.abort(name)


@FAST
def test_a_batch_size_that_was_not_measured_drops_no_drafter(
    tiny_llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first run drafts nothing, to be measured: that says nothing about drafts."""
    monkeypatch.setattr(AdaptiveController, "draft_latency", lambda self, method: Dear())
    monkeypatch.setattr(Cpu, "defaults", replace(Cpu.defaults, decode_steps=4))
    head = tiny_heads.make("eagle3", tmp_path)
    llm = tiny_llm(speculate=with_options("eagle3", adaptive="yes", **head), decode_steps=4)
    runs = watch_runs(llm)
    requests = [llm.engine.add(prompt, replace(BASE, max_tokens=40)) for prompt in PROMPTS[:2]]
    while len(runs) < 2:  # the second one is timed
        llm.engine.step()
    found = [llm.engine.parents[name].detokenizers[0].request for name in requests]
    assert all(request.width for request in found)
    for name in requests:
        llm.engine.abort(name)


@FAST
def test_preemption_and_chunked_prefill_keep_the_text(tiny_llm, tmp_path: Path) -> None:
    speculate = with_options("eagle3", adaptive="no", **tiny_heads.make("eagle3", tmp_path))
    options = {"speculate": speculate, "cache_tokens": 16 * 7, "max_step_tokens": 16}
    stepwise, llm = tiny_llm(**options), tiny_llm(**options, decode_steps=6)
    expected, outputs = (one.generate(PROMPTS, MULTI_STEP) for one in (stepwise, llm))
    assert [visible(output) for output in outputs] == [visible(output) for output in expected]
    assert sum(output.stats.preemptions for output in outputs) > 0
    llm.engine.scheduler.check()


@FAST
def test_prefix_cache_serves_pages_of_multi_step_runs(tiny_llm, tmp_path: Path) -> None:
    """Pages filled by multi-step runs serve the next request, including the drafter's KV."""
    speculate = with_options("eagle3", adaptive="no", **tiny_heads.make("eagle3", tmp_path))
    params = replace(BASE, max_tokens=40)
    stepwise, llm = tiny_llm(speculate=speculate), tiny_llm(speculate=speculate, decode_steps=7)
    text = PROMPT + stepwise.generate(PROMPT, params)[0].completions[0].token_ids
    assert llm.generate(PROMPT, params)[0].completions[0].token_ids == text[len(PROMPT) :]
    outputs = [one.generate(text[:-1], params)[0] for one in (stepwise, llm)]
    assert outputs[1].stats.cached_tokens >= len(text) // 16 * 16 - 16
    assert visible(outputs[0]) == visible(outputs[1])
    assert count(outputs[0]) == count(outputs[1])


# Parameters whose effect follows the text: each in a request of its own, and beside one that has none.
FOLLOWING = ("greedy", "warm", "penalties", "bias", "allowed", "words", "stops", "ends", "two", "narrow")


@pytest.mark.parametrize("method", ["none", "eagle3", "ngram"])
def test_processors_and_logprobs_follow_the_texts_on_the_device(tiny_llm, tmp_path: Path, method: str) -> None:
    """Batches of all of them, of one alone, and of some that join while others run."""
    options: dict[str, object] = {} if method == "none" else {"width": 3, "adaptive": "no"}
    if method == "eagle3":
        options |= tiny_heads.make("eagle3", tmp_path)
    speculate = with_options(method, **options) if options else method
    stepwise, llm = tiny_llm(speculate=speculate), tiny_llm(speculate=speculate, decode_steps=4, max_requests=6)
    runs = watch_runs(llm)
    params = [replace(MIX[name], max_tokens=12 + index) for index, name in enumerate(FOLLOWING)]
    params += [replace(BASE, max_tokens=20, **LEAST[index % len(LEAST)]) for index in range(6)]
    prompts = [PROMPTS[index % 4] for index in range(len(params))]
    for first, last in ((0, len(params)), (2, 3), (5, 6), (1, 4)):
        runs.clear()
        expected, outputs = (one.generate(prompts[first:last], params[first:last]) for one in (stepwise, llm))
        for output, meant, own in zip(outputs, expected, params[first:last], strict=True):
            assert visible(output) == visible(meant), own
            if not own.stop and own.speculate_width is None:  # a run ends after a stop string, and has one width
                assert count(output) == count(meant), own
        assert runs and max(runs) > 1
    llm.engine.scheduler.check()


LEAST: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "temperature": 0.7},
    {"presence_penalty": -0.31, "frequency_penalty": 0.17, "logit_bias": {7: 0.1, 40: -0.3}},
    {"min_tokens": 9, "ignore_eos": False, "logit_bias": {2: 6.0}},
]


@FAST
def test_rows_that_need_the_host_run_beside_others(tiny_llm, tmp_path: Path) -> None:
    """Rows that need the host share a batch with rows that do not; each gives the same text as alone."""
    speculate = with_options("eagle3", adaptive="no", **tiny_heads.make("eagle3", tmp_path))
    structured = replace(BASE, structured=StructuredOutput("regex", "[a-f]{40}"), ignore_eos=False)
    params = [replace(BASE, speculate="suffix"), structured, replace(BASE, logprobs=2), replace(BASE, speculate=False)]
    stepwise, llm = tiny_llm(speculate=speculate), tiny_llm(speculate=speculate, decode_steps=4)
    for chosen in (params, params[:1] + params[3:], params[:2]):
        expected, outputs = (one.generate([PROMPT] * len(chosen), chosen) for one in (stepwise, llm))
        assert [visible(output) for output in outputs] == [visible(output) for output in expected]


@FAST
@pytest.mark.parametrize("name", ["draft_model", "eagle3", "dflash"])
def test_drafters_with_kv_draft_again_after_runs_without_drafts(tiny_llm, tmp_path: Path, name: str) -> None:
    """Alternate multi-step runs with and without drafts over several requests."""
    speculate = with_options(name, adaptive="no", **tiny_heads.make(name, tmp_path))
    stepwise, llm = tiny_llm(speculate=speculate), tiny_llm(speculate=speculate, decode_steps=3)
    widths = cycle([0, 3, 0, 2])
    llm.engine.runner.multi_step.planner.width = lambda name, requests, others, steps: next(widths)  # type: ignore[method-assign]
    params = [replace(BASE, max_tokens=36)] * 3
    expected, outputs = (one.generate(PROMPTS[:3], params) for one in (stepwise, llm))
    assert [visible(output) for output in outputs] == [visible(output) for output in expected]
    method_stats = [output.stats.speculation for output in outputs]
    assert all({0, 2, 3} <= set(spec_stats.widths) for spec_stats in method_stats)
    if name == "draft_model":  # it is the target itself, so every draft token is right
        assert all(spec_stats.accepted == spec_stats.drafted for spec_stats in method_stats)
