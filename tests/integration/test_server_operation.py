"""The server under stress: API keys, limits, a full queue, disconnects, a dead engine, signals."""

from __future__ import annotations

import asyncio
import hmac
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest
from live_server import unanswered
from starlette.applications import Starlette
from starlette.testclient import TestClient

from outrider import AsyncLLM, SamplingParams
from outrider.errors import UserError
from outrider.server.admission import Admission, is_open
from outrider.server.app import build_app, listen, serve
from outrider.server.context import Health
from outrider.server.options import ServerOptions
from waiting import TIMEOUT, counted_steps, wait_until, wait_until_idle

ASK: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def own_llm(model) -> Iterator[AsyncLLM]:
    """An engine that the test may break."""
    engine = AsyncLLM(str(model), max_requests=2)
    yield engine
    engine.close(timeout=5)


@contextmanager
def running(llm: AsyncLLM, **options: Any) -> Iterator[tuple[str, Starlette, list[int]]]:
    """Run a server on a free port; yield its address, its application, and a list for its exit code."""
    chosen = ServerOptions(port=0, names=("tiny",), **options)
    app = build_app(llm, chosen)
    listener, codes = listen(chosen), []
    port = listener.getsockname()[1]
    thread = threading.Thread(target=lambda: codes.append(serve(app, chosen, listener)), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}", app, codes
    finally:
        app.state.server.should_exit = True
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


# ---- keys ----


def test_only_probes_and_the_page_are_open_without_a_key(llm) -> None:
    app = build_app(llm, ServerOptions(api_keys=("first", "second")))
    client = TestClient(app)
    paths = {(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ()}
    answered = {path for method, path in paths if client.request(method, path.split("{")[0]).status_code != 401}
    assert answered == {"/", "/page/pages.css", "/health", "/version"}
    assert client.get("/page/index.html").status_code == 200
    assert client.get("/no/such/path").status_code == 401


@pytest.mark.parametrize("key", ["first", "second"])
def test_every_configured_key_is_accepted(llm, key: str) -> None:
    client = TestClient(build_app(llm, ServerOptions(api_keys=("first", "second"))))
    assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_a_key_learns_nothing_of_another_keys_requests(model) -> None:
    """Drafts, acceptance counts and cached tokens come from the requests of one key alone."""
    engine = AsyncLLM(str(model), speculate="suffix:least=0,adaptive=no")
    ask = {**ASK, "prompt": list(range(5, 25)) * 2, "trace": True}
    try:
        app = build_app(engine, ServerOptions(names=("tiny",), api_keys=("first", "second")))
        with TestClient(app) as client:

            def counts(key: str, **fields: Any) -> tuple[int, int]:
                response = client.post("/v1/completions", json=ask | fields, headers={"Authorization": f"Bearer {key}"})
                found = response.json()
                cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
                return cached, sum(step["accepted"] for step in found["choices"][0]["speculation"]["steps"])

            nothing, own = counts("first"), counts("first")
            assert own[0] > nothing[0] == 0 and own[1] > nothing[1]
            assert counts("second") == nothing
            assert counts("first", cache_salt="mine") == nothing
            assert counts("first", cache_salt="mine") == own == counts("first")
    finally:
        engine.close(timeout=5)


@pytest.mark.parametrize("header", ["Bearer firs", "Bearer first2", "Basic first", "first", "Bearer ", "Bearer \xe9"])
def test_a_wrong_key_gets_401_with_the_expected_header(llm, header: str) -> None:
    client = TestClient(build_app(llm, ServerOptions(api_keys=("first",))))
    answer = client.get("/v1/models", headers={"Authorization": header.encode("latin-1")})
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert "first" not in answer.text


def test_a_key_is_compared_with_all_keys_in_constant_time(llm, monkeypatch) -> None:
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b))
    admission = Admission(ServerOptions(api_keys=("a", "bb", "ccc")), llm)
    for key in ("a", "ccc"):
        admission.check_key({"authorization": f"Bearer {key}"})
    assert compared == [(32, 32)] * 6


