"""Trees of drafters without a model: several occurrences of an n-gram, several continuations of a suffix."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import talk
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import UserError
from outrider.request import Request
from outrider.speculation import DraftBatch
from outrider.speculation.adaptive.acceptance_model import Rates
from outrider.speculation.drafters.lookup import AcceptanceTracker, grow_tree, rates_by_match_length
from outrider.speculation.methods.suffix import AMBIGUOUS

METHODS = ("ngram", "suffix")
texts = st.lists(st.integers(0, 3), min_size=2, max_size=40)
Path = tuple[int, ...]


def paths(draft_batch: DraftBatch, row: int = 0) -> list[Path]:
    """The tokens up to each node, after a look at the tree's shape."""
    assert draft_batch.parents is not None and draft_batch.logits is None and draft_batch.confidence is not None
    tokens, parents, confidence = (
        draft_batch.drafts()[row].tokens,
        draft_batch.drafts()[row].parents,
        draft_batch.confidence[row],
    )
    assert len(tokens) == len(parents) == len(confidence)
    found: list[Path] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert -1 <= parent < len(found)
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found)  # no token twice after the same one
    assert all(0 < probability < 1 for probability in confidence)
    for node in range(-1, len(tokens)):
        assert sum(c for c, parent in zip(confidence, parents, strict=True) if parent == node) < 1
    return found


def grow(drafter: Any, one: Request, *fresh: int, width: int = 100) -> list[Path]:
    return paths(talk.propose(drafter, [(one, fresh)], width))


def after(name: str, text: Sequence[int], width: int = 100, **options: Any) -> list[Path]:
    """The tree of a fresh drafter after this text."""
    return grow(talk.make(name, **options), talk.request(text[:-1]), text[-1], width=width)


def continuations(text: Sequence[int], count: int) -> set[Path]:
    """What came after the last token, wherever it stood before; a copy that reaches the end goes on with itself."""
    found = set()
    for index in range(1, len(text)):
        if text[index - 1] == text[-1]:
            rest = list(text[index:])
            found.add(tuple((rest * count)[:count]))
    return found


@settings(max_examples=60)
@given(texts, st.integers(2, 4), st.integers(1, 12), st.integers(1, 6))
def test_every_path_was_said_before(text: list[int], branches: int, width: int, levels: int) -> None:
    known = continuations(text, 12)
    for name in METHODS:
        width = max(width, branches)
        found = after(name, text, width=width, branches=branches, max_depth=levels, least=0)
        assert len(found) <= width
        assert all(any(one[: len(path)] == path for one in known) for path in found)
        assert max(map(len, found), default=0) <= levels
        assert max(Counter(path[:-1] for path in found).values(), default=0) <= branches


@settings(max_examples=60)
@given(texts, st.integers(2, 4), st.integers(1, 12), st.integers(0, 12))
def test_a_bigger_tree_begins_with_the_smaller(text: list[int], branches: int, small: int, more: int) -> None:
    for name in METHODS:
        less, whole = (after(name, text, width, branches=branches) for width in (small, small + more))
        assert whole[: len(less)] == less and len(less) <= small


@settings(max_examples=60)
@given(texts, st.integers(1, 9))
def test_one_occurrence_is_the_chain(text: list[int], width: int) -> None:
    """The same copy, token for token and probability for probability, by the code that grows trees."""
    ngram = talk.make("ngram", width=width)
    one = talk.request(text[:-1])
    chain = talk.propose(ngram, [(one, text[-1:])])
    history = ngram.states[one]
    index = history.index.match(None)
    if index is not None:
        tree = ngram.draft_tree(history, index, width, width)
        count = len(tree.tokens)
        assert ([tree.tokens], [tree.confidence]) == (chain.tokens, chain.confidence)
        assert tree.parents == list(range(-1, count - 1))


@pytest.mark.parametrize("name", METHODS)
def test_one_branch_is_the_chain(name: str) -> None:
    source = random.Random(5)
    text = [source.randrange(4) for _ in range(120)]
    plain, one = talk.make(name, width=6), talk.make(name, width=6, branches=1)
    assert not one.needs.trees
    first, second = talk.request(text[:3]), talk.request(text[:3])
    for token in text[3:]:
        drafts = talk.propose(plain, [(first, [token])]), talk.propose(one, [(second, [token])])
        assert drafts[0] == drafts[1]
    short = talk.make(name, width=6, max_depth=2, least=0)
    assert len(talk.say(short, talk.request([1, 2, 3, 4, 5, 6, 1, 2]), 3)) == 2


