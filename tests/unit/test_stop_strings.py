"""Stop strings by an automaton: the same as a search for each of them, in time that does not grow with them."""

from __future__ import annotations

import random
import time

import pytest

from outrider.stop_strings import StopStrings


def held_by_search(text: str, stops: list[str]) -> int:
    longest = max(map(len, stops))
    tails = (n for n in range(min(longest - 1, len(text)), 0, -1))
    return next((n for n in tails if any(stop.startswith(text[-n:]) for stop in stops)), 0)


@pytest.mark.parametrize("seed", range(40))
def test_matches_and_held_texts_are_those_of_a_search(seed: int) -> None:
    dice = random.Random(seed)
    stops = ["".join(dice.choices("ab", k=dice.randint(1, 6))) for _ in range(dice.randint(1, 6))]
    own, state, text = StopStrings(stops), 0, ""
    for _ in range(200):
        character = dice.choice("abc" if dice.random() < 0.1 else "ab")
        text, state = text + character, own.advance(state, character)
        assert sorted(own.complete(state)) == sorted({stop for stop in stops if text.endswith(stop)})
        assert own.held(state) == held_by_search(text, stops)


def test_many_long_stop_strings_cost_no_more_than_one() -> None:
    """The tails of the text were compared with each of them: minutes for these."""
    own = StopStrings([f"{'a' * (3000 + n)}b{n}" for n in range(16)])
    began, state = time.process_time(), 0
    for _ in range(20_000):
        state = own.advance(state, "a")
        own.held(state)
        own.complete(state)
    assert time.process_time() - began < 2
