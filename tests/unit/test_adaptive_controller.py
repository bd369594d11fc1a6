"""How many drafted tokens pay."""

from __future__ import annotations

import pytest

from outrider.request import Request
from outrider.speculation.adaptive import AdaptiveController
from outrider.speculation.adaptive.acceptance_model import Calibration, Odds, Places, falling, products
from outrider.speculation.adaptive.latency_model import LatencyCurve, LatencyModel
from outrider.speculation.adaptive.width_search import Offer
from outrider.types import Draft, SamplingParams


def request(method: str = "some") -> Request:
    return Request("r", [1], SamplingParams(), 0, method=method)


def measured(slope: float, drafting: float = 0.0, requests: int = 1) -> AdaptiveController:
    """A control that knows its costs: a plain pass takes a second."""
    controller = AdaptiveController()
    for _ in range(64):
        for drafted in range(9):
            controller.latency.observe(requests, drafted, 1 + slope * drafted)
        for width in range(9):
            controller.draft_latency("some").observe(width, drafting * width)
    return controller


def teach(controller: AdaptiveController, one: Request, width: int, kept: int, times: int = 100) -> None:
    for _ in range(times):
        controller.learn(one, Draft([7] * width), range(kept))


# ---- costs ----


def test_a_curve_runs_through_what_was_measured() -> None:
    curve = LatencyCurve()
    assert not curve.known
    for _ in range(200):
        curve.observe(4, 2.0)
        curve.observe(8, 4.0)
    assert curve.known
    assert [curve.seconds(count) for count in (4, 6, 8)] == pytest.approx([2.0, 3.0, 4.0], rel=0.05)
    assert curve.seconds(16) == pytest.approx(8.0, rel=0.02)  # as steep as before
    assert curve.seconds(0) == 0.0 and curve.seconds(2) == pytest.approx(1.0, rel=0.02)
    assert curve.table(0, 20) == pytest.approx([curve.seconds(count) for count in range(21)])


def test_a_count_beside_a_dear_one_is_given_a_chance() -> None:
    curve = LatencyCurve()
    for _ in range(8):
        curve.observe(1, 1.0)
        curve.observe(8, 2.0)
    line = 1 + 6 / 7
    assert 0.85 * line < curve.seconds(7) < 0.97 * line
    curve.observe(7, 1.0)
    assert curve.seconds(7) < 1.05


def test_a_curve_never_falls() -> None:
    curve = LatencyCurve()
    for count, seconds in ((1, 1.0), (2, 3.0), (3, 2.0), (4, 1.5), (5, 4.0)):
        for _ in range(10):
            curve.observe(count, seconds)
    found = curve.table(0, 9)
    assert found == sorted(found)
    assert curve.seconds(2) == curve.seconds(4) == pytest.approx(6.5 / 3, rel=0.05)


def test_interruptions_are_no_measure() -> None:
    curve = LatencyCurve()
    for step in range(100):
        curve.observe(1, 50.0 if step % 20 == 7 else 1.0)
        curve.observe(2, 90.0 if step == 0 else 2.0)
    assert curve.seconds(1) == pytest.approx(1.0, rel=0.05)
    assert curve.seconds(2) == pytest.approx(2.0, rel=0.05)
    curve.observe(3, 500.0)  # the only one of its kind
    assert curve.seconds(3) < 5


def test_a_slower_machine_is_slower_at_every_count() -> None:
    curve = LatencyCurve()
    for _ in range(100):
        curve.observe(1, 1.0)
        curve.observe(4, 2.0)
    for _ in range(200):
        curve.observe(4, 4.0)
    assert curve.seconds(4) == pytest.approx(4.0, rel=0.05)
    assert 1.5 < curve.seconds(1) < 2.1


def test_a_pass_costs_by_requests_and_rows() -> None:
    cost = LatencyModel()
    assert not cost.known and not cost.covers(1)
    for drafted in (0, 1, 3, 7):
        cost.observe(1, drafted, 1 + 0.1 * drafted)
    assert cost.known and cost.covers(1) and not cost.covers(4)
    assert cost.seconds(1, 7) > cost.seconds(1, 3) > cost.seconds(1, 0)
    assert cost.seconds(4, 2) == pytest.approx(cost.seconds(1, 5))  # until it is known better
    cost.observe(4, 0, 2.6)  # twice what the same rows of one request take
    assert cost.covers(4)
    assert cost.seconds(4, 2) / cost.seconds(1, 5) == pytest.approx(2, rel=0.1)
    assert cost.table(4, 3) == pytest.approx([cost.seconds(4, drafted) for drafted in range(4)])