def test_the_latest_occurrences_of_the_longest_match_come_first() -> None:
    text = [1, 2, 3, 100, 1, 2, 3, 200, 9, 2, 3, 300, 1, 2, 3]
    found = after("ngram", text, width=20, branches=3, max_depth=1, least=0)
    assert found == [(200,), (100,), (300,)]  # the last has less before it that agrees
    assert after("ngram", text, width=20, branches=2, max_depth=1, least=0) == [(200,), (100,)]
    assert after("ngram", text, width=20, branches=3, max_depth=1, longest=1, least=0) == [(300,), (200,), (100,)]


def test_occurrences_that_agree_share_a_path_as_long_as_they_do() -> None:
    found = after("ngram", [1, 5, 6, 7, 1, 5, 6, 8, 1], width=20, branches=2, max_depth=3, least=0)
    assert set(found) == {(5,), (5, 6), (5, 6, 8), (5, 6, 7)}
    assert found.index((5, 6, 8)) < found.index((5, 6, 7))


def test_a_copy_goes_on_from_the_branch_that_came() -> None:
    ngram = talk.make("ngram", width=9, branches=2, least=0)
    one = talk.request([10, 11, 12, 1, 2, 20, 30, 10, 40, 50, 1, 2, 60])
    assert {(40,), (11,)} <= set(grow(ngram, one, 10))
    assert grow(ngram, one, 11, 77) == []  # the second branch came; then an unknown token
    assert ngram.states[one].resume == 3
    assert grow(ngram, one, 1, 2)[0] == (20,)  # the latest occurrence has 60


def test_suffixes_branch_by_their_counts() -> None:
    text = [token for index, said in enumerate([3, 4, 3, 5, 4, 3]) for token in (50 + index, 1, 2, said)] + [1, 2]
    found = after("suffix", text, width=20, branches=2, max_depth=1, least=0)
    assert found == [(3,), (4,)]
    assert after("suffix", text, width=20, branches=3, max_depth=1, least=0) == [(3,), (4,), (5,)]
    often = [token for index, said in enumerate([3, 4, 3, 5, 4, 3] * 4) for token in (50 + index, 1, said)] + [1]
    assert after("suffix", often, branches=3, max_depth=1, least=0) == [(3,), (4,), (5,)]  # from an open node


def test_the_shortest_suffix_has_its_say() -> None:
    repeated = [*[1, 2] * 9, *[1, 3] * 8, *[1, 4] * 12, 1]
    assert after("suffix", repeated, branches=3, max_depth=1, least=0) == [(4,), (2,), (3,)]


def test_a_shorter_suffix_knows_more() -> None:
    """Where the long match saw one continuation, a shorter one adds what it saw."""
    text = [7, 8, 9, 1, 5, 9, 2, 8, 9]
    assert after("suffix", text, width=9, branches=2, max_depth=1, least=0) == [(1,), (2,)]


def test_both_trees_of_suffixes_grow_one() -> None:
    suffix = talk.make("suffix", branches=2, least=0)
    one = talk.request([0])
    talk.propose(suffix, [(one, [1, 2, 3, 9])])
    suffix.release([one])
    other = talk.request([1, 2, 4, 7])
    found = grow(suffix, other, 1, 2)
    assert found[0] == (4,) and (3,) in found
    assert {len(path) for path in found} == {1, 2}  # no deeper than what matched


def test_rows_of_one_step_do_not_mix() -> None:
    for name in METHODS:
        drafter = talk.make(name, branches=2, least=0)
        steps = [(talk.request(text[:-1]), text[-1:]) for text in ([1, 2, 3, 1, 2], [4, 5, 6], [], [7, 8, 9, 7, 8])]
        draft_batch = talk.propose(drafter, steps)
        assert [paths(draft_batch, row)[:1] for row in range(4)] == [[(3,)], [], [], [(9,)]]


def rates(acceptance: Rates) -> list[float]:
    return [acceptance.rate(key) for key in range(len(acceptance.prior))]


