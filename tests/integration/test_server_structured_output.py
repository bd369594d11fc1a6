"""Grammars that are slow to compile, too expensive or invalid do not affect other requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import serving, unanswered
from starlette.testclient import TestClient

import endless_grammar
from outrider import AsyncLLM, Output, SamplingParams, UserError
from outrider.async_llm import EngineStoppedError
from outrider.server.app import build_app
from outrider.server.options import ServerOptions
from outrider.types import StructuredOutput
from waiting import TIMEOUT, wait_until

CHOICE = StructuredOutput("choice", json.dumps(["yes", "no"]))
CONSTRAINED = SamplingParams(max_tokens=8, structured=CHOICE)
PLAIN = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)


@pytest.fixture
def llm(model) -> Iterator[AsyncLLM]:
    """An engine for one test, because compiled grammars stay in its cache."""
    engine = AsyncLLM(str(model), max_requests=2)
    yield engine
    engine.close()


async def last(outputs: AsyncIterator[Output]) -> Output:
    return [output async for output in outputs][-1]


def test_other_requests_run_while_a_grammar_is_compiled(llm, monkeypatch) -> None:
    compile_now, begun, gate = llm.engine.compiler.compile_uncached, threading.Event(), threading.Event()
    threads = []

    def slow(structured):
        threads.append(threading.current_thread().name)
        begun.set()
        assert gate.wait(TIMEOUT)
        return compile_now(structured)

    monkeypatch.setattr(llm.engine.compiler, "compile_uncached", slow)

    async def both() -> tuple[Output, Output]:
        waiting = asyncio.create_task(last(llm.generate([5, 6], CONSTRAINED)))
        assert await asyncio.to_thread(begun.wait, TIMEOUT)
        other = await last(llm.generate([5, 6, 7], PLAIN))  # from beginning to end
        assert not waiting.done()
        gate.set()
        return await waiting, other

    shaped, other = asyncio.run(both())
    assert shaped.completions[0].text in ("yes", "no") and len(other.completions[0].token_ids) == 100
    assert len(threads) == 1 and threads[0].startswith("outrider-grammars")  # and `add` did not compile it again


def test_a_request_with_a_grammar_gets_the_reason_when_the_engine_closes(llm, monkeypatch) -> None:
    """While its grammar is compiled, while it waits for that, and later."""
    compile_now, begun, gate = llm.engine.compiler.compile_uncached, threading.Event(), threading.Event()

    def slow(structured):
        begun.set()
        assert gate.wait(TIMEOUT)
        return compile_now(structured)

    monkeypatch.setattr(llm.engine.compiler, "compile_uncached", slow)
    params = [SamplingParams(structured=StructuredOutput("choice", [text])) for text in "abc"]

    async def close_meanwhile() -> list[Any]:
        tasks = [asyncio.create_task(last(llm.generate([5, 6], each))) for each in params[:2]]
        assert await asyncio.to_thread(begun.wait, TIMEOUT)
        await asyncio.to_thread(wait_until, lambda: llm._compiling._work_queue.qsize() == 1)
        llm.close()
        gate.set()
        return await asyncio.gather(*tasks, last(llm.generate([5, 6], params[2])), return_exceptions=True)

    heard = asyncio.run(close_meanwhile())
    assert all(isinstance(each, EngineStoppedError) and "closed" in str(each) for each in heard), heard


def test_a_compiled_grammar_survives_eviction_until_its_request_runs(llm, monkeypatch) -> None:
    """Even if the engine is busy for long, and other grammars evict it from the cache."""
    monkeypatch.setattr("outrider.structured_output.compiler.CACHE_SIZE", 1)
    compiler, compiled = llm.engine.compiler, []
    compile_now = compiler.compile_uncached
    monkeypatch.setattr(compiler, "compile_uncached", lambda asked: compiled.append(asked) or compile_now(asked))
    others = [StructuredOutput("regex", text) for text in "ab"]
    gate = threading.Event()

    async def held_up() -> Output:
        busy = asyncio.create_task(llm._call(lambda: gate.wait(TIMEOUT)))
        waiting = asyncio.create_task(last(llm.generate([5, 6], CONSTRAINED)))
        await asyncio.to_thread(wait_until, lambda: compiler.find(CHOICE) is not None)
        for other in others:
            await asyncio.to_thread(compiler.compile, other)
        gate.set()
        await busy
        return await waiting

    assert asyncio.run(held_up()).completions[0].text in ("yes", "no")
    assert compiled == [CHOICE, *others]


def test_an_invalid_grammar_fails_only_its_own_request(llm) -> None:
    async def both() -> list[Any]:
        hopeless = SamplingParams(structured=StructuredOutput("regex", "("))
        tasks = (last(llm.generate([5], hopeless)), last(llm.generate([5, 6, 7], PLAIN)))
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    refused, answered = asyncio.run(both())
    assert isinstance(refused, UserError) and answered.finished


LONG = {f"property {number}": {"type": "string"} for number in range(10_000)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields, param, reason",
    [
        ({"guided_regex": "a{1000000}"}, "guided_regex", "too much work"),
        ({"response_format": {"type": "regex", "regex": "(a{1000}){1000}"}}, "response_format", "too much work"),
        ({"structured_outputs": {"regex": "a{1000000}"}}, "structured_outputs.regex", "too much work"),
        ({"guided_json": {"type": "object", "properties": LONG}}, "guided_json", "131072 is the limit"),
        ({"guided_choice": ["a" * 200_000]}, "guided_choice", "131072 is the limit"),
    ],
)
def test_a_grammar_that_is_too_expensive_is_rejected_by_field(llm, fields, param, reason, stream) -> None:
    client = TestClient(build_app(llm, ServerOptions()))
    answer = client.post("/v1/completions", json={"prompt": [5, 6], "stream": stream, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and error["message"].startswith(f"`{param}` ") and reason in error["message"]


def compiling(llm: AsyncLLM) -> list[str]:
    """Return the processes that compile a grammar for this engine."""
    process = llm.engine.compiler._checker._link._process
    if process is None:
        return []
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


@pytest.mark.parametrize("stream", [False, True])
def test_the_compilation_ends_when_the_client_disconnects(llm, stream, monkeypatch) -> None:
    endless_grammar.use(monkeypatch)
    asked = {"model": "tiny", "prompt": [5, 6], "guided_regex": endless_grammar.ENDLESS.text, "stream": stream}
    with serving(llm, names=("tiny",), max_waiting=1) as address:
        with unanswered(address, "/v1/completions", asked):
            wait_until(lambda: compiling(llm))
        wait_until(lambda: not compiling(llm))
        plain = {"model": "tiny", "prompt": [5, 6], "max_tokens": 1}
        assert httpx.post(f"{address}/v1/completions", json=plain, timeout=TIMEOUT).status_code == 200