def test_paths_that_resemble_the_page_need_the_key(llm) -> None:
    assert is_open("GET", "/page/app.js") and not is_open("GET", "/pages") and not is_open("POST", "/v1/completions")


# ---- sizes ----


def test_a_body_above_the_limit_is_rejected_before_it_is_read(own_llm) -> None:
    with running(own_llm, max_body_bytes=1000) as (url, _, _):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT) as line:
            line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000000\r\n\r\n")
            assert line.recv(4096).startswith(b"HTTP/1.1 413 ")

        def endless() -> Iterator[bytes]:
            for _ in range(100):
                yield b" " * 100

        answer = httpx.post(f"{url}/v1/completions", content=endless(), timeout=TIMEOUT)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"
        assert httpx.post(f"{url}/v1/completions", json=ASK, timeout=TIMEOUT).status_code == 200


def test_token_limits_of_the_server_are_enforced(llm) -> None:
    client = TestClient(build_app(llm, ServerOptions(max_prompt_tokens=4, max_tokens=10)))
    for change, word in (({"prompt": [5] * 5}, "prompt"), ({"max_tokens": 11}, "max_tokens")):
        answer = client.post("/v1/completions", json={**ASK, "max_tokens": 10, **change})
        assert answer.status_code == 400 and word in answer.json()["error"]["message"]
    assert client.post("/v1/completions", json={**ASK, "max_tokens": 10}).status_code == 200


# ---- the queue ----


def test_a_full_queue_returns_429_with_retry_after(own_llm) -> None:
    with running(own_llm, max_waiting=2) as (url, _, _):
        statuses: list[httpx.Response] = []

        def ask() -> None:
            statuses.append(httpx.post(f"{url}/v1/completions", json=ASK, timeout=TIMEOUT))

        asks = [threading.Thread(target=ask) for _ in range(12)]
        with counted_steps(own_llm, 0):
            for each in asks:
                each.start()
            wait_until(lambda: len(statuses) == 8)  # two run and two wait
        for each in asks:
            each.join()
        refused = [each for each in statuses if each.status_code == 429]
        answered = [each for each in statuses if each.status_code == 200]
        assert (len(refused), len(answered)) == (8, 4)
        assert all(1 <= int(each.headers["retry-after"]) <= 60 for each in refused)
        assert refused[0].json()["error"]["code"] == "queue_full"
        assert len({each.json()["choices"][0]["text"] for each in answered}) == 1
        ask()
        assert statuses[-1].status_code == 200  # the slots are free again


def test_admission_counts_every_sample_of_a_request(own_llm) -> None:
    admission = Admission(ServerOptions(max_waiting=4), own_llm)  # two more may run
    first = admission.acquire(4)
    second = admission.acquire(2)
    with pytest.raises(Exception, match="waiting already") as refusal:
        admission.acquire()
    assert refusal.value.status == 429 and admission.refused["queue"] == 1
    second.release()
    second.release()
    assert admission.active == 4
    admission.acquire(2).release()
    first.release()
    admission.acquire(100).release()  # a single request is not limited
    assert admission.active == 0


def test_requests_that_no_step_has_seen_do_not_count_as_waiting(own_llm) -> None:
    async def admit_while_paused() -> None:
        admission = Admission(ServerOptions(max_waiting=2), own_llm)
        await own_llm.pause()
        async with asyncio.TaskGroup() as tasks:
            for added in range(1, 5):  # two run, two wait
                admission.acquire()
                tasks.create_task(anext(own_llm.generate([5, 6, 7], SamplingParams(max_tokens=1))))
                while own_llm.load.waiting < added:
                    await asyncio.sleep(0.001)
            with pytest.raises(Exception, match="2 requests are waiting already"):
                admission.acquire()
            await own_llm.resume()

    asyncio.run(admit_while_paused())


