"""How many drafted tokens pay."""

from __future__ import annotations

import pytest

from outrider.speculation.control import PATIENCE, PROBE, Acceptance, Control, Cost, admit, products
from outrider.types import Guess, Request, SamplingParams


def request(method: str = "some") -> Request:
    return Request("r", [1], SamplingParams(), 0, method=method)


def linear(slope: float):
    return lambda drafted: 1 + slope * drafted


def test_free_tokens_are_all_taken_and_dear_ones_none() -> None:
    chances = [products([0.9] * 4), products([0.2] * 4)]
    assert admit(chances, linear(0.0)) == [4, 4]
    assert admit(chances, linear(10.0)) == [0, 0]


def test_a_token_is_taken_while_it_raises_the_rate() -> None:
    # One row: the k-th token adds a^k tokens and 0.5 passes; the rate is 1 without any.
    assert admit([products([0.9] * 8)], linear(0.5)) == [3]
    assert admit([products([0.49] * 8)], linear(0.5)) == [0]
    assert admit([products([0.9] * 8)], linear(0.5), drafting=0.5) == [0]


def test_likely_tokens_of_one_row_go_before_unlikely_ones_of_another() -> None:
    assert admit([products([0.95] * 3), products([0.3] * 3)], linear(0.2)) == [3, 0]
    assert admit([[], products([0.99])], linear(0.1)) == [0, 1]
    assert admit([], linear(0.1)) == []


def test_costs_that_fall_in_steps_are_seen_beyond_a_hill() -> None:
    assert admit([products([0.9] * 8)], lambda drafted: 1.0 if drafted == 0 else 2.0) == [8]


def test_the_cost_of_tokens_is_learned_from_steps_with_and_without() -> None:
    cost = Cost()
    cost.observe(1, 0, 2.0)
    assert cost.seconds(1, 5) == cost.seconds(1, 0) == 2.0
    cost.observe(1, 4, 4.0)
    assert cost.seconds(1, 4) == pytest.approx(4.0)
    assert cost.seconds(1, 2) == pytest.approx(3.0)  # on the line
    assert cost.seconds(1, 8) == pytest.approx(6.0)
    assert cost.seconds(3, 0) == pytest.approx(3.0)  # two rows more, as dear as two drafted tokens
    cost.observe(1, 1, 2.01)  # the first one is almost free here
    assert cost.seconds(1, 1) == pytest.approx(2.01)
    assert cost.seconds(1, 2) == pytest.approx(2.01 + 1.99 / 3)


def test_an_interruption_is_no_measure() -> None:
    cost = Cost()
    for _ in range(30):
        cost.observe(1, 0, 2.0)
    cost.observe(1, 0, 200.0)
    assert cost.seconds(1, 0) == pytest.approx(2.2)
    cost.observe(1, 1, 90.0)  # the first of its kind, and unlucky: a wider step shows that it cannot be so
    cost.observe(1, 3, 3.2)
    assert cost.seconds(1, 1) <= 3.2


def test_what_is_kept_is_learned_by_depth_and_by_request() -> None:
    method = Acceptance()
    lucky, unlucky = Acceptance(method), Acceptance(method)
    assert lucky.rate(0) == pytest.approx(0.8)
    for _ in range(200):
        lucky.learn(4, 2)
        unlucky.learn(4, 0)
    assert lucky.rate(0) > 0.9 > 0.1 > lucky.rate(2)
    assert unlucky.rate(0) < 0.1
    assert unlucky.seen[1] == 0  # nobody looked at what comes after a token that was not kept
    assert lucky.rate(3) == pytest.approx(0.8)


def test_the_first_step_is_plain_then_drafts_are_tried() -> None:
    control, one = Control(), request()
    chances = control.survivals(one, 3)
    assert control.widths([one], [chances], 0.0) == [0]
    control.cost.observe(1, 0, 1.0)
    assert control.widths([one], [chances], 0.0) == [3]


def test_a_drafter_that_does_not_pay_is_tried_again_now_and_then() -> None:
    control, one = Control(), request()
    control.cost.observe(1, 0, 1.0)
    control.cost.observe(1, 1, 2.0)
    for _ in range(50):
        control.learn(one, Guess([1, 2, 3]), 0)
    widths = [control.widths([one], [control.survivals(one, 3)], 0.0)[0] for _ in range(3 * PATIENCE)]
    assert sorted(set(widths)) == [0, PROBE] and widths.count(PROBE) == 3
    control.forget(one)
    assert not control._requests and not control._refused
