"""The adaptive width: latency model, acceptance model, width search, and the controller's choices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from outrider.adapters import Adapter
from outrider.request import Request
from outrider.speculation.adaptive import AdaptiveController
from outrider.speculation.adaptive.acceptance_model import PRIOR_RATE, DraftRates, Rates, confidence_key
from outrider.speculation.adaptive.backoff import EXPLORATION_SHARE, MAX_PAUSE, Backoff
from outrider.speculation.adaptive.latency_model import LatencyCurve, LatencyModel, least_seconds
from outrider.speculation.adaptive.width_search import fastest_widths
from outrider.types import Draft, SamplingParams


def request(method: str = "some") -> Request:
    return Request("r", [1], SamplingParams(), 0, method=method)


def measured(slope: float, drafting: float = 0.0, requests: int = 1) -> AdaptiveController:
    """Return a controller that knows its latencies: a step without drafts takes a second."""
    controller = AdaptiveController()
    for _ in range(64):
        for drafted in range(9):
            controller.latency.observe(requests, drafted, 1 + slope * drafted)
        for width in range(9):
            controller.draft_latency("some").observe(width, drafting * width)
    return controller


def teach(controller: AdaptiveController, one: Request, width: int, accepted: int, times: int = 100) -> None:
    for _ in range(times):
        controller.learn(one, Draft([7] * width), range(accepted))


def usual_plan(controller: AdaptiveController, one: Request, limit: int, others: int = 0) -> int:
    """Return the width that `plan` chooses if it does not explore: the most common of many steps."""
    widths = Counter(controller.plan([one], [limit], others)[0] for _ in range(400))
    return widths.most_common(1)[0][0]


def usual_trim(controller: AdaptiveController, one: Request, draft: Draft, others: int = 0) -> int:
    return Counter(controller.trim([one], [draft], others)[0] for _ in range(400)).most_common(1)[0][0]


# ---- latency model ----


def test_a_curve_runs_through_its_measurements() -> None:
    curve = LatencyCurve()
    assert curve.table(2) == [0.0] * 3
    for _ in range(200):
        curve.observe(4, 2.0)
        curve.observe(8, 4.0)
    assert [curve.seconds(count) for count in (4, 6, 8)] == pytest.approx([2.0, 3.0, 4.0], rel=0.05)
    assert curve.seconds(16) == pytest.approx(8.0, rel=0.02)  # as steep as before
    assert curve.seconds(0) == 0.0 and curve.seconds(2) == pytest.approx(1.0, rel=0.02)
    assert curve.table(20) == pytest.approx([curve.seconds(count) for count in range(21)])


def test_a_curve_never_falls() -> None:
    curve = LatencyCurve()
    for count, seconds in ((1, 1.0), (2, 3.0), (3, 2.0), (4, 1.5), (5, 4.0)):
        for _ in range(10):
            curve.observe(count, seconds)
    found = curve.table(9)
    assert found == sorted(found)
    assert curve.seconds(2) == curve.seconds(4) == pytest.approx(6.5 / 3, rel=0.05)


def test_interruptions_do_not_change_a_curve() -> None:
    curve = LatencyCurve()
    for step in range(100):
        curve.observe(1, 50.0 if step % 20 == 7 else 1.0)
        curve.observe(2, 90.0 if step == 0 else 2.0)
    assert curve.seconds(1) == pytest.approx(1.0, rel=0.05)
    assert curve.seconds(2) == pytest.approx(2.0, rel=0.05)
    curve.observe(3, 500.0)  # the only measurement of this count
    assert curve.seconds(3) < 5


def test_a_machine_that_becomes_slower_is_measured_anew() -> None:
    curve = LatencyCurve()
    for seconds in (2.0, 4.0):
        for _ in range(30):
            curve.observe(4, seconds)
        assert curve.seconds(4) == seconds


def test_a_step_costs_by_batch_size_and_rows() -> None:
    latency = LatencyModel()
    assert not latency.covers(1)
    for drafted in (0, 1, 3, 7):
        latency.observe(1, drafted, 1 + 0.1 * drafted)
    assert latency.covers(1) and not latency.covers(4)
    assert latency.seconds(1, 7) > latency.seconds(1, 3) > latency.seconds(1, 0)
    assert latency.seconds(4, 2) == pytest.approx(latency.seconds(1, 5))  # until it is measured
    latency.observe(4, 0, 2.6)  # twice as long as the same rows of one request
    assert latency.covers(4)
    assert latency.seconds(4, 2) / latency.seconds(1, 5) == pytest.approx(2, rel=0.1)
    assert latency.table(4, 3) == pytest.approx([latency.seconds(4, drafted) for drafted in range(4)])


def test_steps_with_drafts_that_were_measured_on_a_faster_machine_do_not_look_cheap_later() -> None:
    latency = LatencyModel()
    for drafted in (0, 1, 3, 0, 0, 0, 0):
        latency.observe(1, drafted, 1 + 0.4 * drafted)
    for slower in (3.0, 1.0, 2.0):
        for step in range(8):
            latency.observe(1, 0, 20.0 if step == 6 else slower)  # one was interrupted
        assert latency.slowdown == pytest.approx(slower)
        assert latency.table(1, 3) == pytest.approx([1, 1.4, 1.8, 2.2])
    for _ in range(20):
        latency.observe(1, 3, 2 * 1.6)
    assert latency.seconds(1, 3) == pytest.approx(1.6), "a step with drafts is compared with those beside it"


def test_steps_that_are_interrupted_at_start_up_do_not_change_the_latency_model() -> None:
    calls: Counter[int] = Counter()

    def measure(drafted: int) -> float:
        calls[drafted] += 1
        return (1 + 0.2 * drafted) * (3 if (sum(calls.values()) * 7) % 5 < 3 else 1)

    latency = LatencyModel()
    latency.begin(least_seconds(measure, (0, 1, 2, 4)))
    assert latency.table(1, 4) == pytest.approx([1, 1.2, 1.4, 1.6, 1.8]) and latency.slowdown == 1
    for _ in range(20):
        latency.observe(1, 0, 3.0)  # a busy machine after that
    for _ in range(20):
        latency.observe(1, 2, 3 * 1.4)
    assert latency.table(1, 4) == pytest.approx([1, 1.2, 1.4, 1.6, 1.8])


def test_long_contexts_are_no_slower_machine() -> None:
    latency = LatencyModel()
    latency.context_cost = 0.001
    for context in (0, 1000, 200):
        for drafted in (0, 0, 0, 1):
            latency.observe(1, drafted, (1 + 0.4 * drafted) * (1 + 0.001 * context), context)
        assert latency.slowdown == pytest.approx(1) and latency.table(1, 1) == pytest.approx([1, 1.4])


# ---- acceptance model ----


def test_acceptance_is_learned_by_depth_and_by_request() -> None:
    method = DraftRates()
    good, bad = DraftRates(method), DraftRates(method)
    assert good.acceptance(2) == pytest.approx([PRIOR_RATE, PRIOR_RATE**2])
    for _ in range(200):
        good.learn_draft([1, 1, 0, 0])
        bad.learn_draft([0, 0, 0, 0])
    assert good.acceptance(3)[1] > 0.7 > 0.2 > good.acceptance(3)[2]
    assert bad.acceptance(1)[0] < 0.15


def test_depths_that_were_not_drafted_for_long_go_by_those_before() -> None:
    rates = DraftRates(DraftRates())
    for _ in range(100):
        rates.learn_draft([1, 0, 0, 0])
    assert rates.acceptance(2)[1] < 0.2
    for _ in range(2000):
        rates.learn_draft([1])
    assert rates.acceptance(2)[1] > 0.8


def test_the_nodes_of_a_tree_are_learned_by_index() -> None:
    rates, parents = DraftRates(DraftRates()), [-1, -1, 0, 2]
    for step in range(300):
        rates.learn_draft([1, 0, 1, 1] if step % 4 else [0, 1, 0, 0], parents)
    assert rates.acceptance(4) == pytest.approx([0.75, 0.25, 0.75, 0.75], abs=0.06)


def test_a_rate_that_may_not_learn_keeps_its_prior() -> None:
    method = Rates([0.5], learns=False)
    one = Rates([0.5], method)
    for _ in range(50):
        one.learn(0, 1.0)
    assert one.rate(0) > 0.8 and method.rate(0) == 0.5 == Rates([0.5], method).rate(0)


@pytest.mark.parametrize("truth", [lambda said: said, lambda said: said**3, lambda said: said**0.3, lambda said: 0.5])
def test_confidence_is_replaced_by_the_rate_that_it_proves_to_have(truth) -> None:
    calibration = Rates(method=Rates())
    assert calibration.rate(confidence_key(0.7), 0.7) == pytest.approx(0.7)
    confidences = (0.15, 0.45, 0.75, 0.95)
    owed = dict.fromkeys(confidences, 0.0)
    for _ in range(600):
        for confidence in confidences:
            owed[confidence] += truth(confidence)
            accepted = owed[confidence] >= 1
            owed[confidence] -= accepted
            calibration.learn(confidence_key(confidence), accepted)
    assert [calibration.rate(confidence_key(one), one) for one in confidences] == pytest.approx(
        [truth(one) for one in confidences], abs=0.06
    )


# ---- width search ----


def fastest(acceptance: list[list[float]], slope: float, drafting: float = 0.0) -> list[int]:
    tokens = sum(map(len, acceptance))
    deepest = max(map(len, acceptance), default=0)
    steps = [1 + slope * drafted for drafted in range(tokens + 1)]
    return fastest_widths(acceptance, steps, [drafting * width for width in range(deepest + 1)], len(acceptance))[0]


def chain(rate: float, width: int) -> list[float]:
    return [rate**depth for depth in range(1, width + 1)]


def test_free_tokens_are_all_taken_and_expensive_ones_none() -> None:
    acceptance = [chain(0.9, 4), chain(0.2, 4)]
    assert fastest(acceptance, 0.0) == [4, 4]
    assert fastest(acceptance, 10.0) == [0, 0]


def test_a_token_is_taken_while_it_raises_the_speed() -> None:
    # One row: the k-th token adds a^k tokens and 0.5 steps; the speed is 1 without any.
    assert fastest([chain(0.9, 8)], 0.5) == [3]
    assert fastest([chain(0.49, 8)], 0.5) == [0]
    assert fastest([chain(0.9, 8)], 0.5, drafting=0.5) == [0]
    assert fastest([chain(0.9, 8), []], 0.4) == [1, 0]  # a second is worth more tokens here


def test_probable_tokens_of_one_row_go_before_improbable_ones_of_another() -> None:
    assert fastest([chain(0.95, 3), chain(0.3, 3)], 0.2) == [3, 0]
    assert fastest([[], [0.99]], 0.1) == [0, 1]


def test_a_depth_that_only_one_row_wants_must_pay_for_itself() -> None:
    rows = [chain(0.99, 4)] + [[0.9, 0.045, 0.002, 0.0]] * 7
    assert fastest(rows, 0.01, drafting=0.01)[0] == 4
    assert fastest(rows, 0.01, drafting=0.3) == [1] * 8


def test_a_jump_in_the_latency_is_passed_where_the_tokens_behind_it_pay() -> None:
    acceptance = [chain(0.9, 8)] * 2
    assert fastest_widths(acceptance, [1.0] + [2.0] * 16, [0.0] * 9, 2)[0] == [8, 8]


def test_a_probable_node_takes_along_those_before_it_or_is_left_out() -> None:
    tree = [[0.9, 0.0, 0.8], [0.3]]
    assert fastest(tree, 0.15) == [3, 0]
    assert fastest(tree, 0.3) == [1, 0]


def test_no_draft_ends_between_an_improbable_node_and_the_probable_one_behind_it() -> None:
    tree = [[0.9, 0.0, 0.8], []]
    latencies = [1.0, 1.0, 1.0, 2.0]
    assert fastest_widths(tree, latencies, [0.0] * 4, 2)[0] == [1, 0]


def test_the_speed_is_that_of_the_widths() -> None:
    assert fastest_widths([[0.5]], [1.0, 1.2], [0.0, 0.05], 1) == ([1], pytest.approx(1.5 / 1.25))
    assert fastest_widths([[0.1]], [1.0, 1.2], [0.1, 0.2], 1) == ([0], pytest.approx(1 / 1.1))


# ---- backoff ----


def test_a_pause_is_so_long_that_probes_lose_a_small_share_of_the_time() -> None:
    for loss in (0.01, 0.1, 0.3):
        backoff = Backoff()
        steps = [backoff.probes(loss) for _ in range(1000)]
        assert steps[0] and 2 <= sum(steps) <= 1 + 1000 * EXPLORATION_SHARE / loss


def test_a_pause_is_bounded_and_ends_sooner_by_steps_that_were_skipped() -> None:
    backoff = Backoff()
    assert backoff.probes(1e9) and not backoff.probes(1e9)
    assert backoff.remaining == MAX_PAUSE
    backoff.skip(MAX_PAUSE - 1)
    assert backoff.remaining == 1 and not backoff.probes(1e9)
    assert backoff.remaining == 0 and backoff.probes(1e9)


# ---- controller ----


def test_the_first_step_has_no_drafts_and_the_next_ones_do() -> None:
    controller, one = AdaptiveController(), request()
    assert controller.plan([one], [3]) == [0] == controller.trim([one], [Draft([1, 2])])
    controller.latency.observe(1, 0, 1.0)
    assert controller.plan([one], [1]) == [1]
    assert controller.trim([one], [Draft([1])]) == [1]
    assert controller.plan([], []) == controller.trim([], []) == []


def test_widths_follow_acceptance_and_latency() -> None:
    one = request()
    for slope, accepted, expected in ((0.02, 8, 8), (0.02, 0, 0), (0.3, 8, 8), (0.3, 2, 2), (1.2, 8, 0)):
        controller = measured(slope)
        teach(controller, one, 8, accepted)
        assert usual_plan(controller, one, 8) == expected, (slope, accepted)
        assert usual_plan(controller, one, min(expected, 1)) == min(expected, 1)


def test_other_requests_of_the_step_make_a_second_worth_more() -> None:
    one, draft = request(), Draft([1, 2, 3, 4])
    for slope, expected in ((0.2, 4), (0.3, 0)):
        controller = measured(slope, requests=4)
        teach(controller, one, 4, 4)
        assert usual_plan(controller, one, 4, others=3) == expected
        assert usual_trim(controller, one, draft, others=3) == expected


@pytest.mark.parametrize("slower", [0.5, 2.0, 4.0])
def test_drafts_that_do_not_pay_are_not_made_after_the_machine_became_slower(slower: float) -> None:
    controller, one = measured(0.4, drafting=0.3), request()
    teach(controller, one, 1, 0)
    for _ in range(60):
        controller.latency.observe(1, 0, slower)
    assert usual_plan(controller, one, 8) == 0
    easy = request()
    teach(controller, easy, 8, 8)
    assert usual_plan(controller, easy, 8) == 8


def test_exploration_goes_on_for_ever_and_costs_less_than_a_hundredth() -> None:
    controller, one = measured(0.5, drafting=0.3), request()
    teach(controller, one, 1, 0)
    tried, lost = 0, 0.0
    for _ in range(5000):
        width = controller.plan([one], [8])[0]
        tried += width > 0
        lost += 0.8 * width
        if controller.trim([one], [Draft([1] * width) if width else None])[0]:
            controller.learn(one, Draft([1] * width), [])
    assert tried >= 10
    assert lost < 0.01 * 5000


def test_accepted_explorations_lead_back_to_full_drafts() -> None:
    controller, one = measured(0.1, drafting=0.1), request()
    teach(controller, one, 4, 0)
    steps = 0
    while (width := controller.plan([one], [4])[0]) < 4:
        steps += 1
        assert steps < 400
        draft = Draft([1] * width) if width else None
        assert controller.trim([one], [draft]) == [width]  # an exploration is verified as it was drafted
        if draft:
            controller.learn(one, draft, range(width))


def test_a_token_is_as_probable_as_the_path_that_leads_to_it() -> None:
    one = request()
    controller = measured(0.25)
    chain = Draft([1, 2, 3, 4], confidence=[0.99, 0.9, 0.05, 0.9])
    assert controller.trim([one], [chain]) == [2]
    tree = Draft([1, 2, 3, 4], [-1, 0, -1, 2], confidence=[0.9, 0.9, 0.1, 0.9])
    assert controller.trim([one], [tree]) == [2]


def test_confidence_that_proves_wrong_is_not_believed() -> None:
    one = request()
    controller = measured(0.4)
    overconfident = Draft([1, 2, 3], confidence=[0.95, 0.95, 0.95])
    assert controller.trim([one], [overconfident]) == [3]
    for _ in range(60):
        controller.learn(one, overconfident, [])
    assert usual_trim(controller, one, overconfident) == 0
    underconfident = Draft([1, 2, 3], confidence=[0.3, 0.3, 0.3])
    controller = measured(0.4)
    for _ in range(60):
        controller.learn(one, underconfident, [0, 1, 2])
    assert controller.trim([one], [underconfident]) == [3]


def test_tokens_behind_a_rejected_one_teach_nothing() -> None:
    controller, one = measured(0.4), request()
    for _ in range(60):
        controller.learn(one, Draft([1, 2], confidence=[0.1, 0.9]), [])
    assert usual_trim(controller, one, Draft([2], confidence=[0.9])) == 1
    assert usual_trim(controller, one, Draft([1], confidence=[0.1])) == 0


def test_the_thresholds_are_the_latency_of_a_further_token_at_the_present_speed() -> None:
    controller, one = measured(0.2, drafting=0.1), request()
    assert AdaptiveController().thresholds("some", 1) == (0.0, 0.0, 0.0)
    verify, draft, speed = controller.thresholds("some", 1)
    assert (verify, speed) == pytest.approx((0.2, 1.0), rel=0.15)  # at one token a second
    assert draft == pytest.approx((0.2 + 0.1) / PRIOR_RATE, rel=0.15)  # to draft it too
    teach(controller, one, 8, 8)
    for _ in range(300):
        controller.plan([one], [8])
        controller.trim([one], [Draft([1] * 8)])
    verify, draft, speed = controller.thresholds("some", 1)
    assert (verify, draft, speed) == pytest.approx((0.2 * 9 / 3.4, 0.3 * 9 / 3.4, 9 / 3.4), rel=0.15)


# ---- why drafts are suspended ----


def test_a_suspension_is_explained_by_measured_latency_and_acceptance() -> None:
    controller, one = measured(1.0, drafting=0.1), request()
    teach(controller, one, 8, 1)  # the first token is accepted, no other
    for _ in range(50):
        controller.plan([one], [8])
    reason = one.spec_stats.suspension
    assert reason is not None and (reason.batch_size, reason.rows) == (1, 2)
    assert (reason.cost, reason.drafting) == pytest.approx((2.1, 0.1), rel=0.05)
    assert reason.acceptance_rate == pytest.approx(0.97, abs=0.03) and reason.tokens == 1 + reason.acceptance_rate
    assert 45 <= one.spec_stats.suspended < 50, "probes are no suspended steps"
    assert str(reason).startswith("a step with 2 rows costs 2.1")


def test_the_explanation_is_of_the_best_step_with_a_draft() -> None:
    controller, one = measured(0.3, drafting=0.0), request()
    for _ in range(64):
        for width in range(1, 9):  # a call takes as long as eight steps, whatever it drafts
            controller.draft_latency("some").observe(width, 8.0)
    teach(controller, one, 8, 8)
    for _ in range(3):
        controller.plan([one], [8])
    reason = one.spec_stats.suspension
    assert reason is not None and reason.rows == 9
    assert (reason.tokens, reason.cost, reason.drafting) == pytest.approx((9, 11.4, 8), rel=0.1)


def test_skipped_steps_of_a_suspended_request_are_counted() -> None:
    controller, one = measured(1.2), request()
    controller.skip(one, 5)
    assert one.spec_stats.suspended == 0, "nothing was refused yet"
    teach(controller, one, 8, 0)
    controller.plan([one], [8])
    controller.plan([one], [8])
    before = one.spec_stats.suspended
    controller.skip(one, 5)
    assert before >= 1 and one.spec_stats.suspended == before + 5


def test_drafts_that_pay_and_texts_without_a_draft_are_no_suspension() -> None:
    controller, one = measured(0.02), request()
    teach(controller, one, 8, 8)
    for _ in range(20):
        controller.plan([one], [8])
        controller.trim([one], [Draft([1] * 8)])
        controller.trim([one], [None])
    assert one.spec_stats.suspended == 0 and one.spec_stats.suspension is None
    refused = Draft([1], confidence=[0.01])
    controller = measured(1.2)
    for _ in range(20):
        controller.trim([one], [refused])
    assert one.spec_stats.suspended >= 19 and one.spec_stats.suspension is not None
    assert one.spec_stats.suspension.acceptance_rate == pytest.approx(0.01)


def adapted(name: str) -> Request:
    return replace(request(), adapter=Adapter(name, "", 1, {}, pinned=False))


def test_an_adapter_that_a_head_does_not_fit_leaves_the_widths_of_others() -> None:
    controller = measured(slope=0.2)
    teach(controller, request(), 4, 4)
    assert usual_plan(controller, request(), 4) == 4
    assert usual_plan(controller, adapted("new"), 4) == 4  # as the model itself
    teach(controller, adapted("hard"), 4, 0)
    assert usual_plan(controller, adapted("hard"), 4) == 0
    assert usual_plan(controller, request(), 4) == 4
    assert usual_plan(controller, adapted("other"), 4) == 4


def test_an_easy_adapter_does_not_hide_that_drafts_for_the_model_do_not_pay() -> None:
    controller = measured(slope=0.5)
    teach(controller, request(), 4, 0)
    teach(controller, adapted("easy"), 4, 4)
    assert usual_plan(controller, adapted("easy"), 4) == 4
    assert usual_plan(controller, request(), 4) == 0


def test_confidence_is_calibrated_by_adapter() -> None:
    controller = measured(slope=0.3)
    sure = Draft([7] * 3, confidence=[0.9] * 3)
    for _ in range(200):
        controller.learn(request(), sure, range(3))
        controller.learn(adapted("hard"), sure, ())
    assert usual_trim(controller, request(), sure) == 3
    assert usual_trim(controller, adapted("hard"), sure) == 0


def test_a_finished_request_leaves_no_state() -> None:
    controller, one = measured(0.1), request()
    controller.plan([one], [4])
    controller.learn(one, Draft([1]), [0])
    assert controller.num_requests == 1
    controller.forget(one)
    controller.forget(one)
    assert controller.num_requests == 0
