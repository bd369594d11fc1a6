"""AsyncLLM gives every client what LLM would have given, whoever comes, goes, waits or breaks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

import tiny_heads
from outrider import AsyncLLM, SamplingParams, UserError

PARAMS = SamplingParams(max_tokens=24, temperature=0.9, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_llm):
    llm = AsyncLLM(tiny_llm())
    yield llm
    llm.close()


async def text(engine, prompt, params=PARAMS) -> str:
    last = None
    async for output in engine.generate(prompt, params):
        last = output
    return last.completions[0].text


def test_clients_together_get_what_each_gets_alone(engine, tiny_llm) -> None:
    prompts = [[5 + n, 6, 7 + n] for n in range(9)]

    async def everyone() -> list[str]:
        return await asyncio.gather(*(text(engine, prompt) for prompt in prompts))

    expected = [output.completions[0].text for output in tiny_llm().generate(prompts, PARAMS)]
    assert asyncio.run(everyone()) == expected


def test_a_client_that_leaves_takes_only_its_own(engine) -> None:
    async def leave() -> None:
        async for _ in engine.generate([8, 9], replace(PARAMS, max_tokens=200)):
            break

    async def both() -> str:
        return (await asyncio.gather(text(engine, [5, 6]), leave()))[0]

    before = asyncio.run(text(engine, [5, 6]))
    assert asyncio.run(both()) == before
    asyncio.run(text(engine, [5]))  # the abort has been carried out by now
    assert engine.engine.is_idle
    engine.engine.scheduler.check()


def test_pause_clear_resume_loses_nothing(engine) -> None:
    async def interrupted() -> str:
        task = asyncio.create_task(text(engine, [5, 6, 7]))
        await asyncio.sleep(0.005)
        await engine.pause()
        await engine.clear_cache()
        assert not task.done() or task.result()
        await engine.resume()
        return await task

    assert asyncio.run(interrupted()) == asyncio.run(text(engine, [5, 6, 7]))


def test_pause_clear_resume_loses_nothing_of_a_draft(tiny_folder, tmp_path) -> None:
    options = tiny_heads.make("draft_model", tmp_path)
    drafting = AsyncLLM(str(tiny_folder()), speculate=f"draft_model:model={options['model']},width=3,adaptive=no")
    longer = replace(PARAMS, max_tokens=90)

    async def interrupted() -> list[int]:
        tokens: list[int] = []
        async for output in drafting.generate([5, 6, 7], longer):
            if len(output.completions[0].token_ids) - len(tokens) > 1:
                await drafting.pause()
                await drafting.clear_cache()
                await drafting.resume()
            assert output.completions[0].token_ids[: len(tokens)] == tokens
            tokens = output.completions[0].token_ids
        assert output.stats is not None and output.stats.preemptions > 2
        return tokens

    try:
        found = asyncio.run(interrupted())
    finally:
        drafting.close()
    (plain,) = drafting.llm.generate([[5, 6, 7]], replace(longer, speculate=False))
    assert found == plain.completions[0].token_ids


def test_abort_ends_the_iterator(engine) -> None:
    async def aborted() -> str:
        reasons = []
        async for output in engine.generate([5, 6], replace(PARAMS, max_tokens=900), request_id="mine"):
            reasons.append(output.completions[0].finish_reason)
            if len(reasons) == 1:
                await engine.abort("mine")
        return reasons[-1]

    assert asyncio.run(aborted()) == "abort"


def test_a_refusal_reaches_its_client_alone(engine) -> None:
    async def both() -> list[object]:
        return await asyncio.gather(text(engine, []), text(engine, [5]), return_exceptions=True)

    refused, answered = asyncio.run(both())
    assert isinstance(refused, UserError) and isinstance(answered, str)


def test_an_engine_that_breaks_is_told_and_survived(engine, monkeypatch) -> None:
    def broken(*_):
        raise RuntimeError("the scheduler fell over")

    with monkeypatch.context() as patch:
        patch.setattr(engine.engine.scheduler, "commit", broken)
        with pytest.raises(RuntimeError, match="fell over"):
            asyncio.run(text(engine, [5]))
    assert asyncio.run(text(engine, [5]))


def test_a_client_cancelled_while_it_waits_for_its_turn(engine) -> None:
    """Its command must not run, or its request must go; the engine's thread must live."""

    async def cancelled() -> None:
        task = asyncio.create_task(text(engine, [5, 6], replace(PARAMS, max_tokens=100)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for _ in range(20):
        asyncio.run(cancelled())
    assert asyncio.run(text(engine, [5]))
    assert engine.engine.is_idle


def test_a_client_whose_loop_has_ended(engine) -> None:
    """The engine tries to tell a closed loop, and forgets the request."""

    async def vanish() -> object:
        iterator = engine.generate([5, 6], replace(PARAMS, max_tokens=100))
        await anext(iterator)
        return iterator  # neither closed nor exhausted when the loop ends

    loop = asyncio.new_event_loop()
    abandoned = loop.run_until_complete(vanish())
    loop.close()
    assert asyncio.run(text(engine, [5]))
    for _ in range(200):
        if engine.engine.is_idle:
            break
        time.sleep(0.01)
    assert engine.engine.is_idle and abandoned is not None
