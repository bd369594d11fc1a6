"""The requests of the fault tests, and their outputs without faults."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from endurance.sabotage import CAUSE
from outrider import LLM, AsyncLLM, Output, SamplingParams

HEAD = [5, 6, 7, 8, 9, 10, 5, 6, 7]  # repeats itself, so that there is something to find; two prompts share its pages
PROMPTS = [[*HEAD, 11, 12], [*HEAD, 40, 41, 42], [60, 61, 62, 60, 61]]
BASE = SamplingParams(max_tokens=10, temperature=0, seed=7, ignore_eos=True)
MIXED = [BASE, replace(BASE, temperature=0.8, logprobs=2), replace(BASE, temperature=0.5, max_tokens=14, stop="~~~~")]
STEADY = [BASE, replace(BASE, temperature=0.8), replace(BASE, temperature=0.5, max_tokens=14)]  # the host is not needed
VisibleOutput = tuple[object, ...]


def visible_output(output: Output) -> VisibleOutput:
    """All that a user sees of an answer, but its speed."""
    (one,) = output.completions
    return one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs


def alone(llm: LLM, params: list[SamplingParams]) -> list[VisibleOutput]:
    """What each request says by itself, and without speculation."""
    return [
        visible_output(llm.generate([prompt], replace(own, speculate=False))[0])
        for prompt, own in zip(PROMPTS, params, strict=True)
    ]


async def ask(engine: AsyncLLM, prompt: list[int], params: SamplingParams) -> object:
    async for output in engine.generate(prompt, params):
        last = output
    return visible_output(last)


async def everyone(engine: AsyncLLM) -> list[object]:
    """What each hears where all ask at once: an answer, or what was raised."""
    calls = (ask(engine, prompt, own) for prompt, own in zip(PROMPTS, MIXED, strict=True))
    return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)


def check_broken(output: Output, expected: VisibleOutput, cause: str = CAUSE) -> None:
    """It ended with an error that says why, and what it said before is what it would have said."""
    tokens, text, reason, why, _ = visible_output(output)
    assert reason == "error" and cause in str(why), (reason, why)
    assert isinstance(tokens, list) and tokens == expected[0][: len(tokens)]
    assert isinstance(text, str) and expected[1].startswith(text)


def check_most(outputs: list[Output], expected: list[VisibleOutput], cause: str = CAUSE, broken: int = 1) -> int:
    """All but `broken` at most say exactly what they say alone; how many broke."""
    failed = [index for index, output in enumerate(outputs) if visible_output(output)[2] == "error"]
    for at, output in enumerate(outputs):
        if at in failed:
            check_broken(output, expected[at], cause)
        else:
            assert visible_output(output) == expected[at]
    assert len(failed) <= broken
    return len(failed)
