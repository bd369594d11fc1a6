"""The tokenizer raises: while a prompt is read, while a text grows, at its end. One request hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from endurance.sabotage import CAUSE, LONG, Fragile, Trap, Trapped, check_nothing_left
from endurance.scenes import BASE, MIXED, PROMPTS, alone, check_most, visible_output
from outrider import AsyncLLM, Output, SamplingParams
from outrider.tokenizer import Stream

ODD = [MIXED[0], MIXED[1], replace(BASE, stop=["~~~~", "zzz"], max_tokens=14)]


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_a_text_that_cannot_be_read(
    fragile: Callable[..., Fragile], monkeypatch: pytest.MonkeyPatch, method: str, watched: bool
) -> None:
    """At every token of everybody; `watched` texts are read as they grow, others at the end."""
    expected = alone(fragile().llm, ODD)
    llm, trap = fragile(method).llm, Trap()
    seen: list[Output] = []

    def run() -> list[Output]:
        return llm.generate(PROMPTS, ODD, seen.append if watched else None)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "tokenizer", Trapped(llm.engine.tokenizer, trap, frozenset({"decode"})))
        run()
        assert trap.count > (30 if watched else 15)
        for call in range(0, trap.count, 1 if LONG else 7):
            trap.arm(call, lambda: UnicodeError(CAUSE))
            assert check_most(run(), expected) == 1
            check_nothing_left(llm)
        trap.arm(0, lambda: UnicodeError(CAUSE), times=10**9)
        assert check_most(run(), expected, broken=3) == 3
        check_nothing_left(llm)
    assert check_most(run(), expected) == 0


def test_a_request_that_broke_tells_its_first_cause(
    fragile: Callable[..., Fragile], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fragile()
    made.llm.engine.clear_cache()

    def silent(stream: Stream) -> str:
        raise UnicodeError("a second mishap")

    monkeypatch.setattr(Stream, "flush", silent)
    made.kernels.arm(8, lambda: RuntimeError(CAUSE))
    *_, last = made.llm.stream(PROMPTS[0], BASE)
    made.kernels.rest()
    assert visible_output(last)[2:4] == ("error", CAUSE) and last.completions[0].token_ids
    check_nothing_left(made.llm)


def test_a_prompt_that_cannot_be_read(fragile: Callable[..., Fragile], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it is to be encoded, its sender hears of it, and those beside it do not."""
    llm, trap = fragile("ngram").llm, Trap()
    expected = alone(fragile().llm, MIXED)
    asked = replace(BASE, bad_words=["no", "never"], prediction="as expected")

    async def everyone(engine: AsyncLLM) -> list[object]:
        calls = [ask(engine, prompt, own) for prompt, own in zip(PROMPTS, MIXED, strict=True)]
        return await asyncio.gather(ask(engine, "hello", asked), *calls, return_exceptions=True)

    async def ask(engine: AsyncLLM, prompt: str | list[int], params: SamplingParams) -> object:
        async for output in engine.generate(prompt, params):
            last = output
        return visible_output(last)

    with monkeypatch.context() as patch:
        patch.setattr(
            llm.engine.input_processor, "tokenizer", Trapped(llm.engine.tokenizer, trap, frozenset({"encode"}))
        )
        engine = AsyncLLM(llm)
        try:
            whole, *_ = asyncio.run(everyone(engine))
            assert trap.count == 6
            for call in range(6):
                trap.arm(call, lambda: UnicodeError(CAUSE))
                broken, *others = asyncio.run(everyone(engine))
                assert isinstance(broken, UnicodeError) and CAUSE in str(broken)
                assert others == expected
                check_nothing_left(llm)
            trap.rest()
            assert asyncio.run(everyone(engine)) == [whole, *expected]
        finally:
            engine.close()


def test_a_parent_request_that_cannot_be_opened_fails_alone(
    fragile: Callable[..., Fragile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows the reading of a prompt fails: nothing of the request stays in the queue."""
    llm = fragile().llm

    def failing(*_: object, **__: object) -> Stream:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("outrider.detokenizer.Stream", failing)
        with pytest.raises(MemoryError):
            llm.generate(PROMPTS, replace(BASE, n=2))
    check_nothing_left(llm)