def test_nobody_leaps_to_rows_far_beyond_what_was_measured() -> None:
    cost = LatencyModel()
    cost.observe(32, 0, 1.0)
    assert cost.table(32, 200)[32] < cost.table(32, 200)[33] == float("inf")


# ---- odds ----


def test_what_is_kept_is_learned_by_depth_and_by_request() -> None:
    method = Odds()
    lucky, unlucky = Odds(method), Odds(method)
    assert lucky.rates(2) == pytest.approx([Odds.PRIOR] * 2)
    for _ in range(200):
        lucky.learn([1, 1, 0, 0])
        unlucky.learn([0, 0, 0, 0])
    assert lucky.rates(3)[0] > 0.8 > 0.2 > lucky.rates(3)[2]
    assert unlucky.rates(1)[0] < 0.15
    assert unlucky.seen[1] == 0  # nobody looked at what comes after a token that was not kept
    assert lucky.survivals(3) == pytest.approx(products(lucky.rates(3)))


def test_depths_that_nobody_looked_at_for_long_go_by_those_before() -> None:
    odds = Odds(Odds())
    for _ in range(100):
        odds.learn([1, 0, 0, 0])
    assert odds.rates(2)[1] < 0.2
    for _ in range(2000):
        odds.learn([1])
    assert odds.rates(2)[1] > 0.8


def test_a_request_that_does_better_than_others_is_expected_to_do_so_deeper_down() -> None:
    method = Odds()
    for _ in range(200):
        method.learn([1, 0])
        method.learn([0, 0])
    lucky = Odds(method)
    for _ in range(100):
        lucky.learn([1])
    assert lucky.rates(2)[1] > method.rates(2)[1] + 0.2


def test_the_nodes_of_a_tree_are_learned_by_place() -> None:
    places = Places(Places())
    for step in range(300):
        places.learn([1, 0, 1, 1] if step % 4 else [0, 1, 0, 0])
    assert places.survivals(4) == pytest.approx([0.75, 0.25, 0.75, 0.75], abs=0.06)


def test_chances_that_rise_are_shared_with_those_before() -> None:
    assert falling([0.9, 0.5, 0.1]) == [0.9, 0.5, 0.1]
    assert falling([0.9, 0.1, 0.5, 0.2]) == pytest.approx([0.9, 0.3, 0.3, 0.2])
    assert falling([0.1, 0.2, 0.6]) == pytest.approx([0.3] * 3)
    assert falling([]) == []


@pytest.mark.parametrize("truth", [lambda said: said, lambda said: said**3, lambda said: said**0.3, lambda said: 0.5])
def test_confidence_is_taken_for_what_it_proves_to_be(truth) -> None:
    calibration = Calibration(Calibration())
    assert calibration.rate(0.7) == pytest.approx(0.7)
    said = (0.15, 0.45, 0.75, 0.95)
    owed = dict.fromkeys(said, 0.0)
    for _ in range(600):
        for confidence in said:
            owed[confidence] += truth(confidence)
            kept = owed[confidence] >= 1
            owed[confidence] -= kept
            calibration.learn(confidence, kept)
    assert [calibration.rate(one) for one in said] == pytest.approx([truth(one) for one in said], abs=0.06)


def test_sure_tokens_speak_for_unsure_ones_that_were_never_verified() -> None:
    calibration = Calibration()
    for step in range(1000):
        calibration.learn(0.8, step % 10 > 0)  # a modest drafter: such tokens are kept nine times out of ten
    assert calibration.rate(0.3) > 0.45


# ---- choices ----


def best(survivals: list[list[float]], slope: float, drafting: float = 0.0) -> list[int]:
    most = sum(map(len, survivals))
    deepest = max(map(len, survivals), default=0)
    passes = [1 + slope * drafted for drafted in range(most + 1)]
    return Offer(survivals, passes, [drafting * width for width in range(deepest + 1)], len(survivals)).best()[0]


def test_free_tokens_are_all_taken_and_dear_ones_none() -> None:
    chances = [products([0.9] * 4), products([0.2] * 4)]
    assert best(chances, 0.0) == [4, 4]
    assert best(chances, 10.0) == [0, 0]


def test_a_token_is_taken_while_it_raises_the_rate() -> None:
    # One row: the k-th token adds a^k tokens and 0.5 passes; the rate is 1 without any.
    assert best([products([0.9] * 8)], 0.5) == [3]
    assert best([products([0.49] * 8)], 0.5) == [0]
    assert best([products([0.9] * 8)], 0.5, drafting=0.5) == [0]
    assert best([products([0.9] * 8), []], 0.4) == [1, 0]  # seconds are worth more tokens here


