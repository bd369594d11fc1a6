"""Which logits change, and how, for each parameter."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.device import Cpu
from outrider.kernels import reference
from outrider.request import Request, Row
from outrider.sampler import DraftedContext, Sampler, build_processors, changed_entries, paths
from outrider.types import Draft, SamplingParams, TokenLogprobs

BAN = float("-inf")


def request(output=(), prompt=(1, 2), bad_words=(), end=(), **fields) -> Request:
    params = SamplingParams(**{"temperature": 0, **fields})
    return Request("r", list(prompt), params, 0, frozenset(end), bad_words=bad_words, output=list(output))


def row(asked: Request, draft: Draft | None = None) -> Row:
    return Row(asked, asked.length - 1, asked.tokens(asked.length - 1, asked.length), True, draft)


def changes_after(request: Request, *drafted: int) -> dict[int, tuple[float, float]]:
    """Return scale and bias of each token whose logit changes."""
    tokens, scale, bias = changed_entries(DraftedContext(request, list(drafted)))
    return dict(zip(tokens.tolist(), zip(scale.tolist(), bias.tolist(), strict=True), strict=True))


def pick(logits: torch.Tensor, requests: list[Request]) -> tuple[list[int], dict[int, list[TokenLogprobs]]]:
    sampler = Sampler(reference, Cpu(), logits.shape[1])
    inputs = sampler.prepare([row(each) for each in requests])
    inputs.logits.copy_(logits)
    raw = sampler.process_logits(inputs)
    tokens = reference.sample(inputs.logits, inputs.sampling, inputs.tokens).tolist()
    chosen = [[0]] * len(tokens)
    return tokens, {} if raw is None else sampler.row_logprobs(inputs, raw, [[token] for token in tokens], chosen)


def test_no_changes_for_plain_requests() -> None:
    assert build_processors([row(request()), row(request([3]), Draft([4, 5]))], Cpu()) is None


def test_steps_without_a_temperature_are_known_to_be_greedy() -> None:
    sampler = Sampler(reference, Cpu(), 8)
    greedy, sampled = request(), request(temperature=0.1)
    for requests, expected in (([greedy, greedy], True), ([greedy, sampled], False), ([greedy], True)):
        assert sampler.prepare([row(each) for each in requests]).sampling.greedy == expected


def test_repetition_counts_prompt_and_output_the_others_only_output() -> None:
    assert changes_after(request([5, 5], repetition_penalty=2.0)) == {1: (2, 0), 2: (2, 0), 5: (2, 0)}
    assert changes_after(request([5, 5, 6], presence_penalty=1.0, frequency_penalty=0.5)) == {5: (1, -2), 6: (1, -1.5)}


def test_bias_adds_to_penalties_and_bans_win() -> None:
    changes = changes_after(request([5], presence_penalty=1.0, logit_bias={5: 3.0, 6: 9.0}, banned_token_ids=[6]))
    assert changes == {5: (1, 2), 6: (1, BAN)}


def test_allowed_tokens_keep_their_penalties_and_nothing_else() -> None:
    changes = changes_after(request([5], presence_penalty=1.0, allowed_token_ids=[5, 7], banned_token_ids=[7, 8]))
    assert changes == {5: (1, -1), 7: (1, BAN)}


def test_ends_are_banned_until_min_tokens() -> None:
    early = request([5], end=[9], stop_token_ids=[8], min_tokens=2)
    assert changes_after(early) == {8: (1, BAN), 9: (1, BAN)}
    assert build_processors([row(request([5, 6], end=[9], stop_token_ids=[8], min_tokens=2))], Cpu()) is None


def test_the_last_token_of_a_bad_word_is_banned_after_its_beginning() -> None:
    word = ((4, 5, 6),)
    assert changes_after(request([4, 5], bad_words=word)) == {6: (1, BAN)}
    assert changes_after(request([5], prompt=(3, 4), bad_words=word)) == {6: (1, BAN)}
    assert changes_after(request([5, 4], bad_words=word)) == {}
    assert changes_after(request(bad_words=((7,),))) == {7: (1, BAN)}


def test_rows_do_not_touch_each_other() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]] * 3)
    rows = [request(), request(logit_bias={0: 5.0}), request(allowed_token_ids=[3])]
    assert pick(logits, rows) == ([1, 0, 3], {})


def test_logprobs_come_from_before_the_changes() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    before = torch.log_softmax(logits, -1)[0]
    (token,), reports = pick(logits, [request(logit_bias={0: 50.0}, logprobs=2)])
    (found,) = reports[0]
    assert token == found.token == 0
    assert abs(found.logprob - float(before[0])) < 1e-6
    assert [each for each, _ in found.top] == [1, 2] and found.rank == 3


def test_changes_look_along_the_drafted_path() -> None:
    asked = request([5], presence_penalty=1.0, bad_words=((4, 6, 7), (3,)), end=[9], min_tokens=3)
    early = {3: (1, BAN), 9: (1, BAN)}
    assert changes_after(asked) == {5: (1, -1), **early}
    assert changes_after(asked, 4) == {4: (1, -1), 5: (1, -1), **early}
    assert changes_after(asked, 4, 6) == {3: (1, BAN), 4: (1, -1), 5: (1, -1), 6: (1, -1), 7: (1, BAN)}
    repeated = request([5], repetition_penalty=2.0)
    assert changes_after(repeated, 8) == {1: (2, 0), 2: (2, 0), 5: (2, 0), 8: (2, 0)}


def test_each_drafted_token_stands_on_its_own_path() -> None:
    asked = request([5])
    assert paths(row(asked)) == [[]]
    assert paths(row(asked, Draft([7, 8]))) == [[], [7], [7, 8]]
    assert paths(row(asked, Draft([7, 8, 9, 6], [-1, -1, 1, 0]))) == [[], [7], [8], [8, 9], [7, 6]]


def test_a_tree_asks_for_a_row_of_logits_at_every_token() -> None:
    sampler = Sampler(reference, Cpu(), 12)
    inputs = sampler.prepare([row(request(), Draft([7, 8, 9], [-1, -1, 0])), row(request([3]))])
    drafts = inputs.verify_inputs
    assert drafts is not None and (drafts.width, drafts.logits) == (3, None)
    assert drafts.starts.tolist() == [0, 4, 5] and inputs.logits.shape == (5, 12)
    assert drafts.tokens.tolist() == [-1, 7, 8, 9, -1] and drafts.parents.tolist() == [-1, 0, 0, 1, -1]


def test_drawn_and_found_drafts_may_stand_in_one_step() -> None:
    sampler = Sampler(reference, Cpu(), 4)
    drawn = torch.arange(8.0).reshape(2, 4)
    inputs = sampler.prepare([row(request(), Draft([2])), row(request(), Draft([1, 3], None, drawn))])
    drafts = inputs.verify_inputs
    assert drafts is not None and drafts.logits is not None and drafts.drawn is not None
    assert drafts.drawn.tolist() == [0, 0, 0, 1, 1]
    assert torch.equal(drafts.logits[3:], drawn)


@pytest.mark.parametrize("seed", range(60))
def test_changes_are_those_of_the_definition(seed: int) -> None:
    """Bias, bans, allowed tokens, penalties and banned words in any combination, against a plain computation."""
    dice = random.Random(seed)

    def some(count: int) -> list[int]:
        return [dice.randrange(40) for _ in range(dice.randint(0, count))]

    bias = {token: dice.choice([-1.5, 0.25, 3.0]) for token in some(30)}
    output, drafted, banned_ids, allowed = some(12), some(4), some(4), dice.choice([None, [1, *some(20)]])
    words = tuple((*some(2), dice.randrange(40)) for _ in range(dice.randint(0, 30)))
    settings = {"presence_penalty": dice.choice([0, 0.5]), "repetition_penalty": dice.choice([1, 1.5])}
    limits = {"logit_bias": bias, "banned_token_ids": banned_ids, "allowed_token_ids": allowed}
    own = request(output, bad_words=words, **limits, **settings)
    text = [*own.prompt, *output, *drafted]
    excluded = {*banned_ids, *(w[-1] for w in words if text[len(text) - len(w) + 1 :] == list(w[:-1]))}
    repeated = set(text) if settings["repetition_penalty"] != 1 else set()
    expected = {}
    for token in range(40):
        value = bias.get(token, 0.0) - settings["presence_penalty"] * (token in output + drafted)
        scale = settings["repetition_penalty"] if token in repeated else 1.0
        if token in excluded:
            value = BAN
        listed = token in bias or token in excluded or token in repeated or value != 0
        if listed if allowed is None else token in allowed:
            expected[token] = (scale, value)
    assert changes_after(own, *drafted) == expected
