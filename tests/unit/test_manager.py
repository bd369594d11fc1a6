"""Who drafts for a request, what that is refused for, and what is counted of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tiny_heads
from laws.mix import with_options
from outrider import SamplingParams, UserError
from outrider.speculation.interface import DraftBatch
from outrider.types import SpecStats

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = [5, 6, 7, 8] * 6


@pytest.mark.parametrize(
    ("engine", "params", "method"),
    [
        ("none", {}, ""),
        ("ngram", {}, "ngram"),
        ("ngram", {"speculate": True}, "ngram"),
        ("ngram", {"speculate": False}, ""),
        ("ngram", {"speculate": "none"}, ""),
        ("ngram", {"speculate": "suffix"}, "suffix"),
        ("ngram", {"speculate_width": 0}, ""),
        ("none", {"prediction": PROMPT}, "prediction"),
        ("ngram", {"prediction": "abc"}, "prediction"),
        ("ngram", {"prediction": "abc", "speculate": "prediction"}, "prediction"),
        ("ngram", {"prediction": "abc", "speculate": False}, ""),
    ],
)
def test_the_request_decides_then_what_it_brings_then_the_engine(tiny_llm, engine: str, params, method: str) -> None:
    assert tiny_llm(speculate=engine).engine.spec_manager.assign(replace(PARAMS, **params)).method == method


def test_a_method_of_ones_own_may_draft_from_what_a_request_brings(tiny_llm, tmp_path, monkeypatch) -> None:
    source = "from outrider.speculation.methods.prediction import Options, build\nDRAFTS_FROM = 'prediction'\n"
    (tmp_path / "own_drafters").mkdir()
    (tmp_path / "own_drafters" / "expecting.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    spec_manager = tiny_llm(speculate="own_drafters.expecting:width=3").engine.spec_manager
    assigned = spec_manager.assign(replace(PARAMS, prediction=PROMPT))
    assert (assigned.method, assigned.width) == ("own_drafters.expecting", 3)


def test_a_shipped_head_needs_no_model_option(tiny_llm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("outrider.catalog.shipped.find", lambda model, method: tmp_path if method == "eagle3" else None)
    with pytest.raises(UserError, match=r"`eagle3`, which has a head that ships .* with `speculate=eagle3`$"):
        tiny_llm().generate(PROMPT, replace(PARAMS, speculate="eagle3"))
    with pytest.raises(UserError, match=r"`medusa`, which needs a model .* with `speculate=medusa:model=...`$"):
        tiny_llm().generate(PROMPT, replace(PARAMS, speculate="medusa"))


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_head_given_as_a_draft_model_is_named_by_its_method(tiny_llm, tmp_path, method: str) -> None:
    head = tiny_heads.make(method, tmp_path)["model"]
    with pytest.raises(UserError) as refusal:
        tiny_llm(speculate=f"draft_model:model={head}")
    assert str(refusal.value) == (
        f"`{head}` is a head of the method `{method}`, not a model: draft with it by `{method}:model={head}`"
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"speculate": "guesswork"}, "no method called `guesswork`"),
        ({"speculate": "eagle3"}, "`eagle3`, which needs a model and was not loaded (loaded: `ngram`)"),
        ({"speculate": "http.server"}, "`http.server`, which was not loaded (loaded: `ngram`)"),
        ({"speculate": "suffix", "prediction": "abc"}, "`suffix` does not read `prediction`"),
    ],
)
def test_what_a_request_cannot_have(tiny_llm, params, message: str) -> None:
    llm = tiny_llm(speculate="ngram")
    with pytest.raises(UserError) as refusal:
        llm.generate(PROMPT, replace(PARAMS, **params))
    assert message in str(refusal.value)
    assert llm.generate(PROMPT, PARAMS)[0].completions[0].finish_reason == "length"


def test_counts_by_method_are_those_of_its_requests(tiny_llm) -> None:
    llm = tiny_llm(speculate="ngram:adaptive=no")
    asked = [PARAMS, replace(PARAMS, speculate="suffix"), replace(PARAMS, speculate=False), PARAMS]
    outputs = llm.generate([PROMPT] * 4, asked)
    for method in ("ngram", "suffix"):
        expected = SpecStats()
        for output in outputs:
            if output.stats.method == method:
                expected.add(output.stats.speculation)
        assert llm.method_stats[method] == expected
        assert expected.drafted >= expected.accepted and expected.steps + expected.accepted >= 12
    assert set(llm.method_stats) == {"ngram", "suffix"}
    assert llm.method_stats["ngram"].drafted == sum(llm.method_stats["ngram"].drafted_per_depth) > 0


def test_lookups_that_find_nothing_are_made_less_often(tiny_llm, monkeypatch) -> None:
    llm = tiny_llm(speculate="ngram:width=3")
    spec_manager, calls = llm.engine.spec_manager, []

    def propose(contexts, last, hidden) -> DraftBatch:
        calls.append(contexts[0].length)
        return DraftBatch([[] for _ in contexts])

    monkeypatch.setattr(spec_manager.methods["ngram"], "propose", propose)
    monkeypatch.setattr(spec_manager.controller.latency, "seconds", lambda *_: 1e-9)  # of a step: lookups cost more
    llm.generate(PROMPT, replace(PARAMS, max_tokens=20))
    assert calls == [len(PROMPT) + count for count in (1, 3, 6, 10, 14, 18)]  # pauses grow up to a width
    calls.clear()
    monkeypatch.setattr(spec_manager.controller.latency, "seconds", lambda *_: 1e9)
    llm.generate(PROMPT, replace(PARAMS, max_tokens=20))
    assert len(calls) == 20
    assert not spec_manager._pauses


def test_steps_that_are_recorded_are_not_measured(tiny_llm, monkeypatch) -> None:
    """Recording takes 1 to 5 ms, which the steps after it do not."""
    llm = tiny_llm(speculate="ngram", backend="cpu")
    llm.engine.runner.single_row.recordings._recorded.clear()
    measured = []
    monkeypatch.setattr(llm.engine.spec_manager, "observe", lambda rows, seconds: measured.append(rows[0].start))
    llm.generate(PROMPT, replace(PARAMS, max_tokens=5, speculate=False))
    assert measured == [0, *range(len(PROMPT) + 1, len(PROMPT) + 4)]


def test_reading_a_prompt_or_a_recording_is_not_taken_for_the_latency_of_a_draft(
    tiny_llm, tmp_path, monkeypatch
) -> None:
    head = tiny_heads.make("draft_model", tmp_path)["model"]
    llm = tiny_llm(speculate=f"draft_model:model={head},width=2", backend="cpu")
    spec_manager, drafted, measured, recorded = llm.engine.spec_manager, [], [], []
    controller, drafter = spec_manager.controller, spec_manager.methods["draft_model"]
    propose = drafter.propose
    drafter._recordings._recorded.clear()

    def counted(contexts, last, hidden) -> DraftBatch:
        drafted.append(len(contexts[0].request.output))
        batch = propose(contexts, last, hidden)
        if batch.recorded:
            recorded.append(drafted[-1])
        return batch

    monkeypatch.setattr(drafter, "propose", counted)
    monkeypatch.setattr(controller, "begin", lambda *_: None)  # the prompt is read
    monkeypatch.setattr(controller, "plan", lambda requests, limits, others: [min(limits)] * len(requests))
    monkeypatch.setattr(controller, "observe_draft", lambda *_: measured.append(drafted[-1]))
    llm.generate(PROMPT, PARAMS)
    assert drafted[0] == 0 and len(drafted) > 3 and recorded
    assert measured == [count for count in drafted[1:] if count not in recorded]


def test_a_drafter_that_does_not_pay_lets_go(tiny_llm, tmp_path, monkeypatch) -> None:
    """Its KV need not cover the rest of the text, and its pages are not read."""
    head = tiny_heads.make("draft_model", tmp_path)["model"]
    llm = tiny_llm(speculate=f"draft_model:model={head}")
    expected = tiny_llm().generate(PROMPT, PARAMS)[0].completions[0].token_ids
    controller, asked = llm.engine.spec_manager.controller, []
    monkeypatch.setattr(controller, "suspendable", set())  # as where it cannot rest
    monkeypatch.setattr(controller, "plan", lambda requests, widths, others: [0] * len(requests))
    monkeypatch.setattr(
        controller, "should_drop", lambda request, requests: asked.append(request) is None and len(asked) > 3
    )
    output = llm.generate(PROMPT, PARAMS)[0]
    assert output.completions[0].token_ids == expected and len(asked) == 4
    monkeypatch.undo()
    again = llm.generate(PROMPT + expected, PARAMS)[0]  # the pages that it did not follow are not taken for its own
    assert 16 <= again.stats.cached_tokens <= len(PROMPT) + 3


@pytest.mark.parametrize("suspendable", [True, False])
def test_stats_say_why_nothing_was_drafted(tiny_llm, tmp_path, monkeypatch, suspendable: bool) -> None:
    """Each step without a draft is counted, those after the drafter was dropped included."""
    head = tiny_heads.make("draft_model", tmp_path)["model"]
    llm = tiny_llm(speculate=f"draft_model:model={head}")
    controller = llm.engine.spec_manager.controller
    seconds = lambda batch_size, drafted: [1.0 + 9.0 * count for count in range(drafted + 1)]  # noqa: E731
    monkeypatch.setattr(controller.latency, "table", seconds)
    if not suspendable:
        monkeypatch.setattr(controller, "suspendable", set())
        monkeypatch.setattr(controller, "should_drop", lambda request, requests: len(request.output) > 3)
    spec_stats = llm.generate(PROMPT, replace(PARAMS, max_tokens=40))[0].stats.speculation
    assert spec_stats.suspension is not None and spec_stats.suspension.rows == 2
    assert spec_stats.suspension.cost == pytest.approx(10, rel=0.1)
    assert 30 <= spec_stats.suspended <= spec_stats.widths[0] < 40 + 1
    assert llm.method_stats["draft_model"].suspension == spec_stats.suspension


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("by", ["request", "engine"])
def test_drafts_that_do_not_pay_are_made_if_always_draft_is_set(
    tiny_llm, tmp_path, monkeypatch, method: str, by: str
) -> None:
    options = "" if method == "ngram" else f":model={tiny_heads.make(method, tmp_path)['model']}"
    seconds = lambda self, batch_size, drafted: [1.0 + 9.0 * count for count in range(drafted + 1)]  # noqa: E731
    monkeypatch.setattr("outrider.speculation.adaptive.latency_model.LatencyModel.table", seconds)
    llm = tiny_llm(speculate=f"{method}{options}", always_draft=by == "engine")
    params = replace(PARAMS, max_tokens=40)
    forced, usual = llm.generate([PROMPT] * 2, [replace(params, always_draft=by == "request"), params])
    assert forced.completions[0].token_ids == usual.completions[0].token_ids
    drafted = [output.stats.speculation.drafted for output in (forced, usual)]
    assert forced.stats.speculation.suspended == 0 and drafted[0] > 10
    assert drafted[1] < 10 if by == "request" else drafted[1] == drafted[0]


@pytest.mark.parametrize("verify", ["exact", "rejection"])
def test_found_drafts_beside_drawn_ones(tiny_llm, tmp_path, verify: str) -> None:
    head = tiny_heads.make("draft_model", tmp_path)["model"]
    llm = tiny_llm(speculate=f"draft_model:model={head},draft=probabilistic,verify={verify},adaptive=no")
    warm = replace(PARAMS, temperature=0.7, seed=3)
    outputs = llm.generate([PROMPT] * 3, [warm, replace(warm, speculate="ngram"), replace(warm, prediction=PROMPT)])
    assert [output.stats.method for output in outputs] == ["draft_model", "ngram", "prediction"]
    assert all(output.stats.speculation.drafted for output in outputs)


@pytest.mark.parametrize("method", ["ngram", "suffix", "eagle3", "dspark", "medusa", "draft_model", "eagle3 tree"])
def test_nothing_is_drafted_beyond_the_drafters_context(tiny_llm, tmp_path, method: str) -> None:
    name, _, tree = method.partition(" ")
    options = {} if name in ("ngram", "suffix") else tiny_heads.make(name, tmp_path)
    options |= {"branches": 2, "width": 4} if tree else {"width": 3}
    options |= {"least": 0} if name == "suffix" else {}
    prompt, params = [3, 4, 5] * 4, replace(PARAMS, max_tokens=24, logit_bias={3: 50, 4: 50, 5: 50}, trace=True)
    texts = []
    for limits in ({}, {"max_context": 20}):
        llm = tiny_llm(speculate=with_options(name, adaptive="no", **options, **limits))
        [output] = llm.generate(prompt, params)
        length, drafted = len(prompt), 0
        for step in output.completions[0].steps or []:
            if step.draft is not None and step.draft.tokens:
                assert not limits or length < 20
                drafted += 1
            length += len(step.tokens)
        assert drafted > 0
        texts.append(output.completions[0].token_ids)
    assert texts[0] == texts[1]
