"""The server in hard times: strangers, giants, crowds, clients that vanish, engines that die, signals to stop."""

from __future__ import annotations

import hmac
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from outrider import AsyncLLM
from outrider.errors import UserError
from outrider.server.admission import Admission, is_open
from outrider.server.app import build_app
from outrider.server.context import Health
from outrider.server.lifetime import listen, serve
from outrider.server.options import ServerOptions

ASK: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(model) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(str(model), max_requests=4)
    yield engine
    engine.close()


@pytest.fixture
def own_llm(model) -> Iterator[AsyncLLM]:
    """An engine to be broken."""
    engine = AsyncLLM(str(model), max_requests=2)
    yield engine
    engine.close(timeout=5)


@pytest.fixture
def client(llm) -> TestClient:
    return TestClient(build_app(llm, ServerOptions(names=("tiny",))))


@contextmanager
def running(llm: AsyncLLM, **options: Any) -> Iterator[tuple[str, list[int]]]:
    """A real server on a free port; the list gets the code that the process would exit with."""
    chosen = ServerOptions(port=0, names=("tiny",), **options)
    app = build_app(llm, chosen)
    listener, codes = listen(chosen), []
    port = listener.getsockname()[1]
    thread = threading.Thread(target=lambda: codes.append(serve(app, chosen, listener)), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}", codes
    finally:
        app.state.server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def slow_down(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    step = llm.engine.step

    def slow(*arguments):
        time.sleep(seconds)
        return step(*arguments)

    monkeypatch.setattr(llm.engine, "step", slow)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def until(true, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


# ---- keys ----


def test_without_the_key_only_probes_and_the_page_answer(llm) -> None:
    app = build_app(llm, ServerOptions(api_keys=("first", "second")))
    client = TestClient(app)
    paths = {(method, route.path) for route in app.routes for method in getattr(route, "methods", None) or ()}
    answered = {path for method, path in paths if client.request(method, path.split("{")[0]).status_code != 401}
    assert answered == {"/", "/page/pages.css", "/health", "/version"}
    assert client.get("/page/index.html").status_code == 200
    assert client.get("/no/such/path").status_code == 401


@pytest.mark.parametrize("key", ["first", "second"])
def test_any_of_the_keys_opens(llm, key: str) -> None:
    client = TestClient(build_app(llm, ServerOptions(api_keys=("first", "second"))))
    assert client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize("header", ["Bearer firs", "Bearer first2", "Basic first", "first", "Bearer ", "Bearer \xe9"])
def test_a_wrong_key_is_told_what_to_send(llm, header: str) -> None:
    client = TestClient(build_app(llm, ServerOptions(api_keys=("first",))))
    answer = client.get("/v1/models", headers={"Authorization": header.encode("latin-1")})
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert "first" not in answer.text


def test_a_key_is_compared_with_all_whichever_fits(llm, monkeypatch) -> None:
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b))
    admission = Admission(ServerOptions(api_keys=("a", "bb", "ccc")), llm)
    for key in ("a", "ccc"):
        admission.check_key({"authorization": f"Bearer {key}"})
    assert compared == [(32, 32)] * 6


def test_a_path_that_looks_like_the_page_is_not(llm) -> None:
    assert is_open("GET", "/page/app.js") and not is_open("GET", "/pages") and not is_open("POST", "/v1/completions")


# ---- sizes ----


def test_a_body_beyond_the_limit_is_not_read(own_llm) -> None:
    with running(own_llm, max_body_bytes=1000) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as line:
            line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000000\r\n\r\n")
            assert line.recv(4096).startswith(b"HTTP/1.1 413 ")

        def endless() -> Iterator[bytes]:
            for _ in range(100):
                yield b" " * 100

        answer = httpx.post(f"{url}/v1/completions", content=endless())
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"
        assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200