def test_likely_tokens_of_one_row_go_before_unlikely_ones_of_another() -> None:
    assert best([products([0.95] * 3), products([0.3] * 3)], 0.2) == [3, 0]
    assert best([[], [0.99]], 0.1) == [0, 1]


def test_a_depth_that_only_one_row_wants_must_pay_for_itself() -> None:
    rows = [products([0.99] * 4)] + [products([0.9, 0.05, 0.05, 0.05])] * 7
    assert best(rows, 0.01, drafting=0.01)[0] == 4
    assert best(rows, 0.01, drafting=0.3) == [1] * 8


def test_steps_in_the_costs_are_seen_beyond_a_hill() -> None:
    chances = [products([0.9] * 8)] * 2
    assert Offer(chances, [1.0] + [2.0] * 16, [0.0], 2).best()[0] == [8, 8]


def test_a_likely_node_takes_along_those_before_it_or_stays_away() -> None:
    tree = [[0.9, 0.0, 0.8], [0.3]]
    assert best(tree, 0.15) == [3, 0]
    assert best(tree, 0.3) == [1, 0]


def test_nobody_stops_between_an_unlikely_node_and_the_likely_one_behind_it() -> None:
    tree = [[0.9, 0.0, 0.8], []]
    costs = [1.0, 1.0, 1.0, 2.0]
    assert Offer(tree, costs, [0.0], 2).best()[0] == [1, 0]
    assert Offer(tree, costs, [0.0], 2).worth(2.9) == [1, 0]


def test_tokens_must_be_worth_the_time_at_the_present_rate() -> None:
    offer = Offer([[0.6, 0.5, 0.3], [0.2]], [1.0, 1.2, 1.4, 1.6, 1.8], [0.0], 2)
    assert offer.worth(2.0) == [2, 0]
    assert offer.worth(0.0) == [2, 0]  # never below what a plain pass makes of a second
    assert offer.worth(4.0) == [0, 0]


# ---- control ----


def test_the_first_step_is_plain_then_drafts_are_tried() -> None:
    controller, one = AdaptiveController(), request()
    assert controller.plan([one], [3]) == [0] == controller.trim([one], [Draft([1, 2])])
    controller.latency.observe(1, 0, 1.0)
    assert controller.plan([one], [3]) == [3]
    assert controller.trim([one], [Draft([1, 2])]) == [2]
    assert controller.plan([], []) == controller.trim([], []) == []


def test_widths_follow_what_is_kept_and_what_it_costs() -> None:
    one = request()
    for slope, kept, expected in ((0.02, 8, 8), (0.02, 0, 0), (0.3, 8, 8), (0.3, 2, 2), (1.2, 8, 0)):
        controller = measured(slope)
        teach(controller, one, 8, kept)
        controller._drafter("some").purse, controller._drafter("some").opened = 0.0, True
        assert controller.plan([one], [8]) == [expected], (slope, kept)
        assert controller.plan([one], [min(expected, 1)]) == [min(expected, 1)]


def test_requests_beside_them_make_a_second_worth_more() -> None:
    one, draft = request(), Draft([1, 2, 3, 4])
    for slope, expected in ((0.2, 4), (0.3, 0)):
        controller = measured(slope, requests=4)
        teach(controller, one, 4, 4)
        controller._drafter("some").opened = True  # with nothing for trials
        assert controller.trim([one], [draft], others=3) == [expected]
        assert controller.plan([one], [4], others=3) == [expected]


def test_a_choice_is_left_only_for_a_better_one() -> None:
    controller, one = measured(0.0, drafting=0.2), request()
    past = controller._past(one)

    class Fixed(Offer):
        def __init__(self, promise: float) -> None:
            super().__init__([[0.0] * 4], [1.0] * 5, [0.0] * 5, 1)
            self.promise = promise

        def best(self) -> tuple[list[int], float]:
            return [3], self.promise

        def pace(self, widths) -> float:
            return 1.0

    past.width = 2
    drafter = past.drafter
    assert controller._settle(drafter, [past], [4], Fixed(1.02)) == [2]
    assert controller._settle(drafter, [past], [4], Fixed(1.04)) == [3]
    chosen = [controller._settle(drafter, [past], [4], Fixed(1.02))[0] for _ in range(10)]
    assert chosen == [2] * 7 + [3] + [2] * 2  # a little more, for long
    assert controller._settle(drafter, [past], [1], Fixed(1.0)) == [1]  # never beyond the room


