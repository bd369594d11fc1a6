"""A thread dies: the engine's, at any step, one of the kernels', one that reads a prompt. No client waits forever."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from endurance.sabotage import CAUSE, ERRORS, LONG, Fragile, check_nothing_left
from endurance.scenes import MIXED, PROMPTS, alone, everyone, visible_output
from outrider import LLM, AsyncLLM
from outrider.async_llm import EngineStoppedError
from outrider.server.api.translate import LONG_TEXT
from outrider.server.app import build_app
from outrider.server.options import ServerOptions

DEATHS: tuple[type[BaseException], ...] = (SystemExit, KeyboardInterrupt, GeneratorExit)
ASK: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def dying(llm: LLM, after: int, death: type[BaseException]) -> Callable[..., object]:
    steps, step = iter(range(after)), llm.engine.step

    def last(*arguments: Any) -> object:
        if next(steps, None) is None:
            raise death(CAUSE)
        return step(*arguments)

    return last


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_the_engines_thread_dies_at_any_step(fragile: Callable[..., Fragile], method: str) -> None:
    """Finished requests keep their answers; the others, and later ones, get the reason."""
    expected = alone(fragile().llm, MIXED)
    llm = fragile(method, max_requests=2).llm  # one of the three waits
    heard = 0
    for after in range(30) if LONG else (0, 1, 2, 4):
        engine = AsyncLLM(llm)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.engine, "step", dying(llm, after, DEATHS[after % len(DEATHS)]))
            outcomes = asyncio.run(everyone(engine))
            for found, whole in zip(outcomes, expected, strict=True):
                assert found == whole or (isinstance(found, EngineStoppedError) and CAUSE in str(found))
            stopped = sum(isinstance(found, EngineStoppedError) for found in outcomes)
            heard += stopped
            if stopped:
                assert not engine.alive and isinstance(engine.failure, DEATHS)
                assert all(isinstance(found, EngineStoppedError) for found in asyncio.run(everyone(engine)))
        engine.close(timeout=5)
        for name in list(llm.engine.parents):  # what the dead one left goes, as with the process
            llm.engine.abort(name)
        check_nothing_left(llm)
    assert heard >= 9
    assert [visible_output(output) for output in llm.generate(PROMPTS, MIXED)] == expected


def test_a_device_that_is_lost_takes_the_engine_with_it(fragile: Callable[..., Fragile]) -> None:
    """As after an illegal address, when each later call fails; else one request may fail and the rest go on."""
    made = fragile()
    expected = alone(made.llm, MIXED)

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for device_lost in (False, True):
        engine = AsyncLLM(made.llm)
        with pytest.MonkeyPatch.context() as patch:
            if device_lost:
                patch.setattr(made.llm.engine.device, "fence", lost, raising=False)
            made.kernels.arm(20, ERRORS["a kernel fails"], times=10**9 if device_lost else 2)
            outcomes = asyncio.run(everyone(engine))
            engine._thread.join(10 if device_lost else 0)  # answers are delivered before the device is asked
        made.kernels.rest()
        stopped = [found for found in outcomes if isinstance(found, EngineStoppedError)]
        broken = [found for found in outcomes if isinstance(found, tuple) and found[2] == "error"]
        assert len(broken) >= 1 and engine.alive is not device_lost
        if device_lost:
            assert len(stopped) + len(broken) == 3 and "illegal memory access" in str(engine.failure)
        else:
            assert len(broken) == 1 and sum(found in expected for found in outcomes) == 2
        engine.close(timeout=5)
        for name in list(made.llm.engine.parents):
            made.llm.engine.abort(name)
        check_nothing_left(made.llm)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("stream", [True, False])
def test_a_server_whose_engine_dies(fragile: Callable[..., Fragile], stream: bool) -> None:
    """The client gets an error in OpenAI's format, /health fails, and later requests are refused."""
    llm = fragile(max_requests=2).llm
    for after in (0, 1, 9):
        engine = AsyncLLM(llm)
        with pytest.MonkeyPatch.context() as patch, TestClient(build_app(engine, ServerOptions())) as client:
            assert client.get("/health").status_code == 200
            patch.setattr(llm.engine, "step", dying(llm, after, SystemExit))
            response = client.post("/v1/completions", json={**ASK, "stream": stream})
            last = (
                response.text.split("\n\n")[-3].removeprefix("data: ") if response.status_code == 200 else response.text
            )
            assert json.loads(last)["error"]["message"] == "the engine has stopped: send the request to another server"
            assert response.status_code in ({200, 503} if stream else {503})
            health = client.get("/health")
            assert health.status_code == 503 and "the engine died: SystemExit" in health.text
            assert client.post("/v1/completions", json=ASK).status_code == 503
        engine.close(timeout=5)
        for name in list(llm.engine.parents):
            llm.engine.abort(name)
    check_nothing_left(llm)


@pytest.mark.parametrize("length", [10, LONG_TEXT + 1])
def test_a_servers_worker_that_fails(fragile: Callable[..., Fragile], length: int) -> None:
    """Long prompts are read on a thread of their own: what breaks there, or here, is that request's alone."""
    llm = fragile(max_requests=2).llm
    engine, encode = AsyncLLM(llm), llm.tokenizer.encode

    def failing(text: str, *rest: Any, **named: Any) -> list[int]:
        if text.startswith("q"):
            raise MemoryError(CAUSE)
        return encode(text, *rest, **named)

    try:
        with pytest.MonkeyPatch.context() as patch:
            client = TestClient(build_app(engine, ServerOptions()), raise_server_exceptions=False)
            whole = client.post("/v1/completions", json=ASK).json()["choices"]
            patch.setattr(llm.tokenizer, "encode", failing)
            broken = client.post("/v1/completions", json={**ASK, "prompt": "q" * length})
            assert broken.status_code == 500 and CAUSE not in broken.text
            assert client.post("/v1/completions", json=ASK).json()["choices"] == whole
            assert client.get("/health").status_code == 200
        check_nothing_left(llm)
    finally:
        engine.close()


STARVED = """
    import os, resource
    import torch
    from outrider.kernels import cpu

    torch.set_num_threads(1)
    numbers = torch.arange(1 << 16)
    cpu.set_threads(1)
    alone = cpu.stream_read(numbers)
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + (64 << 20), -1))  # room for a few threads' stacks
    cpu.set_threads(200)
    for _ in range(2):
        try:
            cpu.stream_read(numbers)
        except RuntimeError as error:
            print(error)
    cpu.set_threads(2)
    print(cpu.stream_read(numbers) == alone)
"""


def test_a_kernel_thread_that_cannot_be_started() -> None:
    """The call fails, and says what to change; the process lives, and with fewer threads all is well."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(STARVED)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert first == second and first.startswith("cannot start 200 threads (") and "lower `threads`" in first
    assert last == "True"
