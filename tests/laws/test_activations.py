"""The laws hold with each precision of the activations beside quantized weights."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outrider import Output, SamplingParams

PROMPT = [5, 9, 30, 7, 5, 9, 30, 41, 12, 5, 9] * 4  # n-grams repeat; more tokens than a fused kernel multiplies
ALONE = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=1, ignore_eos=True)


@pytest.mark.pairwise
@pytest.mark.parametrize("activations", ["high", "fast"])
@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_drafts_neighbours_and_chunks_change_no_bit(tiny_llm, quantize: str, activations: str) -> None:
    def bits(output: Output) -> object:
        return output.completions[0].token_ids, output.completions[0].logprobs

    options = {"quantize": quantize, "activations": activations, "prefix_cache": False}
    source = random.Random(2)
    prompts = [[source.randrange(3, 101) for _ in range(source.randrange(1, 40))] for _ in range(5)]
    params = [replace(ALONE, seed=n, logprobs=None, max_tokens=5 + n) for n in range(5)]
    llm = tiny_llm(**options)
    alone = bits(llm.generate(PROMPT, ALONE)[0])
    assert bits(llm.generate([*prompts, PROMPT], [*params, ALONE])[-1]) == alone
    assert bits(tiny_llm(max_step_tokens=7, **options).generate(PROMPT, ALONE)[0]) == alone
    assert bits(tiny_llm(speculate="ngram:width=3", **options).generate(PROMPT, ALONE)[0]) == alone


def test_fast_activations_give_other_logprobs(tiny_llm) -> None:
    """So the test above compares two precisions."""
    if tiny_llm().resolved.backend == "reference":
        pytest.skip("it has exact activations")
    found = {
        activations: tiny_llm(quantize="fp8", activations=activations).generate(PROMPT, ALONE)[0].completions[0]
        for activations in ("high", "fast")
    }
    assert found["high"].logprobs != found["fast"].logprobs
