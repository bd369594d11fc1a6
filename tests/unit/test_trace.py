"""A request with `trace` gets the draft of every step."""

from __future__ import annotations

import pytest

from outrider import SamplingParams

PARAMS = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.mark.parametrize("speculate", ["none", "ngram"])
def test_steps_contain_their_tokens_and_drafts(tiny_llm, speculate: str) -> None:
    llm = tiny_llm(speculate=speculate if speculate == "none" else f"{speculate}:adaptive=no")
    (completion,) = llm.generate("abcabcabcabc", SamplingParams(**PARAMS, trace=True))[0].completions
    assert [token for step in completion.steps for token in step.tokens] == completion.token_ids
    assert any(step.draft is not None for step in completion.steps) == (speculate == "ngram")
    (silent,) = llm.generate("abcabcabcabc", SamplingParams(**PARAMS))[0].completions
    assert silent.steps is None and silent.token_ids == completion.token_ids


def test_a_stop_string_truncates_the_steps(tiny_llm) -> None:
    llm = tiny_llm(decode_steps=8)
    whole = llm.generate("abc", SamplingParams(**PARAMS))[0].completions[0].text
    params = SamplingParams(**PARAMS, trace=True, stop=whole[5:7])
    (completion,) = llm.generate("abc", params)[0].completions
    assert 0 < len(completion.token_ids) < 24
    assert [token for step in completion.steps for token in step.tokens] == completion.token_ids
