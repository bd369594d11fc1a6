"""AsyncLLM gives every client the output of LLM, whichever other clients come, go, wait or fail."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

import tiny_heads
from outrider import AsyncLLM, SamplingParams, UserError
from outrider.async_llm import EngineStoppedError, Load
from waiting import TIMEOUT, counted_steps, wait_until

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
            permits.release()
            if len(output.completions[0].token_ids) - len(tokens) > 1:
                await drafting.pause()
                await drafting.clear_cache()
                await drafting.resume()
            assert output.completions[0].token_ids[: len(tokens)] == tokens
            tokens = output.completions[0].token_ids
        assert output.stats is not None and output.stats.preemptions > 2
        return tokens

    try:
        with counted_steps(drafting, 1) as permits:
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
            permits.release()
            if len(reasons) == 1:
                await engine.abort("mine")
        return reasons[-1]

    with counted_steps(engine, 1) as permits:
        assert asyncio.run(aborted()) == "abort"


def test_a_refusal_reaches_its_client_alone(engine) -> None:
    async def both() -> list[object]:
        return await asyncio.gather(text(engine, []), text(engine, [5]), return_exceptions=True)

    refused, answered = asyncio.run(both())
    assert isinstance(refused, UserError) and isinstance(answered, str)


def test_a_failed_step_ends_its_requests_and_the_engine_continues(engine, monkeypatch) -> None:
    def broken(*_):
        raise RuntimeError("the scheduler fell over")

    with monkeypatch.context() as patch:
        patch.setattr(engine.engine.scheduler, "commit", broken)
        with pytest.raises(RuntimeError, match="fell over"):
            asyncio.run(text(engine, [5]))
    assert asyncio.run(text(engine, [5]))


def test_a_client_cancelled_before_its_command_runs(engine) -> None:
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
    wait_until(lambda: engine.engine.is_idle)
    assert abandoned is not None


# ---- an engine that is gone ----


@pytest.fixture
def mortal(tiny_folder):
    """An engine of its own, to be killed."""
    llm = AsyncLLM(str(tiny_folder()))
    yield llm
    llm.close(timeout=5)


def kill(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, after: int = 0) -> None:
    """The engine's thread ends in the step after the next `after` ones, as nothing should end it."""
    steps = iter(range(after))
    step = llm.engine.step

    def dying(*arguments):
        if next(steps, None) is None:
            raise SystemExit("killed")
        return step(*arguments)

    monkeypatch.setattr(llm.engine, "step", dying)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_fails_all_clients_instead_of_blocking_them(mortal, monkeypatch) -> None:
    kill(mortal, monkeypatch, after=3)
    assert mortal.alive and mortal.failure is None

    async def everyone() -> list[object]:
        calls = (text(mortal, [5 + n, 6], replace(PARAMS, max_tokens=200)) for n in range(4))
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), TIMEOUT)

    heard = asyncio.run(everyone())
    assert all(isinstance(each, EngineStoppedError) and "killed" in str(each) for each in heard)
    assert not mortal.alive and isinstance(mortal.failure, SystemExit)

    async def later() -> list[object]:
        calls = [text(mortal, [5]), mortal.pause(), mortal.abort("0"), mortal.clear_cache()]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), TIMEOUT)

    assert all(isinstance(each, EngineStoppedError) for each in asyncio.run(later()))


def test_a_closed_engine_says_so(mortal) -> None:
    async def closed_on() -> None:
        async for _ in mortal.generate([5, 6], replace(PARAMS, max_tokens=900)):
            mortal.close()

    async def both() -> None:
        with pytest.raises(EngineStoppedError, match="closed"):
            await closed_on()
        with pytest.raises(EngineStoppedError, match="closed"):
            await text(mortal, [5])

    asyncio.run(asyncio.wait_for(both(), TIMEOUT))
    assert not mortal.alive and mortal.failure is None


