"""The laws hold with each precision of the activations beside quantized weights."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from outrider import Output, SamplingParams

PROMPT = [5, 9, 30, 7, 5, 9, 30, 41, 12, 5, 9] * 4  # n-grams repeat, and there are enough rows for FP8 tensor cores
ALONE = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=1, ignore_eos=True)


@pytest.fixture(autouse=True)
def quantized(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, too, short rows stay as they are stored."""
    if request.node.callspec.params["tiny_llm"] == "cuda":
        monkeypatch.setattr("outrider.kernels.cuda.matrices.EXPANDED", 0)


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


@pytest.mark.parametrize("activations", ["high", "fast"])
def test_steps_with_many_rows_are_close_to_those_with_few(tiny_llm, activations: str) -> None:
    """On a GPU steps with many rows multiply with FP8 tensor cores, unless results are batch-invariant."""
    params = replace(ALONE, temperature=0.0, max_tokens=1)
    whole, chunks = (
        tiny_llm(quantize="fp8", activations=activations, deterministic=False, max_step_tokens=size)
        .generate(PROMPT, params)[0]
        .completions[0]
        .logprobs[0]
        for size in (512, 7)
    )
    assert whole.top[0][0] == chunks.top[0][0]
    assert whole.top[0][1] == pytest.approx(chunks.top[0][1], abs=0.02)
