"""Suspended drafters: when, for how long, how they catch up, and that outputs do not change."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fake_target import SIZE, Stage, continuation
from test_autoregressive import Same

import tiny
import tiny_heads
from outrider import LLM, SamplingParams
from outrider.kernels import Batch, LayerPages, load
from outrider.request import Request
from outrider.speculation import DraftBatch, DraftContext
from outrider.speculation.adaptive import AdaptiveController
from outrider.speculation.adaptive.backoff import EXPLORATION_SHARE, MAX_PAUSE
from outrider.speculation.adaptive.latency_model import LatencyModel
from outrider.speculation.drafters.autoregressive import Autoregressive
from outrider.speculation.drafters.catch_up import CatchUp
from outrider.types import Draft

WIDTH = 3


# ---- catch-up ----


def test_the_latest_states_are_kept_and_no_more() -> None:
    buffer, states = CatchUp(4), torch.arange(40.0).view(20, 2)
    for start in range(3, 9):
        buffer.add(start, start + 1, states[start : start + 1])
    assert (buffer.start, buffer.stop) == (5, 9)
    assert torch.equal(buffer.states(), states[5:9])
    buffer.add(9, 19, states[9:19])  # a piece of a prompt
    assert (buffer.start, buffer.stop) == (15, 19) and torch.equal(buffer.states(), states[15:19])
    buffer.add(2, 3, states[2:3])  # its pages were taken away, and it begins anew
    assert (buffer.start, buffer.stop) == (2, 3) and torch.equal(buffer.states(), states[2:3])


def suspended(prompt: int) -> tuple[Stage, Autoregressive, Request]:
    """A drafter that is the target itself, and has followed the first pages of a text."""
    stage = Stage(load("cpu"), can_suspend=True)
    proposer = Autoregressive(Same(stage), stage.target, WIDTH)
    stage.begin(proposer)
    request = stage.request(tiny.prompt(prompt))
    stage.reach(request, prompt + WIDTH + 1)
    proposer.propose([DraftContext(request, 0, 2 * SIZE + 1, [], 0, 0)], torch.tensor([0]), None)
    return stage, proposer, request


def draft(proposer: Autoregressive, request: Request, start: int) -> list[int]:
    """After all of the text but its last token has run, of which it is shown what stands from `start` on."""
    newest = request.prompt.pop()
    context = DraftContext(request, start, len(request.prompt), [newest], WIDTH, 0)
    found = proposer.propose([context], torch.tensor([newest], dtype=torch.int32), None)
    request.prompt.append(newest)
    return found.rows(found.tokens)[0]


@pytest.mark.parametrize("length", range(4 * SIZE + 1, 6 * SIZE))
def test_catch_up_reads_all_positions_kept_and_leaves_out_whole_pages(length: int) -> None:
    stage, proposer, request = suspended(length)
    text = request.prompt
    whole = continuation(stage.model, request, text, WIDTH)
    assert draft(proposer, request, 2 * SIZE + 1) == whole
    stage, proposer, request = suspended(length)
    start = length - SIZE - 1
    page = -(-start // SIZE)  # the first whole one that it is shown
    seen = text[: 2 * SIZE] + text[page * SIZE :]
    assert draft(proposer, request, start) == continuation(stage.model, request, seen, WIDTH)


def test_pages_that_are_handed_on_are_seen_where_they_were_followed() -> None:
    stage, proposer, first = suspended(6 * SIZE + 2)
    text = first.prompt
    draft(proposer, first, 4 * SIZE)  # has left out the third and the fourth page
    heir = stage.request([*text[: 6 * SIZE], 5, 6, 7], seed=1)
    heir.pages = first.pages[:6]
    stage.reach(heir, heir.length + WIDTH + 1)
    seen = text[: 2 * SIZE] + text[4 * SIZE : 6 * SIZE] + [5, 6, 7]
    assert draft(proposer, heir, 6 * SIZE) == continuation(stage.model, heir, seen, WIDTH)
    other = stage.request([9, *text[1 : 6 * SIZE], 5, 6, 7], seed=2)  # the same pages with another text
    other.pages = list(heir.pages)
    assert draft(proposer, other, 6 * SIZE) == continuation(stage.model, other, [5, 6, 7], WIDTH)


# ---- whether to draft ----


def stays_suspended(controller: AdaptiveController, request: Request) -> bool:
    """Count a step of a suspended request, and return whether it has no draft."""
    if not controller.suspended_steps(request):
        return False
    controller.skip(request)
    return controller.suspended_steps(request) > 0


def test_a_probe_that_finds_nothing_stops() -> None:
    controller, request = suspendable(0.4, 0.2), Request("r", [1], SamplingParams(), 0, method="m")
    drafts: list[int] = []  # of each probe
    for _ in range(1200):
        if controller.suspended_steps(request):
            if stays_suspended(controller, request):
                continue
            drafts.append(0)
        if controller.plan([request], [1])[0]:
            controller.observe_draft("m", 1, 0.2)
            controller.trim([request], [None])  # the drafter ended the draft before its first token
            if drafts:
                drafts[-1] += 1
    assert len(drafts) > 2 and max(drafts) == 1


def suspendable(slope: float, drafting: float, batch_size: int = 1) -> AdaptiveController:
    controller = AdaptiveController("m")
    for _ in range(64):
        for drafted in range(5):
            controller.latency.observe(batch_size, drafted, 1 + slope * drafted)
            controller.draft_latency("m").observe(drafted, drafting * drafted)
    return controller


def drafted_steps(controller: AdaptiveController, confidences: list[float], steps: int, spent: float) -> list[int]:
    """Return in how many steps each request drafts; its confidences are right."""
    requests = [Request(str(index), [1], SamplingParams(), 0, method="m") for index in range(len(confidences))]
    counts, coin = [0] * len(requests), random.Random(1)
    for _ in range(steps):
        active = [one for one in requests if not stays_suspended(controller, one)]
        if not active:
            continue
        widths = controller.plan(active, [1] * len(active), len(requests) - len(active))
        drafts = [
            Draft([1], confidence=[confidences[int(one.id)]]) if width else None
            for one, width in zip(active, widths, strict=True)
        ]
        if any(widths):
            controller.observe_draft("m", 1, spent)
        verified = controller.trim(active, drafts, len(requests) - len(active))
        for one, draft, width in zip(active, drafts, verified, strict=True):
            counts[int(one.id)] += draft is not None
            if draft is not None and width:
                controller.learn(one, draft, [0] if coin.random() < confidences[int(one.id)] else [])
    return counts


def test_the_latency_of_a_draft_is_weighed_before_it_is_made() -> None:
    assert drafted_steps(suspendable(0.3, 0.2), [0.8], 300, 0.2)[0] > 250
    assert drafted_steps(suspendable(0.3, 0.6), [0.8], 300, 0.6)[0] < 60  # the draft alone takes too long
    assert drafted_steps(suspendable(0.1, 0.2), [0.05], 300, 0.2)[0] < 60
    bad, good = drafted_steps(suspendable(0.12, 0.2, 2), [0.05, 0.8], 300, 0.2)
    assert bad < 60 < 250 < good


@pytest.mark.parametrize(("drafting", "pays"), [(0.1, True), (0.4, False)])
def test_drafts_that_are_cut_half_of_the_time_cost_no_verification_then(drafting: float, pays: bool) -> None:
    """Half of the drafts have a token to verify: 1.475 tokens in 1 + 0.4 / 2 + `drafting` plain steps."""
    controller, request = suspendable(0.4, drafting), Request("r", [1], SamplingParams(), 0, method="m")
    coin, drafted = random.Random(2), 0
    for _ in range(600):
        if stays_suspended(controller, request) or not controller.plan([request], [1])[0]:
            continue
        drafted += 1
        controller.observe_draft("m", 1, drafting)
        sure = coin.random() < 0.5
        draft = Draft([1], confidence=[0.95]) if sure else None
        if controller.trim([request], [draft])[0] and draft is not None:
            controller.learn(request, draft, [0] if coin.random() < 0.95 else [])
    assert drafted > 500 if pays else drafted < 120


def test_drafts_that_always_end_early_are_planned_narrower() -> None:
    """A block takes the time of its planned width, so tokens that are always cut are not worth planning."""
    controller, request = suspendable(0.1, 0.2), Request("r", [1], SamplingParams(), 0, method="m")
    planned = []
    for _ in range(60):
        planned.append(controller.plan([request], [4])[0])
        draft = Draft([1], confidence=[0.95])
        assert controller.trim([request], [draft]) == [1]
        controller.learn(request, draft, [0])
    assert planned[0] > 1 and planned[-40:].count(1) >= 36  # now and then a wider one is tried


def test_a_request_whose_drafts_do_not_pay_is_suspended_and_found_again_when_they_do() -> None:
    controller, request = suspendable(0.4, 0.2), Request("r", [1], SamplingParams(), 0, method="m")
    drafted, easy = [], 1000
    for step in range(easy + 500):
        if stays_suspended(controller, request):
            continue
        confidence = 0.05 if step < easy else 0.95
        if not controller.plan([request], [4])[0]:
            continue
        draft = Draft([1], confidence=[confidence])
        drafted.append(step)
        controller.observe_draft("m", 1, 0.2)
        if controller.trim([request], [draft if confidence > controller.thresholds("m", 1)[0] else None])[0]:
            controller.learn(request, draft, [0] if step >= easy else [])
    before, after = [step for step in drafted if step < easy], [step for step in drafted if step >= easy]
    assert len(before) < 40 and max(late - early for early, late in pairwise(drafted)) <= MAX_PAUSE + 2
    assert after[0] <= easy + MAX_PAUSE and len(after) > 0.8 * (easy + 500 - after[0])


# ---- whether to read a prompt ----


def answer(
    controller: AdaptiveController, name: str, accepted: bool, tokens: int = 60, reading: float = 6.0
) -> Request:
    """Decode a text, one drafted token a step; `reading`: seconds that the prompt takes if the drafter reads it."""
    request = Request(name, [1] * 20, SamplingParams(), 0, method="m", width=1)
    controller.begin(request, 20)
    if not controller.suspended_steps(request):
        controller.observe_reading("m", 20, reading)
    for _ in range(tokens):
        request.output.append(1)
        if stays_suspended(controller, request) or not controller.plan([request], [1])[0]:
            continue
        request.spec_stats.drafted += 1
        controller.observe_draft("m", 1, 0.2)
        if controller.trim([request], [Draft([1])])[0]:
            controller.learn(request, Draft([1]), [0] if accepted else [])
    controller.forget(request)
    return request


@pytest.mark.parametrize(("reading", "texts"), [(0.3, 2), (6.0, 18)])
def test_an_easy_text_after_hard_ones_is_read_and_drafted_for_from_its_beginning(reading: float, texts: int) -> None:
    controller = suspendable(0.4, 0.2)
    hard = [answer(controller, str(index), accepted=False, reading=reading) for index in range(4 + 4 * texts)]
    probes = sum(request.spec_stats.drafted for request in hard[4:])
    cost = probes * (reading + 0.4) / sum(len(request.output) for request in hard[4:])
    assert probes >= 3 and cost <= 1.05 * EXPLORATION_SHARE, "probes cost more than their share of the time"
    easy = [answer(controller, str(index), accepted=True, reading=reading) for index in range(2 * texts)]
    first = next(index for index, request in enumerate(easy) if request.spec_stats.drafted > 50)
    assert first < texts
    assert all(request.spec_stats.drafted > 50 for request in easy[first:]), "drafts pay, so all prompts are read"


def test_what_a_resumed_drafter_reads_is_counted_as_lost() -> None:
    """A probe within a text lengthens its pause, and leaves less for probes at the beginning of other texts."""
    pauses = []
    for catch_up in (0.2, 1.2):  # seconds of the call: those of a draft, and a second more
        controller, request = suspendable(0.4, 0.2), Request("r", [1], SamplingParams(), 0, method="m")
        controller.learn(request, Draft([1]), [])
        assert controller.plan([request], [1]) == [1]
        controller.observe_catch_up([request], 1, catch_up, 1)
        controller.trim([request], [Draft([1])])
        controller.learn(request, Draft([1]), [])
        assert controller.plan([request], [1]) == [0]
        pauses.append(controller.suspended_steps(request))
    assert pauses == pytest.approx([0.6 / EXPLORATION_SHARE, 1.6 / EXPLORATION_SHARE], rel=0.05)


@pytest.mark.parametrize("verification", [0.1, 0.6])  # seconds of a further row: drafts are expected to pay, or not
def test_the_first_prompt_is_not_read_if_drafts_cannot_save_that_time(verification: float) -> None:
    controller = suspendable(verification, 0.1)
    controller.observe_reading("m", 1, 0.3)
    controller.observe_reading("m", 20, 6.0)
    cases = ((20, 10), (20, 100), (100, 100), (100, 1000))  # tokens of the prompt and of the answer
    suspended = {}
    for prompt, tokens in cases:
        request = Request("r", [1] * prompt, SamplingParams(max_tokens=tokens), 0, method="m", width=1)
        controller.begin(request, prompt)
        suspended[prompt, tokens] = controller.suspended_steps(request) > 0
        reason = request.spec_stats.suspension
        assert (reason is not None) == suspended[prompt, tokens]
        assert reason is None or ("reading the prompt" in str(reason)) == (verification < 0.5)
        controller.forget(request)
    assert suspended == dict(zip(cases, (True, False, True, False), strict=True))


def test_a_long_prompt_is_not_read_for_an_answer_that_must_be_short() -> None:
    controller = suspendable(0.1, 0.1)
    for index in range(4):
        answer(controller, str(index), accepted=True, reading=6.0)
    suspended = {}
    for tokens in (4, 400):
        request = Request(f"{tokens}", [1] * 20, SamplingParams(max_tokens=tokens), 0, method="m", width=1)
        controller.begin(request, 20)
        suspended[tokens] = controller.suspended_steps(request) > 0
    assert suspended == {4: True, 400: False}


def test_a_draft_that_looked_too_long_is_corrected_although_each_probe_resumes_the_drafter() -> None:
    controller, request = suspendable(0.1, 2.0), Request("r", [1], SamplingParams(), 0, method="m")
    for _ in range(40):
        controller.observe_catch_up([request], 1, 0.3, 1)
    assert controller.draft_latency("m").seconds(1) == pytest.approx(0.3)
    for _ in range(40):
        controller.observe_catch_up([request], 1, 3.0, 1)
    assert controller.draft_latency("m").seconds(1) == pytest.approx(0.3), "a longer call caught up"


# ---- in the engine ----


@pytest.mark.parametrize(("cache_tokens", "tokens"), [(256, [1, 16]), (16, [])])
def test_reading_is_measured_at_start_up_if_a_prompt_fits(
    tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_tokens: int, tokens: list[int]
) -> None:
    head, measured = tiny_heads.make("draft_model", tmp_path)["model"], []
    monkeypatch.setattr(AdaptiveController, "observe_reading", lambda self, *found: measured.append(found))
    LLM(tiny_folder(), backend="cpu", speculate=f"draft_model:model={head},width=2", cache_tokens=cache_tokens)
    assert [(method, count) for method, count, _ in measured] == [("draft_model", count) for count in tokens]
    assert all(seconds > 0 for *_, seconds in measured)


@pytest.mark.parametrize("reading", [0.0, 60.0])
def test_a_prompt_in_several_chunks_is_read_whole_or_not_at_all_after_hard_texts(
    tiny_llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reading: float
) -> None:
    head = tiny_heads.make("draft_model", tmp_path)["model"]
    llm = tiny_llm(speculate=f"draft_model:model={head},width=1", max_step_tokens=20)
    spec_manager, read = llm.engine.spec_manager, []
    proposer, controller = spec_manager.methods["draft_model"], suspendable(0.4, 0.2)
    controller.suspendable = {"draft_model"}
    curve = controller.draft_latency("m")
    monkeypatch.setattr(controller, "draft_latency", lambda method: curve)
    monkeypatch.setattr(spec_manager, "controller", controller)
    for index in range(40):
        hard = Request(str(index), [1], SamplingParams(), 0, method="draft_model", width=1)
        controller.learn(hard, Draft([1]), [])
        controller.forget(hard)
    if reading:
        controller.observe_reading("draft_model", 20, reading)

    def propose(contexts: list[DraftContext], last: torch.Tensor, hidden: torch.Tensor | None) -> DraftBatch:
        read.extend(range(contexts[0].start, contexts[0].computed))
        return DraftBatch([[] for _ in contexts])

    monkeypatch.setattr(proposer, "propose", propose)
    llm.generate(tiny.prompt(70), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    assert read[:70] == ([] if reading else list(range(70)))


def test_steps_with_probes_are_not_counted_as_suspended(
    tiny_llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gentle = lambda self, batch_size, drafted: [1.0 + 0.03 * count for count in range(drafted + 1)]  # noqa: E731
    monkeypatch.setattr(LatencyModel, "table", gentle)  # random texts accept less than a draft costs
    monkeypatch.setattr(AdaptiveController, "observe_catch_up", lambda *_: None)  # pauses are the same on any machine
    head = tiny_heads.make("medusa", tmp_path)["model"]
    llm = tiny_llm(speculate=f"medusa:model={head},draft=greedy")
    params = SamplingParams(max_tokens=90, temperature=30.0, seed=1, ignore_eos=True)
    spec_stats = llm.generate(tiny.prompt(9), params)[0].stats.speculation
    assert spec_stats.drafted and spec_stats.suspended <= spec_stats.widths[0], spec_stats


def test_chunks_of_a_prompt_are_not_counted_as_suspended_steps(
    tiny_llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steep = lambda self, batch_size, drafted: [1.0 + 9.0 * count for count in range(drafted + 1)]  # noqa: E731
    monkeypatch.setattr(LatencyModel, "table", steep)
    head = tiny_heads.make("eagle3", tmp_path)["model"]
    llm = tiny_llm(speculate=f"eagle3:model={head}", max_step_tokens=2)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    spec_stats = llm.generate(tiny.prompt(33), params)[0].stats.speculation
    assert 0 < spec_stats.suspended <= spec_stats.widths[0] == spec_stats.steps == 6


@pytest.mark.parametrize("steps", [0, 40])
def test_the_target_keeps_no_states_of_a_prompt_that_is_not_read(
    tiny_llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    head = tiny_heads.make("eagle3", tmp_path)["model"]
    llm = tiny_llm(speculate=f"eagle3:model={head}")
    model, controller = llm.engine.runner.model, llm.engine.spec_manager.controller
    kept: list[tuple[int, ...]] = []  # layers, by step
    begun: list[tuple[Request, int]] = []
    forward = model.forward

    def watched(batch: Batch, pages: list[LayerPages], aux_layers: tuple[int, ...] = ()) -> object:
        kept.append(tuple(aux_layers))
        return forward(batch, pages, aux_layers)

    monkeypatch.setattr(model, "forward", watched)
    monkeypatch.setattr(controller, "begin", lambda *found: begun.append(found))
    monkeypatch.setattr(controller, "suspended_steps", lambda request: steps if begun else 0)
    for _ in range(2):  # the second time two pages are cached
        llm.generate(tiny.prompt(33), SamplingParams(max_tokens=1, temperature=0))
    assert [tokens for _, tokens in begun] == [33, 1]
    assert kept and all((layers == ()) == (steps > 0) for layers in kept)  # the last token may run by replay


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "method", ["eagle3", "draft_model", "dspark", "medusa", "mtp", "peagle", "eagle3 tree", "dspark tree"]
)
@pytest.mark.parametrize("pause", [3, 40])
def test_texts_do_not_depend_on_how_long_a_drafter_is_suspended(
    tiny_llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, pause: int
) -> None:
    name, tree = method.removesuffix(" tree"), ",width=4,branches=2" if method.endswith("tree") else ""
    head = tiny_heads.make(name, tmp_path)["model"]
    llm = tiny_llm(speculate=f"{name}:model={head}{tree}")
    controller = llm.engine.spec_manager.controller
    assert name in controller.suspendable
    plans, suspended = 0, Counter[Request]()

    def plan(requests: list[Request], limits: list[int], others: int) -> list[int]:
        nonlocal plans
        plans += 1
        if plans % 4:
            return list(limits)
        suspended.update(dict.fromkeys(requests, pause))
        return [0] * len(requests)

    monkeypatch.setattr(controller, "plan", plan)
    monkeypatch.setattr(controller, "suspended_steps", lambda request: suspended[request])
    monkeypatch.setattr(controller, "skip", lambda request, steps, drafts=False: suspended.update({request: -steps}))
    monkeypatch.setattr(
        controller, "trim", lambda requests, drafts, others: [len(g.tokens) if g else 0 for g in drafts]
    )
    monkeypatch.setattr(controller, "thresholds", lambda method, batch_size: (0.0, 0.0, 0.0))
    params = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
    asked = [params, replace(params, temperature=0.8, seed=5), replace(params, max_tokens=30)]
    prompts = [tiny.prompt(length, length) for length in (5, 18, 33)]
    expected = [o.completions[0].token_ids for o in tiny_llm().generate(prompts, asked)]
    outputs = llm.generate(prompts, asked)
    assert [o.completions[0].token_ids for o in outputs] == expected
    spec_stats = outputs[0].stats.speculation
    assert spec_stats.widths.get(0, 0) >= 5 and spec_stats.drafted > 5
    if method == "draft_model":  # the target itself: what it was not shown is all that it can miss
        assert (spec_stats.accepted == spec_stats.drafted) == (pause == 3)
    again = llm.generate(prompts[0] + expected[0], asked[2])[0]  # over pages that were not all followed
    assert (
        again.completions[0].token_ids
        == tiny_llm().generate(prompts[0] + expected[0], asked[2])[0].completions[0].token_ids
    )
