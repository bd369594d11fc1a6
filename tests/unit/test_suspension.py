"""Drafters that rest: when, for how long, what they see of the text afterwards, and that no token of it changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_target import SIZE, Stage, continuation
from test_autoregressive import Same

import tiny
import tiny_heads
from outrider import SamplingParams
from outrider.kernels import load
from outrider.request import Request
from outrider.speculation import DraftContext
from outrider.speculation.adaptive import AdaptiveController
from outrider.speculation.adaptive.catch_up import Missed
from outrider.speculation.adaptive.latency_model import LatencyModel
from outrider.speculation.adaptive.suspension import LONGEST, PROBES, PROVEN, SHORTEST, Rest, Yields, paying
from outrider.speculation.drafters.autoregressive import Autoregressive
from outrider.types import Draft

WIDTH = 3


# ---- what was missed ----


def test_the_latest_states_are_kept_and_no_more() -> None:
    missed, states = Missed(4), torch.arange(40.0).view(20, 2)
    for start in range(3, 9):
        missed.add(start, start + 1, states[start : start + 1])
    assert (missed.start, missed.stop) == (5, 9)
    assert torch.equal(missed.states(), states[5:9])
    missed.add(9, 19, states[9:19])  # a piece of a prompt
    assert (missed.start, missed.stop) == (15, 19) and torch.equal(missed.states(), states[15:19])
    missed.add(2, 3, states[2:3])  # its pages were taken away, and it begins anew
    assert (missed.start, missed.stop) == (2, 3) and torch.equal(missed.states(), states[2:3])


def resting(prompt: int) -> tuple[Stage, Autoregressive, Request]:
    """A drafter that is the target itself, and has followed the first pages of a text."""
    stage = Stage(load("cpu"), lazy=True)
    proposer = Autoregressive(Same(stage), stage.target, WIDTH)
    stage.begin(proposer)
    request = stage.request(tiny.prompt(prompt))
    stage.reach(request, prompt + WIDTH + 1)
    proposer.propose([DraftContext(request, 0, 2 * SIZE + 1, [], 0, 0)], torch.tensor([0]), None)
    return stage, proposer, request


def draft(proposer: Autoregressive, request: Request, start: int) -> list[int]:
    """After all of the text but its last token has run, of which it is shown what stands from `start` on."""
    newest = request.prompt.pop()
    turn = DraftContext(request, start, len(request.prompt), [newest], WIDTH, 0)
    found = proposer.propose([turn], torch.tensor([newest], dtype=torch.int32), None)
    request.prompt.append(newest)
    return found.rows(found.tokens)[0]


@pytest.mark.parametrize("length", range(4 * SIZE + 1, 6 * SIZE))
def test_what_was_missed_is_read_in_one_go_or_left_out_page_by_page(length: int) -> None:
    stage, proposer, request = resting(length)
    text = request.prompt
    whole = continuation(stage.model, request, text, WIDTH)
    assert draft(proposer, request, 2 * SIZE + 1) == whole
    stage, proposer, request = resting(length)
    start = length - SIZE - 1
    page = -(-start // SIZE)  # the first whole one that it is shown
    seen = text[: 2 * SIZE] + text[page * SIZE :]
    assert draft(proposer, request, start) == continuation(stage.model, request, seen, WIDTH)


def test_pages_that_are_handed_on_are_seen_where_they_were_followed() -> None:
    stage, proposer, first = resting(6 * SIZE + 2)
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


def test_rests_double_up_to_a_bound_and_begin_short_again_after_many_drafts() -> None:
    rest = Rest(SHORTEST)
    lengths = []
    for _ in range(5):
        rest.begin()
        lengths.append(rest.left)
    assert lengths == [SHORTEST, 2 * SHORTEST, LONGEST, LONGEST, LONGEST]
    for _ in range(PROVEN - 1):
        rest.succeed()
    assert rest.patience == LONGEST
    rest.succeed()
    assert rest.patience == SHORTEST


def test_a_probe_goes_on_while_it_finds_something() -> None:
    rest = Rest(SHORTEST)
    assert not rest.probe()  # nobody probes who has not rested
    rest.begin()
    assert [rest.probe() for _ in range(PROBES + 1)] == [True] * PROBES + [False]
    rest.begin()
    assert rest.probe()
    rest.worthwhile = False
    assert not rest.probe()


def known_cost(slope: float, batch_size: int) -> LatencyModel:
    cost = LatencyModel()
    for _ in range(64):
        for drafted in range(9):
            cost.observe(batch_size, drafted, 1 + slope * drafted)
    return cost


def record(kept: float, rows: int, usual: Yields) -> Yields:
    found = Yields(usual)
    for _ in range(60):
        found.add(kept, rows)
    return found


def test_the_cost_of_a_draft_is_weighed_before_it_is_made() -> None:
    usual = Yields()
    good, bad = record(0.8, 1, usual), record(0.05, 1, usual)
    assert paying([good], [False], known_cost(0.3, 1), 0.2, 1) == [True]
    assert paying([good], [False], known_cost(0.3, 1), 0.6, 1) == [False]  # the draft alone takes too long
    assert paying([bad], [False], known_cost(0.1, 1), 0.2, 1) == [False]
    assert paying([bad, good], [False, False], known_cost(0.12, 2), 0.2, 2) == [False, True]


def test_a_request_whose_drafts_do_not_pay_rests_and_is_found_again_when_they_do() -> None:
    controller, request = AdaptiveController("m"), Request("r", [1], SamplingParams(), 0, method="m")
    for _ in range(64):
        for drafted in range(5):
            controller.latency.observe(1, drafted, 1 + 0.4 * drafted)
            controller.draft_latency("m").observe(drafted, 0.2 * drafted)
    spans, idle = [], 0
    for step in range(600):
        if controller.suspended_steps(request):
            idle += 1
            if controller.step_suspended(request, 1):
                continue
        said = 0.05 if step < 400 else 0.95
        width = controller.plan([request], [4], stops=True)[0]
        if not width:
            continue
        draft = Draft([1], confidence=[said])
        spans.append((step, idle))
        idle = 0
        controller.observe_draft("m", 1, 0.2)
        if controller.trim([request], [draft if said > controller.min_acceptance("m", 1) else None])[0]:
            controller.learn(request, draft, [0] if step >= 400 else [])
    before, after = [span for span in spans if span[0] < 400], [span for span in spans if span[0] >= 400]
    assert len(before) < 40 and max(idle for _, idle in spans) <= LONGEST
    assert after[0][0] <= 400 + LONGEST and len(after) > 0.8 * (600 - after[0][0])


# ---- in the engine ----


@pytest.mark.parametrize(
    "method", ["eagle3", "draft_model", "dspark", "medusa", "mtp", "peagle", "eagle3 tree", "dspark tree"]
)
@pytest.mark.parametrize("pause", [3, 40])
def test_texts_are_the_same_however_long_a_drafter_rests(
    tiny_llm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, pause: int
) -> None:
    name, tree = method.removesuffix(" tree"), ",width=4,branches=2" if method.endswith("tree") else ""
    head = tiny_heads.make(name, tmp_path)["model"]
    llm = tiny_llm(speculate=f"{name}:model={head}{tree}")
    controller = llm.engine.spec_manager.controller
    assert name in controller.suspendable
    plans = 0

    def plan(requests: list[Request], rooms: list[int], others: int, stops: bool) -> list[int]:
        nonlocal plans
        plans += 1
        if plans % 4:
            return list(rooms)
        for request in requests:
            controller._past(request).rest.patience = pause
            controller._past(request).rest.begin()
            controller._suspended[request] = controller._past(request).rest
        return [0] * len(requests)

    monkeypatch.setattr(controller, "plan", plan)
    monkeypatch.setattr(
        controller, "trim", lambda requests, drafts, others: [len(g.tokens) if g else 0 for g in drafts]
    )
    monkeypatch.setattr(controller, "min_acceptance", lambda method, batch_size: 0.0)
    monkeypatch.setattr(controller, "min_continuation", lambda method, batch_size: 0.0)
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