def test_the_servers_own_limits_of_length(llm) -> None:
    client = TestClient(build_app(llm, ServerOptions(max_prompt_tokens=4, max_tokens=10)))
    for change, word in (({"prompt": [5] * 5}, "prompt"), ({"max_tokens": 11}, "max_tokens")):
        answer = client.post("/v1/completions", json={**ASK, "max_tokens": 10, **change})
        assert answer.status_code == 400 and word in answer.json()["error"]["message"]
    assert client.post("/v1/completions", json={**ASK, "max_tokens": 10}).status_code == 200


# ---- crowds ----


def test_a_full_queue_says_when_to_come_back(own_llm, monkeypatch) -> None:
    slow_down(own_llm, monkeypatch)
    with running(own_llm, max_waiting=2) as (url, _):
        statuses: list[httpx.Response] = []
        asks = [
            threading.Thread(target=lambda: statuses.append(httpx.post(f"{url}/v1/completions", json=ASK, timeout=60)))
            for _ in range(12)
        ]
        for each in asks:
            each.start()
        for each in asks:
            each.join()
        refused = [each for each in statuses if each.status_code == 429]
        answered = [each for each in statuses if each.status_code == 200]
        assert len(refused) + len(answered) == 12 and len(answered) >= 4 and refused
        assert all(1 <= int(each.headers["retry-after"]) <= 60 for each in refused)
        assert refused[0].json()["error"]["code"] == "queue_full"
        assert len({each.json()["choices"][0]["text"] for each in answered}) == 1
        assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200  # and the seats are free again


def test_seats_are_counted_with_the_samples_of_a_request(own_llm) -> None:
    admission = Admission(ServerOptions(max_waiting=4), own_llm)  # and two that run
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
    admission.acquire(100).release()  # alone it may be as large as it likes
    assert admission.active == 0


def test_those_who_are_refused_together_come_back_one_after_another(own_llm, monkeypatch) -> None:
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


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_hangs_up_frees_its_pages(own_llm, monkeypatch, streams: bool) -> None:
    slow_down(own_llm, monkeypatch)
    with running(own_llm) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({**ASK, "max_tokens": 120, "stream": streams}).encode()
        with socket.create_connection((host, int(port)), timeout=5) as line:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            line.sendall(head.encode() + body)
            until(lambda: own_llm.load.running == 1)
            if streams:
                assert line.recv(4096).startswith(b"HTTP/1.1 200 ")
        steps = own_llm.engine.times.steps
        until(lambda: own_llm.load.running == 0)
        assert own_llm.engine.times.steps - steps < 20  # and not the 120 that it had asked for
        assert own_llm.load.pages_used == 0
        until(lambda: 'finished_reason="abort",model_name="tiny"} 1.0' in httpx.get(f"{url}/metrics").text)


def test_a_request_that_breaks_breaks_alone(own_llm, monkeypatch) -> None:
    slow_down(own_llm, monkeypatch)
    step = own_llm.engine.runner.step

    def rude(asked):
        if any(row.request.prompt == [9, 9, 9] for row in asked.rows):
            raise RuntimeError("a secret of the inside")
        return step(asked)

    monkeypatch.setattr(own_llm.engine.runner, "step", rude)
    with running(own_llm) as (url, _):
        alone = httpx.post(f"{url}/v1/completions", json=ASK).json()["choices"][0]["text"]
        with httpx.stream("POST", f"{url}/v1/completions", json={**ASK, "stream": True}) as response:
            parts = events(response)
            texts = [next(parts)["choices"][0]["text"]]
            broken = httpx.post(f"{url}/v1/completions", json={**ASK, "prompt": [9, 9, 9]})
            texts += [choice["text"] for part in parts for choice in part["choices"]]
        assert broken.status_code == 500 and "secret" not in broken.text
        assert broken.json()["error"]["type"] == "server_error"
        assert "".join(texts) == alone
        assert httpx.get(f"{url}/health").status_code == 200


# ---- the engine dies, or hangs ----