def test_what_does_not_pay_is_tried_now_and_then_for_less_than_a_hundredth() -> None:
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


def test_a_trial_that_succeeds_is_followed_by_others_until_drafting_pays_again() -> None:
    controller, one = measured(0.1, drafting=0.1), request()
    teach(controller, one, 4, 0)
    steps = 0
    while controller.plan([one], [4])[0] < 4:
        steps += 1
        assert steps < 400
        if draft := Draft([1] * controller._past(one).trial.width) if controller._past(one).trial else None:
            assert controller.trim([one], [draft]) == [len(draft.tokens)]
            controller.learn(one, draft, range(len(draft.tokens)))
    assert controller._past(one).waited == 0


def test_a_token_is_as_likely_as_the_path_that_leads_to_it() -> None:
    one = request()
    controller = measured(0.25)
    sure = Draft([1, 2, 3, 4], confidence=[0.99, 0.9, 0.05, 0.9])
    assert controller.trim([one], [sure]) == [2]
    tree = Draft([1, 2, 3, 4], [-1, 0, -1, 2], confidence=[0.9, 0.9, 0.1, 0.9])
    assert controller.trim([one], [tree]) == [2]


def test_confidence_that_proves_wrong_is_not_believed() -> None:
    one = request()
    controller = measured(0.4)
    boast = Draft([1, 2, 3], confidence=[0.95, 0.95, 0.95])
    assert controller.trim([one], [boast]) == [3]
    for _ in range(60):
        controller.learn(one, boast, [])
    controller._drafter("some").purse = 0.0
    assert controller.trim([one], [boast]) == [0]
    modest = Draft([1, 2, 3], confidence=[0.3, 0.3, 0.3])
    controller = measured(0.4)
    for _ in range(60):
        controller.learn(one, modest, [0, 1, 2])
    assert controller.trim([one], [modest]) == [3]


def test_only_tokens_that_were_looked_at_teach_anything() -> None:
    controller, one = AdaptiveController(), request()
    tree = Draft([1, 2, 3, 4], [-1, -1, 0, 1], confidence=[0.55, 0.35, 0.65, 0.75])
    controller.learn(one, tree, [0, 2])
    calibration = controller._past(one).calibration
    assert sum(calibration.seen) == 3 and sum(calibration.kept) == 2
    assert calibration.rate(0.75) == pytest.approx(controller._drafter("some").calibration.rate(0.75))


def test_a_block_that_costs_the_same_is_drafted_whole_where_it_says_how_sure_it_is() -> None:
    one = request()
    for confidence, expected in ((None, 2), ([0.9] * 8, 8)):
        controller = AdaptiveController()
        for _ in range(64):
            for drafted in (0, 1, 2, 4, 8):
                controller.latency.observe(1, drafted, 1 + 0.4 * drafted)
            for width in (0, 1, 8):
                controller.draft_latency("some").observe(width, 0.2 if width else 0.0)
        draft = Draft([1] * 8, confidence=confidence)
        for _ in range(60):
            controller.trim([one], [draft])
            controller.learn(one, draft, [0, 1] if confidence is None else range(8))
        controller._past(one).waited = 0
        assert controller.plan([one], [8]) == [expected]


def test_the_floor_is_what_a_further_token_must_promise() -> None:
    controller, one = measured(0.2, drafting=0.1), request()
    assert AdaptiveController().min_acceptance("some", 1) == 0.0
    assert controller.min_acceptance("some", 1) == pytest.approx(0.2, rel=0.15)  # to verify it, at one token a second
    assert controller.min_continuation("some", 1) == pytest.approx(
        (0.2 + 0.1) / Odds.PRIOR, rel=0.15
    )  # to guess it as well
    teach(controller, one, 8, 8)
    for _ in range(300):
        controller.plan([one], [8])
        controller.trim([one], [Draft([1] * 8)])
    assert controller.min_acceptance("some", 1) == pytest.approx(0.2 * 9 / 3.4, rel=0.15)
    assert controller.min_continuation("some", 1) == pytest.approx(0.3 * 9 / 3.4, rel=0.15)
    assert 0 <= controller.min_acceptance("some", 16) <= controller.min_continuation("some", 16) <= 1


def test_a_request_that_is_gone_is_forgotten() -> None:
    controller, one = measured(0.1), request()
    controller.plan([one], [4])
    controller.learn(one, Draft([1]), [0])
    controller.forget(one)
    controller.forget(one)
    assert not controller.num_requests
