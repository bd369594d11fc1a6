"""Which logits change, and how, for each parameter."""

from __future__ import annotations

import torch

from outrider.device import Cpu
from outrider.kernels import reference
from outrider.sampling import Picked, Sampler, build_edits, row_edits
from outrider.types import Request, SamplingParams

BAN = float("-inf")


def request(output=(), prompt=(1, 2), bad_words=(), end=(), **fields) -> Request:
    params = SamplingParams(**{"temperature": 0, **fields})
    return Request("r", list(prompt), params, 0, frozenset(end), bad_words=bad_words, output=list(output))


def pick(logits: torch.Tensor, rows: list[Request]) -> list[Picked]:
    sampler = Sampler(reference, Cpu(), logits.shape[1])
    pending = sampler.prepare(rows)
    pending.logits.copy_(logits)
    return sampler.pick(pending)


def test_no_edits_for_plain_requests() -> None:
    assert build_edits([request(), request([3])], Cpu()) is None


def test_repetition_counts_prompt_and_output_the_others_only_output() -> None:
    assert row_edits(request([5, 5], repetition_penalty=2.0)) == {1: (2, 0), 2: (2, 0), 5: (2, 0)}
    assert row_edits(request([5, 5, 6], presence_penalty=1.0, frequency_penalty=0.5)) == {5: (1, -2), 6: (1, -1.5)}


def test_bias_adds_to_penalties_and_bans_win() -> None:
    edits = row_edits(request([5], presence_penalty=1.0, logit_bias={5: 3.0, 6: 9.0}, banned_token_ids=[6]))
    assert edits == {5: (1, 2), 6: (1, BAN)}


def test_allowed_tokens_keep_their_penalties_and_nothing_else() -> None:
    edits = row_edits(request([5], presence_penalty=1.0, allowed_token_ids=[5, 7], banned_token_ids=[7, 8]))
    assert edits == {5: (1, -1), 7: (1, BAN)}


def test_ends_are_banned_until_min_tokens() -> None:
    early = request([5], end=[9], stop_token_ids=[8], min_tokens=2)
    assert row_edits(early) == {8: (1, BAN), 9: (1, BAN)}
    assert build_edits([request([5, 6], end=[9], stop_token_ids=[8], min_tokens=2)], Cpu()) is None


def test_the_last_token_of_a_bad_word_is_banned_after_its_beginning() -> None:
    word = ((4, 5, 6),)
    assert row_edits(request([4, 5], bad_words=word)) == {6: (1, BAN)}
    assert row_edits(request([5], prompt=(3, 4), bad_words=word)) == {6: (1, BAN)}
    assert row_edits(request([5, 4], bad_words=word)) == {}
    assert row_edits(request(bad_words=((7,),))) == {7: (1, BAN)}


def test_rows_do_not_touch_each_other() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]] * 3)
    rows = [request(), request(logit_bias={0: 5.0}), request(allowed_token_ids=[3])]
    picked = pick(logits, rows)
    assert [each.token for each in picked] == [1, 0, 3]


def test_logprobs_come_from_before_the_edits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    before = torch.log_softmax(logits, -1)[0]
    (found,) = pick(logits, [request(logit_bias={0: 50.0}, logprobs=2)])
    assert found.token == 0 and found.logprobs is not None
    assert abs(found.logprobs.logprob - float(before[0])) < 1e-6
    assert [token for token, _ in found.logprobs.top] == [1, 2] and found.logprobs.rank == 3