def test_tokens_are_judged_in_the_order_that_they_are_tried() -> None:
    acceptance = Rates([0.5, 0.4, 0.5, 0.5])
    record = AcceptanceTracker()
    #      7 - 9
    # end < 8 - 6
    likely = record.start_draft(acceptance, 2, [7, 8, 9, 6], [0, 1, 2, 3], 0.0, [-1, -1, 0, 1])
    assert likely.confidence == pytest.approx([0.5, 0.5 * 0.4, 0.5, 0.5])
    assert record.observe(acceptance, [1, 2, 8, 6, 5]) == [1, 3]
    first, second, third, fourth = rates(acceptance)
    assert first < 0.5 and second > 0.4 and third == 0.5 and fourth > 0.5
    cut = record.start_draft(acceptance, 5, [7, 8, 9, 6], [0, 1, 2, 3], 0.22, [-1, -1, 0, 0])
    assert (cut.tokens, cut.parents) == ([7], [-1])  # by the prior, 8 has 0.2; what comes after it is cut too
    before = rates(acceptance)
    assert record.observe(acceptance, [1, 2, 8, 6, 5, 3]) == []  # both that could come were wrong
    assert rates(acceptance)[0] < before[0] and rates(acceptance)[1] < before[1] and rates(acceptance)[2:] == before[2:]


def test_a_sketch_is_the_most_probable_by_the_prior() -> None:
    acceptance = Rates([0.5, 0.8])
    tree = grow_tree(acceptance, 0, lambda state: [(1, 0, 2 * state + 1), (2, 1, 2 * state + 2)], 5, 3)
    assert tree.tokens == [1, 2, 1, 2, 1]  # 0.5, then 0.5 * 0.8, 0.5 * 0.5, ...
    assert tree.parents == [-1, -1, 0, 0, 1] and tree.states == [1, 2, 3, 4, 5]


def replay(name: str, text: list[int], **options: Any) -> tuple[float, Any]:
    """Tokens a step if each step is told what of its draft came."""
    drafter, one, at, steps = talk.make(name, **options), talk.request(text[:20]), 21, 1
    fresh = text[20:21]
    while at < len(text):
        draft_batch = talk.propose(drafter, [(one, fresh)])
        draft = draft_batch.drafts()[0]
        fresh = text[at : at + len(draft.path(text[at:])) + 1]
        at += len(fresh)
        steps += 1
    return (len(text) - 20) / steps, drafter


def stutter(length: int) -> list[int]:
    """A text of phrases that begin alike and go on in one of two ways."""
    source = random.Random(3)
    found: list[int] = []
    while len(found) < length:
        phrase = source.randrange(8)
        found += [phrase, 10 + phrase, 20 + 2 * phrase + source.randrange(2), 40 + phrase]
    return found


@pytest.mark.parametrize("name", METHODS)
def test_trees_keep_more_and_learn_by_it(name: str) -> None:
    text = stutter(1200)
    chain, _ = replay(name, text, width=8)
    tree, drafter = replay(name, text, width=8, branches=2)
    assert tree > 1.05 * chain
    others = slice(len(rates_by_match_length()) if name == "ngram" else 2 * AMBIGUOUS, None)
    learned, prior = rates(drafter.rates)[others], drafter.rates.prior[others]
    assert max(rate / before for rate, before in zip(learned, prior, strict=True)) > 1.5


def test_what_is_drafted_does_not_depend_on_what_was_learned() -> None:
    text = stutter(200)
    for name in METHODS:
        fresh, taught = talk.make(name, branches=3), talk.make(name, branches=3)
        for level in range(len(taught.rates.prior)):
            for _ in range(100):
                taught.rates.learn(level, False)
        assert grow(fresh, talk.request(text[:-1]), text[-1]) == grow(taught, talk.request(text[:-1]), text[-1])


@pytest.mark.parametrize("name", METHODS)
def test_needs_and_refusals(name: str) -> None:
    needs = talk.make(name, width=15, branches=3).needs
    assert (needs.width, needs.trees, needs.has_kv, needs.has_probs) == (15, True, False, False)
    with pytest.raises(UserError, match="`branches` is 0: it must be at least 1"):
        talk.make(name, branches=0)
    with pytest.raises(UserError, match="`max_depth` is 0: it must be at least 1"):
        talk.make(name, max_depth=0)
