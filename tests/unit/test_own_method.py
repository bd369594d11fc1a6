"""The method of the examples, found by its import path as a user's own is."""

from __future__ import annotations

from pathlib import Path

import pytest
import talk

from outrider.speculation import DraftBatch


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def drafted(draft: DraftBatch) -> list[list[int]]:
    return draft.rows(draft.tokens)


def test_it_drafts_the_most_frequent_successors() -> None:
    own = talk.make("examples.own_method", width=3)
    one, other = talk.request([1, 2, 3, 1, 2, 4, 1, 2]), talk.request([5])
    assert drafted(talk.propose(own, [(one, [4]), (other, [6])], width=3)) == [[1, 2, 4], []]
    assert drafted(talk.propose(own, [(one, [7]), (other, [5])], width=2)) == [[], [6, 5]]
    own.accept([one, other], [0, 0])
    own.release([one, other])
    assert own.counted == own.seen == {}


def test_its_options_are_keys() -> None:
    own = talk.make("examples.own_method", width=3, least=2)
    assert drafted(talk.propose(own, [(talk.request([1, 2, 1]), [2])])) == [[]]
    assert own.needs.width == 3
