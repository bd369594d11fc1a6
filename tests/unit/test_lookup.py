"""What drafters without a model share: the n-gram index and the acceptance statistics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation.adaptive.acceptance_model import Rates
from outrider.speculation.drafters.lookup import (
    MAX_MATCH,
    RESUME_WINDOW,
    TOKEN_BITS,
    AcceptanceTracker,
    NgramIndex,
    growing_matches,
    match_length,
    rates_by_match_length,
)
from outrider.types import Draft

texts = st.lists(st.integers(0, 3), max_size=60)


def search(text: list[int], shortest: int, longest: int) -> tuple[int, int] | None:
    """Return the latest earlier position of the longest n-gram, by exhaustive search."""
    for size in range(min(longest, len(text)), shortest - 1, -1):
        for index in range(len(text) - 1, size - 1, -1):
            if text[index - size : index] == text[-size:]:
                agreed = size
                while agreed < MAX_MATCH and index > agreed and text[index - agreed - 1] == text[-agreed - 1]:
                    agreed += 1
                return index, agreed
    return None


@given(texts, st.integers(1, 4), st.integers(0, 3), st.integers(1, 7))
def test_the_index_finds_what_a_search_finds(text: list[int], shortest: int, more: int, chunk: int) -> None:
    grams = NgramIndex(shortest, shortest + more)
    for start in range(0, len(text), chunk):
        grams.extend(text[start : start + chunk])
        assert grams.text == text[: start + chunk]
        assert grams.match(None) == search(grams.text, shortest, shortest + more)


def test_n_grams_of_different_lengths_do_not_collide() -> None:
    top = 2**TOKEN_BITS - 2
    for other in ([0, 0, 5], [0, top, 5], [top, 5]):
        grams = NgramIndex(1, 3)
        grams.extend([*other, 9, 7, 5])
        assert grams.match(None) == (len(other), 1)


class Watched(list[int]):
    """A list that counts how many of its items are read."""

    reads = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        found = super().__getitem__(key)
        self.reads += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.reads += len(self)
        return super().__iter__()


def test_what_is_known_is_not_read_again() -> None:
    grams = NgramIndex(1, 3)
    grams.text = text = Watched()
    for token in range(1000):
        grams.extend([token])
        assert grams.match(None) is None
    assert text.reads == 0
    for token in range(1000):
        grams.extend([token])
        assert grams.match(token) is not None
    assert text.reads <= 1000 * (2 * MAX_MATCH + 10)


def test_a_copy_goes_on_where_it_was() -> None:
    grams = NgramIndex(1, 2)
    grams.extend([1, 2, 3, 9, 1, 2, 4, 9, 1, 2])
    assert grams.match(None) == (6, 3)  # the latest: 9 1 2
    assert grams.match(2) == (2, 2)  # the copy stood at the first
    assert grams.match(3) == (6, 3)
    assert grams.match(10) == (6, 3)  # the end of the text is no position to copy from


def test_a_copy_that_went_on_far_away_is_another_one() -> None:
    grams = NgramIndex(1, 2)
    grams.extend([8, *[5] * RESUME_WINDOW, 1, 2, 3, 1, 2, 4, 1, 2])
    first = 1 + RESUME_WINDOW + 2
    assert grams.match(first - RESUME_WINDOW) == (first + 3, 2)
    assert grams.match(first - RESUME_WINDOW + 1) == (first, 2)


def test_agreement_is_capped() -> None:
    text = [1] * 100
    assert match_length(text, 50, text, 1) == MAX_MATCH
    assert match_length(text, 3, text, 1) == 3
    assert match_length([2, 1, 1], 3, [3, 1, 1], 0) == 2


def rates(acceptance: Rates) -> list[float]:
    return [acceptance.rate(key) for key in range(len(acceptance.prior))]


def test_acceptance_rates_follow_outcomes_and_forget_the_prior() -> None:
    acceptance = Rates([0.5, 0.5])
    for step in range(4000):
        acceptance.learn(1, step % 10 != 0)
    assert rates(acceptance)[0] == 0.5
    assert rates(acceptance)[1] == pytest.approx(0.9, abs=0.02)
    for _ in range(2000):
        acceptance.learn(1, False)
    assert rates(acceptance)[1] < 0.05


def test_only_what_the_text_shows_is_judged() -> None:
    acceptance = Rates([0.5, 0.5, 0.5, 0.5])
    record = AcceptanceTracker()
    draft = record.start_draft(acceptance, 2, [7, 8, 9, 9], [0, 1, 2, 3], least=0.2)
    assert draft.tokens == [7, 8] and draft.confidence == [0.5, 0.5]
    # The step accepted both and added a token: the third draft token was right too, the fourth is unknown.
    assert record.observe(acceptance, [1, 2, 7, 8, 9]) == [0, 1, 2]
    assert [rate > 0.5 for rate in rates(acceptance)] == [True, True, True, False]
    assert rates(acceptance)[3] == 0.5
    record.start_draft(acceptance, 5, [4, 4], [0, 1], least=0.2)
    before = rates(acceptance)
    assert record.observe(acceptance, [1, 2, 7, 8, 9, 5, 4]) == []
    assert rates(acceptance)[0] < before[0] and rates(acceptance)[1] == before[1]
    before = rates(acceptance)
    assert record.observe(acceptance, [1, 2, 7, 8, 9, 5, 4, 4]) == []  # a draft is judged once
    assert rates(acceptance) == before


def confidence(draft: Draft) -> float:
    """Return the confidence of the first token."""
    assert draft.confidence
    return draft.confidence[0]


def test_a_request_that_fares_better_is_trusted_more() -> None:
    acceptance = Rates([0.5])
    lucky, unlucky = AcceptanceTracker(), AcceptanceTracker()
    for step in range(60):
        lucky.start_draft(acceptance, step, [1], [0], 0)
        lucky.observe(acceptance, [1] * (step + 1))
        unlucky.start_draft(acceptance, step, [2], [0], 0)
        unlucky.observe(acceptance, [1] * (step + 1))
    assert rates(acceptance)[0] == pytest.approx(0.5, abs=0.1)
    assert confidence(lucky.start_draft(acceptance, 60, [1], [0], 0)) > 0.75
    assert confidence(unlucky.start_draft(acceptance, 60, [1], [0], 0)) < 0.25


def test_what_is_drafted_does_not_depend_on_what_was_learned() -> None:
    fresh, taught = Rates(rates_by_match_length()), Rates(rates_by_match_length())
    for level in range(MAX_MATCH + 1):
        for _ in range(100):
            taught.learn(level, False)
    for level in range(1, 10):
        levels = growing_matches(8)[level : level + 8]
        drafts = [
            AcceptanceTracker().start_draft(acceptance, 0, list(range(8)), levels, 0.1)
            for acceptance in (fresh, taught)
        ]
        assert drafts[0].tokens == drafts[1].tokens
        assert confidence(drafts[0]) > 2 * confidence(drafts[1])


def test_more_agreement_promises_more() -> None:
    prior = rates_by_match_length()
    assert prior == sorted(prior) and prior[0] > 0 and prior[-1] < 1
    assert growing_matches(3)[MAX_MATCH - 1 :] == [MAX_MATCH - 1, MAX_MATCH, MAX_MATCH, MAX_MATCH, MAX_MATCH]
