"""Threads and event loops that share one engine get what each gets alone, and none waits forever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import pytest

from outrider import LLM, AsyncLLM, Output, SamplingParams
from outrider.async_llm import EngineStoppedError
from waiting import TIMEOUT, wait_until

THREADS, ROUNDS = 8, 3
BASE = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
MIX = [BASE, replace(BASE, temperature=0), replace(BASE, n=2), replace(BASE, max_tokens=30), replace(BASE, logprobs=2)]
METHODS = ["none", "ngram", "suffix:width=6,adaptive=no"]

pytestmark = pytest.mark.timeout(3 * TIMEOUT)


@pytest.fixture(scope="module", params=METHODS)
def llm(request: pytest.FixtureRequest, tiny_llm: Callable[..., LLM]) -> LLM:
    """With pages for some of the requests that come together, so that some wait and some are preempted."""
    return tiny_llm(speculate=request.param, cache_tokens=320, page_size=8, max_requests=6)


def prompts_of(thread: int) -> list[list[int]]:
    return [[5 + thread, 6, 7, 5 + thread, 6], [8, 9 + thread]]


def seen(output: Output) -> list[object]:
    return [(one.token_ids, one.text, one.finish_reason, one.logprobs) for one in output.completions]


def alone(llm: LLM) -> list[list[object]]:
    return [[seen(output) for output in llm.generate(prompts_of(n), MIX[n % len(MIX)])] for n in range(THREADS)]


def together(*jobs: Callable[[], object]) -> list[object]:
    """Run the jobs on threads of their own, all at once, and return their results."""
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], object]) -> object:
        start.wait(TIMEOUT)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(run, job) for job in jobs]
        return [future.result(TIMEOUT) for future in futures]


def check_idle(llm: LLM) -> None:
    assert llm.engine.is_idle and not llm.engine.parents
    llm.engine.scheduler.check()


def test_threads_get_what_each_gets_alone(llm: LLM) -> None:
    expected = alone(llm)

    def job(n: int) -> Callable[[], object]:
        return lambda: [[seen(each) for each in llm.generate(prompts_of(n), MIX[n % len(MIX)])] for _ in range(ROUNDS)]

    found = together(*(job(n) for n in range(THREADS)))
    assert found == [[each] * ROUNDS for each in expected]
    check_idle(llm)


def test_streams_and_callbacks_beside_each_other(llm: LLM) -> None:
    """A reader that takes its time does not hold up the others."""
    expected = alone(llm)
    params = [MIX[n % len(MIX)] for n in range(THREADS)]
    finished = threading.Event()

    def stream(n: int) -> list[object]:
        last, texts = None, [""]
        for output in llm.stream(prompts_of(n)[0], params[n]):
            if last is None and n == 0:
                assert finished.wait(TIMEOUT)  # with a request under way
            texts.append(output.completions[0].text)
            assert texts[-1].startswith(texts[-2])
            last = output
        assert last is not None and last.finished
        return seen(last)

    def watched(n: int) -> list[object]:
        shown: list[Output] = []
        outputs = llm.generate(prompts_of(n), params[n], progress=shown.append)
        assert {output.request_id for output in shown} == {output.request_id for output in outputs}
        finished.set()
        return [seen(output) for output in outputs]

    jobs = [lambda n=n: stream(n) if n % 2 == 0 else watched(n) for n in range(THREADS)]  # type: ignore[misc]
    for n, result in enumerate(together(*jobs)):
        assert result == (expected[n][0] if n % 2 == 0 else expected[n])
    check_idle(llm)


def test_streams_of_one_thread_interleave(llm: LLM) -> None:
    alone = [[seen(output) for output in llm.stream(prompt, BASE)][-1] for prompt in prompts_of(0)]
    both = list(zip(*(llm.stream(prompt, BASE) for prompt in prompts_of(0)), strict=False))
    assert [seen(output) for output in both[-1]] == alone
    nested = [seen(llm.generate([prompts_of(0)[1]], BASE)[0]) for _ in llm.stream(prompts_of(0)[0], BASE)]
    assert nested == [alone[1]] * len(nested) and nested
    check_idle(llm)


def test_llm_beside_async_llm(llm: LLM) -> None:
    """Both serve: threads in generate, and two event loops, each over an AsyncLLM of its own."""
    expected = alone(llm)
    shared = [AsyncLLM(llm), AsyncLLM(llm)]

    async def ask(served: AsyncLLM, prompt: list[int], params: SamplingParams) -> list[object]:
        async for output in served.generate(prompt, params):
            last = output
        return seen(last)

    async def ask_all(served: AsyncLLM) -> list[list[list[object]]]:
        jobs = [[ask(served, prompt, MIX[n % len(MIX)]) for prompt in prompts_of(n)] for n in range(THREADS)]
        return [await asyncio.gather(*each) for each in jobs]

    def blocking(n: int) -> list[list[object]]:
        return [seen(output) for output in llm.generate(prompts_of(n), MIX[n % len(MIX)])]

    try:
        threads = [lambda n=n: blocking(n) for n in range(THREADS - 2)]  # type: ignore[misc]
        loops = [lambda each=each: asyncio.run(ask_all(each)) for each in shared]  # type: ignore[misc]
        found = together(*threads, *loops)
        assert found[: THREADS - 2] == expected[: THREADS - 2]
        assert found[THREADS - 2 :] == [expected, expected]
        assert blocking(0) == expected[0]  # with idle AsyncLLMs beside it
    finally:
        for each in shared:
            each.close()
    assert blocking(1) == expected[1]
    check_idle(llm)


def test_a_pause_ends_with_the_async_llm_that_asked_for_it(llm: LLM) -> None:
    served = AsyncLLM(llm)
    asyncio.run(served.pause())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(llm.generate, [[5, 6]], BASE)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        served.close()
        assert waiting.result(TIMEOUT)[0].finished
    check_idle(llm)


def test_closing_async_llm_ends_only_its_own_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    served, paused = AsyncLLM(llm), threading.Event()
    step, steps = llm.engine.step, count()

    def wait_for_close(*arguments: bool) -> list[Output]:
        if next(steps) > 4:  # both requests run, and neither has ended
            wait_until(lambda: served._closing)
        return step(*arguments)

    monkeypatch.setattr(llm.engine, "step", wait_for_close)

    async def resume_with_both() -> None:
        await asyncio.to_thread(wait_until, lambda: llm.engine.scheduler.waiting_count == 2)
        await served.resume()

    async def leave() -> None:
        await served.pause()
        paused.set()
        resumed = asyncio.create_task(resume_with_both())
        with pytest.raises(EngineStoppedError, match="closed"):
            async for _ in served.generate([5, 6], replace(BASE, max_tokens=200)):
                await resumed
                await asyncio.to_thread(served.close)

    def long() -> str | None:
        assert paused.wait(TIMEOUT)
        for output in llm.stream([7, 8], replace(BASE, max_tokens=60)):
            reason = output.completions[0].finish_reason
        return reason

    assert together(long, lambda: asyncio.run(leave())) == ["length", None]
    check_idle(llm)


def test_a_failed_step_reaches_every_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the scheduler fell over")

    def refused() -> bool:
        with pytest.raises(RuntimeError, match="fell over"):
            llm.generate([[5, 6]], BASE)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "commit", broken)
        assert all(together(*[refused] * THREADS))
    check_idle(llm)
    assert llm.generate([[5, 6]], BASE)[0].finished


def test_an_interrupt_in_one_thread_leaves_the_others_an_answer_or_a_reason(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = llm.engine.step, iter(range(3))

    def interrupted(*arguments: bool) -> list[Output]:
        if next(steps, None) == 2:
            raise KeyboardInterrupt
        return step(*arguments)

    def ask() -> str:
        try:
            return str(llm.generate([[5, 6]], BASE)[0].completions[0].finish_reason)
        except (KeyboardInterrupt, EngineStoppedError) as error:
            return type(error).__name__

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        found = together(*[ask] * THREADS)
    assert found.count("KeyboardInterrupt") == 1
    assert set(found) <= {"KeyboardInterrupt", "EngineStoppedError", "length"}
    check_idle(llm)
    assert llm.generate([[5, 6]], BASE)[0].finished
