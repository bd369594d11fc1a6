"""Predicted outputs as a method."""

from __future__ import annotations

import pytest
import talk

from outrider.errors import UserError
from outrider.speculation import find
from outrider.speculation.drafters.lookup import RESUME_WINDOW

EXPECTED = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def follow(answer: list[int], prediction: list[int] = EXPECTED, width: int = 4) -> list[int]:
    """The draft after an answer that came token by token."""
    prediction_method = talk.make("prediction", width=width, least=0)
    one = talk.request([1, 2, 3], prediction)
    found: list[int] = []
    for token in answer:
        found = talk.say(prediction_method, one, token)
    return found


def test_the_prediction_is_followed_from_its_start() -> None:
    assert follow([10]) == [11, 12, 13, 14]
    assert follow([10, 11, 12]) == [13, 14, 15, 16]


def test_several_tokens_at_once_are_the_same() -> None:
    prediction = talk.make("prediction", width=4, least=0)
    one = talk.request([1, 2], EXPECTED)
    assert talk.say(prediction, one, 10, 11, 99, 13) == follow([10, 11, 99, 13]) == [14, 15, 16, 17]


def test_it_ends_where_the_prediction_ends() -> None:
    assert follow(EXPECTED[:8]) == [18, 19]
    assert follow(EXPECTED) == []
    assert follow([*EXPECTED, 50, 51]) == []


def test_a_token_that_was_replaced_is_skipped() -> None:
    assert follow([10, 11, 99]) == [13, 14, 15, 16]  # an assumption: 99 replaces 12
    assert follow([10, 11, 99, 13]) == [14, 15, 16, 17]


def test_tokens_that_were_inserted_are_skipped() -> None:
    assert follow([10, 11, 90, 91, 92, 12]) == [13, 14, 15, 16]


def test_tokens_that_were_left_out_are_skipped() -> None:
    assert follow([10, 11, 15]) == [16, 17, 18, 19]


def test_the_nearest_match_ahead_is_taken() -> None:
    text = [1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 7, 8]
    assert follow([1, 2, 3, 99, 1, 2], text) == [5, 6, 1, 2]
    assert follow([1, 2, 3, 4, 1, 2, 5, 99, 1, 2], text) == [7, 8]


def test_a_match_before_is_better_than_none() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    assert follow([1, 2, 3, 4, 5, 6, 99, 2, 3], text) == [4, 5, 6, 7]


def test_more_tokens_beat_a_nearer_match() -> None:
    text = [1, 2, 9, 3, 8, 4, 5, 9, 3, 7]
    assert follow([1, 99, 5, 9, 3], text) == [7]


def test_one_token_far_ahead_says_nothing() -> None:
    text = [1, *range(100, 100 + RESUME_WINDOW), 7, 8]
    assert follow([1, 50, 7], text, width=1) == [101]  # still lost
    assert follow([1, 50, 7], [text[0], *text[2:]], width=1) == [8]


def test_an_answer_may_start_somewhere_else() -> None:
    assert follow([12, 13]) == [14, 15, 16, 17]


def test_without_a_prediction_there_is_no_draft() -> None:
    prediction = talk.make("prediction", width=4)
    one, other = talk.request([1, 2, 3, 1, 2]), talk.request([1], EXPECTED)
    assert talk.rows(talk.propose(prediction, [(one, [3]), (other, [10])]))[0] == []
    assert prediction.states[one].answer == []  # and nothing is followed


def test_nothing_is_drafted_inside_a_prompt_or_without_draft_tokens() -> None:
    prediction = talk.make("prediction", width=4, least=0)
    one = talk.request([1, 2], EXPECTED)
    assert talk.say(prediction, one) == []
    assert talk.say(prediction, one, 10, width=0) == []
    assert talk.say(prediction, one, 11, width=2) == [12, 13]


def test_a_lost_answer_promises_less_until_it_is_found() -> None:
    prediction = talk.make("prediction", width=4, least=0)
    one = talk.request([1], EXPECTED)
    promised = []
    for token in (10, 99, 12, 13, 14):
        confidence = talk.propose(prediction, [(one, [token])]).confidence
        assert confidence is not None
        promised.append(confidence[0][0])
    start, lost, found, sure, surer = promised
    assert lost < found < sure < surer and lost < start


def test_it_learns_how_far_answers_follow() -> None:
    prediction = talk.make("prediction", width=4)
    long = list(range(100, 300))
    before = [prediction.rates.rate(key) for key in range(len(prediction.rates.prior))]
    one = talk.request([1], long)
    for token in long:
        talk.say(prediction, one, token)
    assert prediction.rates.rate(24) > before[24]
    other = talk.request([1], long)
    for token in range(500, 600):
        talk.say(prediction, other, token)
    assert prediction.rates.rate(len(before) - 1) < before[-1] / 2


def test_release_forgets_and_accept_is_harmless() -> None:
    prediction = talk.make("prediction")
    one = talk.request([1], EXPECTED)
    talk.say(prediction, one, 10)
    prediction.accept([one], [1])
    prediction.release([one, talk.request([])])
    assert prediction.states == {}
    assert one.prediction == EXPECTED


def test_impossible_options_are_refused() -> None:
    with pytest.raises(UserError, match="`longest` is 0"):
        find("prediction").Options(longest=0)
