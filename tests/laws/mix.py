"""The requests that the laws are about, and how an answer to one is compared with another."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

from outrider import LLM, Output, SamplingParams

WORDS = [random.Random(n).choices(range(3, 101), k=5) for n in range(4)]
PROMPT = [token for _ in range(2) for word in WORDS for token in word]  # repeats itself, as edits and code do
FINDING = ("ngram", "prediction", "suffix")  # methods whose drafts are found, not drawn
BASE = SamplingParams(max_tokens=18, temperature=0, seed=7, ignore_eos=True)
# Every parameter that changes what is chosen or where a text ends, each in a request of its own.
MIX: dict[str, SamplingParams] = {
    "greedy": replace(BASE, logprobs=3),
    "warm": replace(BASE, temperature=0.8, logprobs=100),
    "truncated": replace(BASE, temperature=1.2, top_k=9, top_p=0.9, min_p=0.05),
    "penalties": replace(BASE, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.4, logprobs=2),
    "bias": replace(BASE, temperature=0.5, logit_bias={5: 4.0, 9: -3.0}, banned_token_ids=[17]),
    "allowed": replace(BASE, temperature=1.0, allowed_token_ids=[3, 4, 5, 6]),
    "words": replace(BASE, temperature=0.7, allowed_token_ids=range(3, 40), bad_words=["!#", "%", "$&("]),
    "stops": replace(BASE, temperature=1.0, allowed_token_ids=range(3, 20), stop=["%$", "!"], min_tokens=3),
    "ends": replace(BASE, temperature=1.0, ignore_eos=False, logit_bias={2: 3.0}, min_tokens=2, stop_token_ids=[30]),
    "short": replace(BASE, max_tokens=2),
    "two": replace(BASE, temperature=0.9, n=2),
    "narrow": replace(BASE, speculate_width=1, prompt_logprobs=2),
    "plain": replace(BASE, temperature=0.6, speculate=False),
    "beside": replace(BASE, speculate="ngram", always_draft=True),
    "predicted": replace(BASE, prediction=PROMPT),
}


def visible(output: Output) -> object:
    """Return everything that a user sees of an answer, except its speed."""
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs) for one in output.completions
    ], output.prompt_logprobs


def plain(params: SamplingParams) -> SamplingParams:
    return replace(params, speculate=False, prediction=None)


def with_options(name: str, **options: object) -> str:
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in options.items())


def check(llm: LLM, expected: dict[str, object], names: Collection[str] = MIX.keys()) -> list[Output]:
    outputs = llm.generate([PROMPT] * len(names), [MIX[name] for name in names])
    for name, output in zip(names, outputs, strict=True):
        assert visible(output) == expected[name], name
    llm.engine.scheduler.check()
    return outputs


def interrupted(llm: LLM, params: SamplingParams, steps: set[int], lora_request: str | None = None) -> Output:
    """Return the answer of a request whose KV is dropped after these steps."""
    outputs = []
    for count, output in enumerate(llm.stream(PROMPT, params, lora_request=lora_request)):
        outputs.append(output)
        if count in steps:
            llm.engine.clear_cache()
    return outputs[-1]
