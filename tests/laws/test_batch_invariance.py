"""A request's bits do not depend on its neighbours, its chunks, the cache, or an interruption.

The vocabulary is small enough for `logprobs` to return all of it, so equal outputs are equal distributions.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from outrider import Output, SamplingParams
from outrider.kernels.philox import gumbel

PROMPT = [random.Random(1).randrange(3, 101) for _ in range(83)]
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=11, logprobs=100, ignore_eos=True)


def bits(output: Output) -> object:
    completion = output.completions[0]
    return completion.token_ids, completion.logprobs


def batch_size(count: int) -> list[list[int]]:
    source = random.Random(2)
    return [[source.randrange(3, 101) for _ in range(source.randrange(1, 60))] for _ in range(count)]


@pytest.fixture(scope="module")
def alone(tiny_llm) -> object:
    return bits(tiny_llm(prefix_cache=False).generate(PROMPT, PARAMS)[0])


def test_in_a_batch_of_seventeen(tiny_llm, alone) -> None:
    prompts = [*batch_size(8), PROMPT, *batch_size(8)]
    params = [replace(PARAMS, seed=n, logprobs=None, max_tokens=5 + 3 * n) for n in range(17)]
    params[8] = PARAMS
    assert bits(tiny_llm().generate(prompts, params)[8]) == alone


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_in_chunks(tiny_llm, alone, chunk: int) -> None:
    assert bits(tiny_llm(max_step_tokens=chunk).generate(PROMPT, PARAMS)[0]) == alone


def test_with_the_prefix_cache_hot(tiny_llm, alone) -> None:
    llm = tiny_llm()
    cold = llm.generate(PROMPT, PARAMS)[0]
    hot = llm.generate(PROMPT, PARAMS)[0]
    assert hot.stats is not None and hot.stats.cached_tokens >= 64
    assert bits(cold) == bits(hot) == alone


def test_preempted_half_way(tiny_llm, alone) -> None:
    llm = tiny_llm()
    outputs = []
    for step, output in enumerate(llm.stream(PROMPT, PARAMS)):
        outputs.append(output)
        if step in (3, 11):
            llm.engine.clear_cache()
    assert outputs[-1].stats is not None and outputs[-1].stats.preemptions == 2
    assert bits(outputs[-1]) == alone


def test_preempted_for_want_of_pages(tiny_llm, alone) -> None:
    """Five requests of 107 tokens share room for two: some must wait, stop and come back."""
    llm = tiny_llm(cache_tokens=16 * 14)
    outputs = llm.generate(
        [PROMPT] * 1 + batch_size(4), [PARAMS] + [replace(PARAMS, max_tokens=100, logprobs=None)] * 4
    )
    assert sum(output.stats.preemptions for output in outputs if output.stats) > 0
    assert bits(outputs[0]) == alone
    llm.engine.scheduler.check()


def test_with_other_samples_of_the_same_prompt(tiny_llm, alone) -> None:
    output = tiny_llm().generate(PROMPT, replace(PARAMS, n=4))[0]
    assert bits(output) == alone
    texts = {tuple(completion.token_ids) for completion in output.completions}
    assert len(texts) == 4


def test_noise_is_keyed_by_seed_position_and_token(tiny_llm) -> None:
    """Each token is the argmax of its log-probabilities plus the noise of exactly that place."""
    completion = tiny_llm().generate(PROMPT, replace(PARAMS, temperature=1))[0].completions[0]
    for position, (token, found) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True), start=len(PROMPT)
    ):
        ids = torch.tensor([one for one, _ in found.top])
        values = torch.tensor([logprob for _, logprob in found.top])
        noise = gumbel(torch.tensor(PARAMS.seed), torch.tensor(position), ids)
        assert int(ids[(values + noise).argmax()]) == token


def test_a_text_continues_with_the_same_noise(tiny_llm) -> None:
    """Continuing a text with the same seed gives what the first run gave there."""
    llm = tiny_llm()
    whole = llm.generate(PROMPT, PARAMS)[0].completions[0].token_ids
    rest = llm.generate(PROMPT + whole[:10], replace(PARAMS, max_tokens=14))[0].completions[0].token_ids
    assert whole[10:] == rest