def test_health_is_red_and_the_process_ends_when_the_engine_dies(own_llm, monkeypatch, caplog) -> None:
    def dying(*_):
        raise SystemExit("killed")

    with running(own_llm) as (url, codes):
        assert httpx.get(f"{url}/health").status_code == 200
        monkeypatch.setattr(own_llm.engine, "step", dying)
        answer = httpx.post(f"{url}/v1/completions", json=ASK, timeout=10)
        assert answer.status_code == 503
        until(lambda: codes == [1])


def test_a_dead_engine_is_told_to_those_who_still_ask(own_llm) -> None:
    client = TestClient(build_app(own_llm, ServerOptions()))
    own_llm.close()
    assert client.get("/health").status_code == 503
    answer = client.post("/v1/completions", json=ASK)
    assert answer.status_code == 503 and "stopped" in answer.json()["error"]["message"]


def test_health_is_red_while_a_step_hangs(own_llm, monkeypatch) -> None:
    gate = threading.Event()
    step = own_llm.engine.step

    def hangs(*arguments):
        gate.wait(20)
        return step(*arguments)

    monkeypatch.setattr(own_llm.engine, "step", hangs)
    app = build_app(own_llm, ServerOptions())
    health = Health(own_llm, step_limit=0.1)
    assert health.ok
    with TestClient(app) as client:
        asking = threading.Thread(target=lambda: client.post("/v1/completions", json=ASK))
        asking.start()
        until(lambda: not health.ok)
        assert "one step" in str(health.reason) and not health.dead
        gate.set()
        asking.join(20)
    assert health.ok


# ---- the end ----

SERVER = """
import sys, time
from outrider import AsyncLLM
from outrider.server.app import build_app
from outrider.server.lifetime import listen, serve
from outrider.server.options import ServerOptions
options = ServerOptions(port=0, drain_seconds=float(sys.argv[2]))
listener, llm = listen(options), AsyncLLM(sys.argv[1])
step = llm.engine.step
llm.engine.step = lambda *arguments: (time.sleep(0.03), step(*arguments))[1]
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


def test_a_signal_lets_streams_end_and_nobody_in(model) -> None:
    with process(model, drain=60) as (server, url):
        with httpx.stream("POST", f"{url}/v1/completions", json={**ASK, "max_tokens": 60, "stream": True}) as response:
            parts = events(response)
            first = next(parts)
            server.send_signal(signal.SIGTERM)
            late = httpx.post(f"{url}/v1/completions", json=ASK)
            until(lambda: httpx.get(f"{url}/health").status_code == 503)
            rest = [choice for part in parts for choice in part["choices"]]
        assert late.status_code == 503 and 1 <= int(late.headers["retry-after"]) <= 60
        assert rest[-1]["finish_reason"] == "length" and first["choices"][0]["finish_reason"] is None
        assert server.wait(20) == 0


def test_streams_that_outlast_the_drain_are_aborted(model) -> None:
    with process(model, drain=0.3) as (server, url):
        with httpx.stream("POST", f"{url}/v1/completions", json={**ASK, "max_tokens": 120, "stream": True}) as response:
            parts = events(response)
            next(parts)
            server.send_signal(signal.SIGINT)
            rest = [choice for part in parts for choice in part["choices"]]
        assert rest[-1]["finish_reason"] == "abort"
        assert server.wait(20) == 0


def test_a_second_signal_ends_it_at_once(model) -> None:
    with process(model, drain=60) as (server, url):
        asked = {**ASK, "max_tokens": 120, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as response:
            parts = events(response)  # kept: without it the client would hang up
            next(parts)
            server.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/health").status_code == 503)
            server.send_signal(signal.SIGTERM)
            assert server.wait(5) == 128 + signal.SIGTERM


def test_a_port_that_is_taken_is_named() -> None:
    with closing(listen(ServerOptions(port=0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"`127.0.0.1:{port}`.*--port"):
            listen(ServerOptions(port=port))