def test_a_step_that_takes_long_shows(mortal, monkeypatch) -> None:
    step, slow = mortal.engine.step, threading.Event()

    def waits(*arguments):
        slow.wait(TIMEOUT)
        return step(*arguments)

    monkeypatch.setattr(mortal.engine, "step", waits)

    async def seen() -> tuple[float, float]:
        task = asyncio.create_task(text(mortal, [5], replace(PARAMS, max_tokens=2)))
        await asyncio.to_thread(wait_until, lambda: mortal.stuck_seconds)
        first = mortal.stuck_seconds
        await asyncio.sleep(0.01)
        second = mortal.stuck_seconds
        slow.set()
        await task
        return first, second

    assert mortal.stuck_seconds == 0
    first, second = asyncio.run(seen())
    assert 0 < first < first + 0.005 < second
    wait_until(lambda: not mortal.stuck_seconds)  # the answer is there before its step has ended


def test_load_counts_requests_and_their_pages(mortal) -> None:
    async def loads() -> list[Load]:
        found = [mortal.load]
        async for _ in mortal.generate([5, 6], replace(PARAMS, n=3, max_tokens=40)):
            found.append(mortal.load)
            permits.release()
        return found

    with counted_steps(mortal, 1) as permits:
        before, *during = asyncio.run(loads())
    assert before.running == before.waiting == before.pages_used == 0 < before.pages
    assert max(each.running for each in during) == 3
    assert all(0 <= each.pages_used <= each.pages for each in during) and max(each.pages_used for each in during) >= 3
    after = mortal.load
    assert after.running == after.waiting == after.pages_used == 0


def test_a_reader_that_falls_behind_gets_fewer_outputs_and_the_whole_text(engine) -> None:
    """What waits for a slow client does not pile up."""

    async def slow() -> tuple[int, str]:
        found = []
        async for output in engine.generate([5, 6, 7], PARAMS):
            if not found:
                wait_until(lambda: engine.engine.is_idle)  # the loop itself stands still, and the engine goes on
            found.append(output.completions[0].text)
        return len(found), found[-1]

    count, found = asyncio.run(slow())
    assert count < PARAMS.max_tokens
    assert found == asyncio.run(text(engine, [5, 6, 7]))


def test_abort_all_ends_every_iterator(engine) -> None:
    async def everyone() -> list[str]:
        async def one(prompt: list[int]) -> str:
            async for output in engine.generate(prompt, replace(PARAMS, max_tokens=900)):
                last = output
            return last.completions[0].finish_reason

        await engine.pause()  # such that the first step runs all three
        tasks = [asyncio.create_task(one([5 + n])) for n in range(3)]
        await asyncio.to_thread(wait_until, lambda: engine.load.waiting == 3)
        await engine.resume()
        await asyncio.to_thread(wait_until, lambda: engine.load.running == 3)
        aborted = asyncio.create_task(engine.abort_all())
        await asyncio.sleep(0)  # the task has queued its command
        permits.release()
        await aborted
        return await asyncio.wait_for(asyncio.gather(*tasks), TIMEOUT)

    with counted_steps(engine, 3) as permits:
        assert asyncio.run(everyone()) == ["abort"] * 3
    assert engine.engine.is_idle


def test_a_failed_step_also_ends_requests_without_a_client(engine, monkeypatch) -> None:
    """Else the engine would break over them again and again."""

    def broken(*_):
        raise RuntimeError("the scheduler fell over")

    async def both() -> None:
        await engine.pause()
        engine.engine.add([5, 6], PARAMS)
        task = asyncio.create_task(text(engine, [7]))
        await asyncio.sleep(0.02)
        await engine.resume()
        with pytest.raises(RuntimeError, match="fell over"):
            await task
        await engine.pause()  # the step has been cleaned up after by now
        assert engine.engine.is_idle
        await engine.resume()

    with monkeypatch.context() as patch:
        patch.setattr(engine.engine.scheduler, "commit", broken)
        asyncio.run(both())
    assert asyncio.run(text(engine, [5]))
