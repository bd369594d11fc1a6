"""Prompt lookup as a method."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import talk
import torch

from outrider.errors import UserError
from outrider.kernels import NgramLookup, TokenHistory, cpu, reference
from outrider.speculation import find
from outrider.speculation.drafters.lookup import MAX_MATCH, RESUME_WINDOW

# The situations that vLLM tests: text, shortest, longest, width, draft. Where one n-gram occurred several times it
# takes the earliest place, we the latest; only the last row comes out differently, there as [100, 1].
SITUATIONS = [
    ([1, 2, 3, 4, 5], 2, 2, 2, []),
    ([1, 2, 3, 4, 1, 2, 3], 4, 4, 2, []),
    ([1, 2, 3, 4, 1, 2, 3], 3, 4, 2, [4, 1]),
    ([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], 3, 4, 2, [1, 2]),
    ([3, 4, 5, 2, 3, 4, 1, 2, 3, 4], 2, 4, 2, [1, 2]),
    ([1, 2, 3, 1, 2], 2, 2, 2, [3, 1]),
    ([4, 5, 6], 2, 2, 2, []),
    ([7], 1, 3, 2, []),
    ([1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3], 3, 3, 2, [300, 1]),
]


@pytest.mark.parametrize(("text", "shortest", "longest", "width", "draft"), SITUATIONS)
def test_situations(text: list[int], shortest: int, longest: int, width: int, draft: list[int]) -> None:
    ngram = talk.make("ngram", shortest=shortest, longest=longest, width=width, least=0)
    assert talk.say(ngram, talk.request(text[:-1]), text[-1]) == draft


@pytest.mark.parametrize("ops", [reference, cpu])
@pytest.mark.parametrize(("vocabulary", "options"), [(4, {}), (8, {"width": 3}), (3, {"shortest": 2, "longest": 5})])
def test_the_lookup_on_the_device_finds_the_same_drafts(ops: Any, vocabulary: int, options: dict[str, int]) -> None:
    random = Random(vocabulary)
    for _ in range(12):
        ngram = talk.make("ngram", **{"width": 8, **options})
        one = talk.request([random.randrange(vocabulary) for _ in range(random.randrange(1, 30))])
        width, settings = ngram.options.width, ngram.options
        kept = torch.tensor(ngram.kept_tokens(width), dtype=torch.int32)
        lookup = NgramLookup(settings.shortest, settings.longest, RESUME_WINDOW, kept)
        copies = torch.full((1, 3), -1, dtype=torch.int32)
        new = [random.randrange(vocabulary)]
        for _ in range(40):
            draft = talk.say(ngram, one, *new)
            text = torch.tensor(one.prompt + one.output + [0] * (-one.length % 4), dtype=torch.int32)
            history = TokenHistory(text, torch.arange(len(text) // 4, dtype=torch.int32)[None], 4)
            last, limit = (torch.tensor([number], dtype=torch.int32) for number in (one.length - 1, 10_000))
            found = ops.ngram_drafts(history, lookup, text[last.long()], last, limit, copies, width)
            assert [token for token in found[0].tolist() if token >= 0] == draft
            accepted = draft[: random.randrange(len(draft) + 1)] if random.random() < 0.8 else []
            new = [*accepted, random.randrange(vocabulary)]


def test_rows_of_one_step_do_not_mix() -> None:
    ngram = talk.make("ngram", shortest=2, longest=2, width=3, least=0)
    steps = [(talk.request(text[:-1]), text[-1:]) for text in ([1, 2, 3, 1, 2], [4, 5, 6], [], [7, 8, 9, 6, 7, 8])]
    draft = talk.propose(ngram, steps)
    assert talk.rows(draft) == [[3, 1, 2], [], [], [9, 6, 7]]


def test_a_loop_is_drafted_beyond_the_text() -> None:
    ngram = talk.make("ngram", width=7, least=0)
    assert talk.say(ngram, talk.request([5, 1, 2, 3, 1, 2]), 3) == [1, 2, 3, 1, 2, 3, 1]


def test_a_copy_is_resumed_behind_what_was_left_out() -> None:
    ngram = talk.make("ngram", width=2, least=0)
    one = talk.request([10, 11, 12, 1, 2, 20, 30, 1, 2, 40, 50])
    assert talk.say(ngram, one, 10) == [11, 12]
    assert talk.say(ngram, one, 11) == [12, 1]
    assert talk.say(ngram, one, 1) == [2, 20]  # the latest place has 2, 40


def test_nothing_is_drafted_inside_a_prompt_or_without_draft_tokens() -> None:
    ngram = talk.make("ngram", width=4, least=0)
    one = talk.request([1, 2, 3, 1, 2, 3])
    assert talk.say(ngram, one) == []
    assert talk.say(ngram, one, 1, width=0) == []
    assert ngram.states == {}  # and it costs nothing
    assert talk.say(ngram, one, 2, width=2) == [3, 1]  # what it slept through is caught up with
    assert talk.say(ngram, one, 3) == [1, 2, 3, 1]


def test_rejected_drafts_leave_no_trace() -> None:
    """Drafting along the way changes nothing that is found later."""
    text = [1, 2, 3, 4, 1, 2, 9, 4, 1, 2, 3, 9, 1, 2, 9]
    busy, quiet = talk.make("ngram", shortest=2, least=0), talk.make("ngram", shortest=2, least=0)
    one, other = talk.request(text[:2]), talk.request(text[:2])
    for token in text[2:-1]:
        talk.say(busy, one, token)
        talk.say(quiet, other, token, width=0)
    history = busy.states[one]
    assert history.index.text == text[:-1]
    history.resume = None
    assert talk.say(busy, one, text[-1]) == talk.say(quiet, other, text[-1])
    assert busy.states[one].index.positions == quiet.states[other].index.positions


def test_a_preempted_request_keeps_its_index() -> None:
    ngram = talk.make("ngram", least=0, width=2)
    one = talk.request([1, 2, 3, 4])
    talk.say(ngram, one, 1)
    positions = dict(ngram.states[one].index.positions)
    one.computed = 0
    for _ in range(3):  # its text runs again, in chunks
        assert talk.say(ngram, one) == []
    assert ngram.states[one].index.positions == positions
    assert talk.say(ngram, one, 2) == [3, 4]


def test_it_learns_which_matches_to_trust() -> None:
    ngram = talk.make("ngram", width=4)
    before = [ngram.rates.rate(key) for key in range(len(ngram.rates.prior))]
    one = talk.request(list(range(100)))
    for token in range(100):  # a text that repeats itself to the letter
        talk.say(ngram, one, token)
    assert ngram.rates.rate(MAX_MATCH) > before[MAX_MATCH]
    other = talk.request([1] * 3)
    for token in range(200, 300):  # one that repeats a token, and never what followed
        talk.say(ngram, other, token, 1)
    assert ngram.rates.rate(1) < before[1]


def test_confidence_grows_along_a_match_and_with_its_length() -> None:
    ngram = talk.make("ngram", width=6)
    one = talk.request([*range(50), 90])
    short = talk.propose(ngram, [(one, [10])]).confidence
    long = talk.propose(ngram, [(one, [11, 12, 13, 14, 15])]).confidence
    assert short is not None and long is not None
    assert short[0] == sorted(short[0]) and long[0] == sorted(long[0])
    assert long[0][0] > short[0][0] and len(long[0]) == 6


def test_accept_is_harmless_and_release_forgets() -> None:
    ngram = talk.make("ngram")
    requests = [talk.request([1, 2, 1]) for _ in range(3)]
    for one in requests:
        talk.say(ngram, one, 2)
    ngram.accept(requests, [0, 1, 2])
    ngram.release([*requests, talk.request([])])
    assert ngram.states == {}


def test_needs() -> None:
    needs = talk.make("ngram", width=5).needs
    assert (needs.width, needs.has_kv, needs.aux_layers, needs.trees) == (5, False, (), False)


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (3, 2), (-1, -1)])
def test_impossible_lengths_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(UserError, match=f"`shortest` is {shortest} and `longest` is {longest}"):
        find("ngram").Options(shortest=shortest, longest=longest)