def test_retry_after_grows_with_the_number_of_rejected_requests(own_llm, monkeypatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("outrider.server.admission.time.monotonic", lambda: clock[0])
    admission = Admission(ServerOptions(max_waiting=1), own_llm)
    for _ in range(3):
        slot = admission.acquire()
        clock[0] += 2
        slot.release()  # a request ends every two seconds
    admission.acquire(3)
    waits = []
    for _ in range(4):
        with pytest.raises(Exception, match="waiting") as refusal:
            admission.acquire()
        waits.append(int(refusal.value.headers["Retry-After"]))
    assert waits == sorted(waits) and waits[0] >= 1 and waits[-1] > 2 * waits[0]


# ---- clients that vanish, requests that break ----


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_frees_its_pages(own_llm, stream: bool) -> None:
    with running(own_llm) as (url, _, _):
        with counted_steps(own_llm, 2) as permits:
            with unanswered(url, "/v1/completions", {**ASK, "max_tokens": 120, "stream": stream}) as line:
                wait_until(lambda: own_llm.load.running == 1)
                if stream:
                    assert line.recv(4096).startswith(b"HTTP/1.1 200 ")
            wait_until_idle(own_llm, permits)
        assert own_llm.load.pages_used == 0
        counted = 'finished_reason="abort",model_name="tiny"} 1.0'
        wait_until(lambda: counted in httpx.get(f"{url}/metrics", timeout=TIMEOUT).text)


def test_a_failing_request_does_not_affect_others(own_llm, monkeypatch) -> None:
    step = own_llm.engine.runner.step

    def failing(batch):
        if any(row.request.prompt == [9, 9, 9] for row in batch.rows):
            raise RuntimeError("an internal secret")
        return step(batch)

    monkeypatch.setattr(own_llm.engine.runner, "step", failing)
    with running(own_llm) as (url, _, _):
        alone = httpx.post(f"{url}/v1/completions", json=ASK, timeout=TIMEOUT).json()["choices"][0]["text"]
        with (
            ThreadPoolExecutor(1) as pool,
            counted_steps(own_llm, 2) as permits,
            httpx.stream("POST", f"{url}/v1/completions", json={**ASK, "stream": True}, timeout=TIMEOUT) as response,
        ):
            parts = events(response)
            texts = [next(parts)["choices"][0]["text"]]
            asked = {"json": {**ASK, "prompt": [9, 9, 9]}, "timeout": TIMEOUT}
            failed = pool.submit(httpx.post, f"{url}/v1/completions", **asked)
            wait_until(lambda: own_llm._shared._commands)  # the request arrives while the stream runs
            permits.release(100)
            broken = failed.result(TIMEOUT)
            texts += [choice["text"] for part in parts for choice in part["choices"]]
        assert broken.status_code == 500 and "secret" not in broken.text
        assert broken.json()["error"]["type"] == "server_error"
        assert "".join(texts) == alone
        assert httpx.get(f"{url}/health", timeout=TIMEOUT).status_code == 200


# ---- a dead or hanging engine ----


def test_the_server_exits_when_the_engine_dies(own_llm, monkeypatch, caplog) -> None:
    def dying(*_):
        raise SystemExit("killed")

    with running(own_llm) as (url, _, codes):
        assert httpx.get(f"{url}/health", timeout=TIMEOUT).status_code == 200
        monkeypatch.setattr(own_llm.engine, "step", dying)
        answer = httpx.post(f"{url}/v1/completions", json=ASK, timeout=TIMEOUT)
        assert answer.status_code == 503
        wait_until(lambda: codes == [1])


def test_requests_to_a_dead_engine_get_503(own_llm) -> None:
    client = TestClient(build_app(own_llm, ServerOptions()))
    own_llm.close()
    assert client.get("/health").status_code == 503
    answer = client.post("/v1/completions", json=ASK)
    assert answer.status_code == 503 and "stopped" in answer.json()["error"]["message"]


def test_health_fails_while_a_step_hangs(own_llm, monkeypatch) -> None:
    gate = threading.Event()
    step = own_llm.engine.step

    def hangs(*arguments):
        gate.wait(TIMEOUT)
        return step(*arguments)

    monkeypatch.setattr(own_llm.engine, "step", hangs)
    app = build_app(own_llm, ServerOptions())
    health = Health(own_llm, step_limit=0.1)
    assert health.ok
    with TestClient(app) as client:
        asking = threading.Thread(target=lambda: client.post("/v1/completions", json=ASK))
        asking.start()
        wait_until(lambda: not health.ok)
        assert "one step" in str(health.reason) and not health.dead
        gate.set()
        asking.join(TIMEOUT)
    wait_until(lambda: health.ok)  # the answer is there before its step has ended


# ---- signals ----

SERVER = """
import itertools, sys, time
from outrider import AsyncLLM, SamplingParams
from outrider.server.app import build_app
from outrider.server.app import listen, serve
from outrider.server.options import ServerOptions
options = ServerOptions(port=0, drain_seconds=float(sys.argv[2]))
listener, llm = listen(options), AsyncLLM(sys.argv[1])
step, steps = llm.engine.step, itertools.count()
llm.engine.step = lambda *arguments: step(*arguments) if next(steps) < 3 else time.sleep(3600)  # no stream ends
print(listener.getsockname()[1], flush=True)
raise SystemExit(serve(build_app(llm, options), options, listener))
"""


@contextmanager
def process(model, drain: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", SERVER, str(model), str(drain)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server, f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.communicate()


def test_a_signal_drains_streams_and_rejects_new_requests(own_llm) -> None:
    body = {**ASK, "max_tokens": 60, "stream": True}
    with running(own_llm, drain_seconds=60) as (url, app, codes):
        with (
            counted_steps(own_llm, 2) as permits,
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT) as response,
        ):
            parts = events(response)
            first = next(parts)
            app.state.server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: httpx.get(f"{url}/health", timeout=TIMEOUT).status_code == 503)
            late = httpx.post(f"{url}/v1/completions", json=ASK, timeout=TIMEOUT)
            permits.release(100)
            rest = [choice for part in parts for choice in part["choices"]]
        assert late.status_code == 503 and 1 <= int(late.headers["retry-after"]) <= 60
        assert rest[-1]["finish_reason"] == "length" and first["choices"][0]["finish_reason"] is None
        wait_until(lambda: codes == [0])


