"""What the planner of multi-step runs learns from them, and how many tokens it lets them draft."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.device.graphs import padded, padded_sizes
from outrider.multi_step.planner import WIDTHS, RunPlanner, run_widths
from outrider.request import Request, Row, RowResult
from outrider.speculation.adaptive import AdaptiveController
from outrider.speculation.adaptive.backoff import EXPLORATION_SHARE, Backoff
from outrider.types import DecodeStep, Draft, SamplingParams

MOST = 8


class Mark:
    def __init__(self, at: float) -> None:
        self.at = at

    def since(self, earlier: Mark) -> float:
        return self.at - earlier.at


def marks(target: float, draft: float, rounds: int = 4) -> list[Any]:
    found = [Mark(0.0)]
    for _ in range(rounds):
        found.append(Mark(found[-1].at + target))
        found.append(Mark(found[-1].at + draft))
    return found


def new_planner() -> RunPlanner:
    plan = SimpleNamespace(adaptive=True, widths=None, max_context=None)
    methods = {"draft": SimpleNamespace(needs=SimpleNamespace(width=MOST, costs_time=True))}
    controller = AdaptiveController()
    spec_manager = SimpleNamespace(plan=plan, controller=controller, methods=methods, adapts=lambda request: True)
    return RunPlanner(spec_manager)  # type: ignore[arg-type]


@pytest.fixture
def planner() -> RunPlanner:
    found = new_planner()
    for width in run_widths(MOST):  # a pass costs much, a drafted token little
        found.observe_latency("draft", 1, width, marks(1.0 + 0.01 * width, 0.1 + 0.02 * width))
    return found


def request() -> Request:
    return Request("a", [0], SamplingParams(), 0, max_length=10_000, method="draft", width=MOST)


def learn(planner: RunPlanner, texts: list[Request], width: int, kept: int, times: list[Any]) -> None:
    """Learn from a run of 16 steps that accepted `kept` tokens each."""
    parts = [DecodeStep(Draft([7] * width), [7] * kept + [3]) for _ in range(16)]
    for one in texts:
        for part in parts:
            planner.learn_step(one, part, width)
    result = RowResult([token for part in parts for token in part.tokens], decode_steps=parts, passes=16)
    planner.learn("draft", [Row(one, 0, [0], sample=True) for one in texts], [result] * len(texts), width, times)


def run(planner: RunPlanner, one: Request, width: int, kept: int) -> None:
    learn(planner, [one], width, kept, marks(1.0 + 0.01 * width, 0.1 + 0.02 * width))


@pytest.mark.parametrize(("kept", "least", "most"), [(MOST, 7, MOST), (1, 1, 3), (0, 0, 1)])
def test_widths_follow_what_was_kept(planner: RunPlanner, kept: int, least: int, most: int) -> None:
    one = request()
    for _ in range(12):
        width = planner.width("draft", [one])
        assert width in run_widths(MOST)
        if width:
            run(planner, one, width, min(kept, width))
    assert least <= planner.width("draft", [one]) <= most


@pytest.mark.parametrize(("found", "widths"), [(1, {0, 1}), (16, {MOST})], ids=["in one of 16 steps", "in all steps"])
def test_lookups_that_find_nothing_count_as_rejected(found: int, widths: set[int]) -> None:
    """What is found is accepted, but a step takes the time of all rows whether something is found or not."""
    planner, one = new_planner(), request()
    for width in run_widths(MOST):
        planner.observe_latency("draft", 1, width, marks(1.0 + 0.2 * width, 0.1))
    for _ in range(12):
        for number in range(16):
            draft = Draft([7] * MOST) if number < found else None
            planner.learn_step(one, DecodeStep(draft, [7] * MOST + [3] if draft else [3]), MOST)
    assert planner.width("draft", [one]) in widths


@pytest.mark.parametrize("kept", [1, 2, 3, 5])
@pytest.mark.parametrize("steep", [128, 192, 320, 384], ids=lambda rows: f"steps are long from {rows} rows on")
def test_the_width_of_a_run_is_the_fastest_of_those_that_have_graphs(kept: int, steep: int) -> None:
    """Between two of them, the nearest one may have far more rows than pay."""

    def seconds(rows: int) -> float:
        return 5.0 + 0.02 * rows + 0.1 * max(rows - steep, 0)

    def speed(width: int) -> float:
        return (1 + min(kept, width)) / (seconds(64 * (width + 1)) + 0.4 + 0.3 * width)

    planner, texts = new_planner(), [request() for _ in range(64)]
    for _ in range(2):
        for width in run_widths(MOST):
            planner.observe_latency("draft", 64, width, marks(seconds(64 * (width + 1)), 0.4 + 0.3 * width))
    for width in (MOST, MOST, 4, 2, 1):
        times = marks(seconds(64 * (width + 1)), 0.4 + 0.3 * width)
        learn(planner, texts, width, min(kept, width), times)
    assert speed(planner.width("draft", texts)) >= 0.97 * max(map(speed, run_widths(MOST)))


@pytest.mark.parametrize(("easy", "widths"), [(1, [0, 0, 0]), (64, [MOST] * 3)])
def test_one_text_of_many_does_not_make_all_draft(easy: int, widths: list[int]) -> None:
    """A run drafts as many tokens for every request."""
    planner, texts = new_planner(), [request() for _ in range(64)]
    for each in (*run_widths(MOST), *run_widths(MOST)):
        planner.observe_latency("draft", 64, each, marks(5.0 + 0.05 * 64 * each, 0.4))
    for number, one in enumerate(texts):
        for _ in range(4):
            run(planner, one, MOST, MOST if number < easy else 0)
    assert [planner.width("draft", texts) for _ in widths] == widths


@pytest.mark.parametrize(
    ("count", "easy", "width"), [(1, 1, MOST), (8, 8, MOST), (8, 7, MOST), (8, 5, 0), (64, 56, MOST), (64, 40, 0)]
)
def test_texts_that_draft_well_do_not_slow_the_others(count: int, easy: int, width: int) -> None:
    """All together would be faster with drafts in each case, but the slow texts must be decoded, too."""
    planner, texts = new_planner(), [request() for _ in range(count)]
    for each in (*run_widths(MOST), *run_widths(MOST)):
        planner.observe_latency("draft", count, each, marks(1.0 + 0.1 * each, 0.0))
    for number, one in enumerate(texts):
        for _ in range(12):
            learn(planner, [one], MOST, MOST if number < easy else 0, [Mark(0.0)])
    assert planner.width("draft", texts, 0, 16) == width


def hard_texts(planner: RunPlanner, count: int) -> list[Request]:
    """Return texts whose drafts are rejected, so that the method is known to pay for none of them."""
    for each in (*run_widths(MOST), *run_widths(MOST)):
        planner.observe_latency("draft", count, each, marks(1.0 + 0.3 * each, 0.0))
    texts = [request() for _ in range(count)]
    for one in texts:
        for _ in range(3 + 40 // count):
            learn(planner, [one], MOST, 0, [Mark(0.0)])
    return texts


def end(planner: RunPlanner, tokens: int) -> None:
    """End a text of this many tokens."""
    text = request()
    planner.learn_step(text, DecodeStep(None, [3]), 0)
    text.output.extend([7] * tokens)
    planner.controller.forget(text)


@pytest.mark.parametrize("count", [1, 64])
def test_a_probe_waits_until_its_loss_is_a_small_share(count: int) -> None:
    """All requests make it in all steps of a run; texts that have ended pay for it."""
    planner, steps = new_planner(), 16
    hard_texts(planner, count)
    tokens, loss = 0, 0.3 * steps * count
    while not planner.width("draft", [request() for _ in range(count)], 0, steps):
        assert planner.controller.suspended_runs == {"draft"}
        assert EXPLORATION_SHARE * tokens <= loss
        end(planner, 500)
        tokens += 500
    assert EXPLORATION_SHARE * tokens >= 0.8 * loss  # a few tokens are expected to be accepted
    assert planner.controller.suspended_runs == set()
    assert planner.width("draft", [request() for _ in range(count)], 0, steps) == 0  # what was saved is spent


@pytest.mark.parametrize("count", [1, 16])
def test_a_long_text_is_probed_before_one_has_ended(count: int) -> None:
    """Its own tokens pay for the probe."""
    planner, steps, tokens = new_planner(), 16, 0
    texts = hard_texts(planner, count)
    while not planner.width("draft", texts, 0, steps):
        assert tokens < 4000
        for one in texts:
            one.output.extend([7] * steps)
            planner.controller.skip(one, steps - 1)
        tokens += steps
    assert 0.8 * 0.3 * steps <= EXPLORATION_SHARE * tokens <= 1.2 * 0.3 * steps
    assert planner.width("draft", texts, 0, steps) == 0  # what was saved is spent


def test_tokens_pay_for_probes_once() -> None:
    """Each plan counts those that are new. New requests, which are due, make the controller plan every run."""
    planner, steps = new_planner(), 16
    texts = hard_texts(planner, 2)
    texts[0].output.extend([7] * 600)  # half of what a probe of two requests costs
    assert [planner.width("draft", [texts[0], request()], 0, steps) for _ in range(9)] == [0] * 9


def test_a_pause_instead_of_a_probe_does_not_lengthen_the_next_one() -> None:
    backoff = Backoff()
    assert backoff.probes(0.6)
    backoff.pause(0.3)
    assert backoff.remaining == 50
    backoff.skip(50)
    assert backoff.probes(0.6) and not backoff.probes(0.6)
    assert backoff.remaining == 100


def test_requests_that_all_pause_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = new_planner()
    texts, asked = hard_texts(planner, 8), []
    table = planner.controller.latency.table
    monkeypatch.setattr(planner.controller.latency, "table", lambda *given: asked.append(0) or table(*given))
    assert [planner.width("draft", texts, 0, 4) for _ in range(9)] == [0] * 9
    before = len(asked)
    assert planner.width("draft", texts, 0, 4) == 0 and len(asked) == before
    assert planner.width("draft", [*texts[1:], request()], 0, 4) == 0 and len(asked) > before  # one of them is new
    assert all(one.spec_stats.suspended == 11 for one in texts[1:])


@pytest.mark.parametrize(("drops", "adaptive"), [(False, True), (True, True), (False, False)])
def test_a_plain_run_counts_its_steps_and_tells_the_latency(drops: bool, adaptive: bool) -> None:
    planner, one = new_planner(), request()
    planner.plan.adaptive = adaptive
    plain = Request("b", [0], SamplingParams(), 0, max_length=10_000)
    rows = [Row(each, 0, [0], sample=True) for each in (one, plain)]
    results = planner.finish_plain(rows, [RowResult([3] * 16, passes=16)] * 2, marks(2.0, 0.0), drops)
    assert [result.dropped for result in results] == [drops, False]
    assert planner.controller.latency.covers(2) == adaptive
    if adaptive:
        assert planner.controller.latency.seconds(2, 0) == 2.0


@pytest.mark.parametrize(("max_tokens", "steps"), [(256, 16), (5, 5)])
def test_steps_without_drafts_count_up_to_the_end_of_the_text(
    planner: RunPlanner, monkeypatch: pytest.MonkeyPatch, max_tokens: int, steps: int
) -> None:
    skipped: list[int] = []
    monkeypatch.setattr(planner.controller, "skip", lambda one, count: skipped.append(count))
    one = Request("a", [0], SamplingParams(max_tokens=max_tokens), 0, max_length=10_000, method="draft", width=MOST)
    planner.learn("draft", [Row(one, 0, [0], sample=True)], [RowResult([3] * 16, passes=16)], 0, marks(1.0, 0.1))
    assert skipped == [steps - 1]  # `plan` has counted the first


def test_a_run_that_was_not_timed_teaches_no_costs(planner: RunPlanner) -> None:
    before = planner.controller.latency.seconds(1, 7)
    learn(planner, [request()], 7, 0, marks(9.0, 9.0, rounds=0))
    assert planner.controller.latency.seconds(1, 7) == before


def test_a_step_with_the_host_is_no_measure_of_rounds(planner: RunPlanner) -> None:
    before = planner.controller.draft_latency("draft").seconds(MOST)
    for _ in range(9):
        planner.controller.observe_draft("draft", MOST, 50.0)
    assert planner.controller.draft_latency("draft").seconds(MOST) == before
    for _ in range(9):
        planner.controller.observe_draft("another", MOST, 50.0)
    assert planner.controller.draft_latency("another").seconds(MOST) > 40.0


def test_records_are_made_for_a_few_widths() -> None:
    assert run_widths(4) == [0, 1, 2, 3, 4] and run_widths(1) == [0, 1]
    assert set(run_widths(100)) == {0, *WIDTHS, 100}


def test_latencies_measured_at_the_start_are_those_of_every_batch_size() -> None:
    """Whatever the order of the runs: graphs are captured from the largest on."""

    def seconds(rows: int, width: int) -> float:
        return 4.0 + 0.01 * rows * (width + 1)

    planner, most = new_planner(), 64
    timed = {
        (rows, width): marks(seconds(rows, width), 0.1 + 0.2 * width)
        for rows in reversed(padded_sizes(most))
        for width in reversed(run_widths(MOST))
    }
    planner.begin("draft", timed, most)
    latency, drafts = planner.controller.latency, planner.controller.draft_latency("draft")
    assert latency.slowdown == pytest.approx(1.0)
    for batch_size in range(1, most + 1):
        for width in run_widths(MOST):
            expected = seconds(padded(batch_size), width)
            assert latency.seconds(batch_size, batch_size * width) == pytest.approx(expected, rel=0.1)
    assert [drafts.seconds(width) for width in run_widths(MOST)] == pytest.approx(
        [0.1 + 0.2 * width for width in run_widths(MOST)]
    )


def readable_planner(count: int) -> RunPlanner:
    """Return one for a lookup, whose drafts cost a fifth of a step for each token."""
    planner = new_planner()
    planner.readable = lambda name, requests: set(requests)  # type: ignore[method-assign]
    for batch_size, each in product((1, count), (*run_widths(MOST), *run_widths(MOST))):
        planner.observe_latency("draft", batch_size, each, marks(1.0 + 0.2 * each, 0.0))
    return planner


def test_a_batch_is_not_drafted_before_steps_without_drafts_tell_what_lookups_are_worth() -> None:
    """One text alone is: no other waits for it."""
    planner, texts = readable_planner(2), [request(), request()]
    assert planner.width("draft", texts[:1], 0, 16) > 0
    assert planner.width("draft", texts, 0, 16) == 0
    learn(planner, texts, MOST, MOST, [Mark(0.0)])
    for text in texts:
        planner.controller.skip(text, 15)  # the run had 16 steps, one of which was planned
    assert planner.width("draft", texts, 0, 16) == MOST


def test_a_batch_is_planned_again_after_as_many_steps_as_it_has_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """To choose a width takes time for each text."""
    planner, asked = readable_planner(12), []
    texts = [request() for _ in range(12)]
    table = planner.controller.latency.table
    monkeypatch.setattr(planner.controller.latency, "table", lambda *given: asked.append(0) or table(*given))
    planner.width("draft", texts, 0, 5)
    first = len(asked)
    for _ in range(2):  # runs of 5 steps
        for text in texts:
            planner.controller.skip(text, 4)
        assert planner.width("draft", texts, 0, 5) == 0
    assert first > 0 and len(asked) == first
    for text in texts:
        planner.controller.skip(text, 4)
    planner.width("draft", texts, 0, 5)
    assert len(asked) == 2 * first


def test_texts_of_a_lookup_are_not_probed() -> None:
    """What their drafts are worth is known without."""
    planner = readable_planner(4)
    texts = [request() for _ in range(4)]
    learn(planner, texts, MOST, 0, [Mark(0.0)])
    end(planner, 1_000_000)  # enough for any probe
    assert [planner.width("draft", texts, 0, 16) for _ in range(50)] == [0] * 50
    planner.readable = lambda name, requests: set(requests[1:])  # type: ignore[method-assign]
    assert planner.width("draft", texts, 0, 16) == 1


@pytest.mark.parametrize(
    ("easy", "two", "eight"), [("eeeeeeee", MOST, MOST), ("eeehheee", MOST, 0), ("hhehhheh", 0, 0)]
)
def test_new_texts_are_expected_to_differ_as_earlier_ones_did(easy: str, two: int, eight: int) -> None:
    """Two of them as one of the harder and one of the easier half, eight as all of eight earlier ones."""
    planner = readable_planner(8)
    for batch_size, each in product((2, 2), run_widths(MOST)):
        planner.observe_latency("draft", batch_size, each, marks(1.0 + 0.2 * each, 0.0))
    for each in easy:
        text = request()
        planner.width("draft", [text], 0, 16)
        for _ in range(4):
            learn(planner, [text], MOST, MOST if each == "e" else 0, [Mark(0.0)])
        planner.controller.forget(text)
    assert planner.width("draft", [request() for _ in range(2)], 0, 16) == two
    assert planner.width("draft", [request() for _ in range(8)], 0, 16) == eight


def test_a_text_with_one_draft_tells_nothing_of_later_ones() -> None:
    planner, text = readable_planner(2), request()
    planner.width("draft", [text], 0, 16)
    planner.learn_step(text, DecodeStep(Draft([7] * MOST), [7] * MOST + [3]), MOST)
    planner.controller.forget(text)
    assert planner.width("draft", [request(), request()], 0, 16) == 0