def test_streams_longer_than_the_drain_are_aborted(own_llm) -> None:
    body = {**ASK, "max_tokens": 120, "stream": True}
    with running(own_llm, drain_seconds=0.3) as (url, app, codes):
        with (
            counted_steps(own_llm, 2) as permits,
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT) as response,
        ):
            parts = events(response)
            next(parts)
            app.state.server.handle_exit(signal.SIGINT, None)
            wait_until_idle(own_llm, permits)
            rest = [choice for part in parts for choice in part["choices"]]
        assert rest[-1]["finish_reason"] == "abort"
        wait_until(lambda: codes == [0])


def test_a_second_signal_exits_at_once(model) -> None:
    """In a process of its own, because the second signal ends the process without cleaning up."""
    with process(model, drain=60) as (server, url):
        body = {**ASK, "max_tokens": 120, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT) as response:
            parts = events(response)  # the reference keeps the connection open
            next(parts)
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{url}/health", timeout=TIMEOUT).status_code == 503)
            server.send_signal(signal.SIGTERM)
            assert server.wait(TIMEOUT) == 128 + signal.SIGTERM


def test_a_port_in_use_is_named_in_the_error() -> None:
    with closing(listen(ServerOptions(port=0))) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=rf"`127.0.0.1:{port}`.*--port"):
            listen(ServerOptions(port=port))


def test_tokenizing_needs_admission(llm) -> None:
    client = TestClient(build_app(llm, ServerOptions(max_waiting=1)))
    admission = client.app.state.context.admission  # type: ignore[attr-defined]
    body = {"/tokenize": {"prompt": "hello"}, "/detokenize": {"tokens": [5, 6]}}
    for path, fields in body.items():
        assert client.post(path, json=fields).status_code == 200
        assert admission.active == 0
        slot = admission.acquire(llm.llm.resolved.max_requests + 1)
        response = client.post(path, json=fields)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        slot.release()
