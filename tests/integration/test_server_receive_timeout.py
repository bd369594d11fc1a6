"""Receive time-out: slow clients get 408 and are disconnected; other requests are not affected."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest
from live_server import LoopClock
from starlette.applications import Starlette

from outrider.errors import UserError
from outrider.server.app import build_app, listen, serve
from outrider.server.options import ServerOptions
from waiting import TIMEOUT

SECONDS = 1.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": [5, 6, 7], "max_tokens": 3}).encode()
LENGTH = f"Content-Length: {len(BODY)}\r\n\r\n".encode()
ENGINE = {"max_requests": 2}


@contextmanager
def running(llm: Any, seconds: float) -> Iterator[tuple[Starlette, int]]:
    """Run a server as `outrider serve` does, with this receive time-out; yield the application and the port."""
    options = ServerOptions(port=0, receive_seconds=seconds)
    app, listener = build_app(llm, options), listen(options)
    thread = threading.Thread(target=serve, args=(app, options, listener), daemon=True)
    close, llm.close = llm.close, lambda *arguments, **more: None  # the engine serves other tests too
    thread.start()
    yield app, listener.getsockname()[1]
    app.state.server.should_exit = True
    thread.join(TIMEOUT)
    llm.close = close
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def port(llm) -> Iterator[int]:
    """The port of a server with a short receive time-out."""
    with running(llm, SECONDS) as (_, port):
        yield port


def connect(port: int) -> closing[socket.socket]:
    return closing(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT))


def trickle(line: socket.socket, data: bytes, done: Callable[[], bool]) -> None:
    """Send a byte at a time, until the server closes the connection."""
    for index in range(len(data)):
        if done():
            return
        try:
            line.sendall(data[index : index + 1])
        except OSError:
            return
        time.sleep(SECONDS / 10)


def read_all(line: socket.socket) -> bytes:
    """Return everything that arrives until the server closes the connection."""
    received = b""
    try:
        while data := line.recv(2**16):
            received += data
    except ConnectionResetError:  # closed while this side was still sending
        pass
    return received


def received_part(line: socket.socket) -> bytes:
    data = line.recv(2**16)
    assert data, "the server closed the connection"
    return data


def answer(line: socket.socket) -> bytes:
    """Return one whole response, after which the connection stays open."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += received_part(line)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += received_part(line)
    return head


def send_slowly(port: int, sent: bytes, slowly: bytes) -> tuple[bytes, float]:
    """Send the first part at once and the rest byte by byte; return the response and the seconds until it."""
    with connect(port) as line:
        over = threading.Event()
        started = time.monotonic()
        line.sendall(sent)
        drops = threading.Thread(target=trickle, args=(line, slowly, over.is_set), daemon=True)
        drops.start()
        received = read_all(line)
        seconds = time.monotonic() - started
        over.set()
        drops.join(TIMEOUT)
    return received, seconds


@pytest.mark.parametrize(
    "sent, slowly, part",
    [
        (b"", HEAD + b"X-Padding: " + b"x" * 1000, "the head"),
        (HEAD + LENGTH, BODY[:-1] + b" " * 1000, "the body"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 200, "the body"),
    ],
    ids=["head", "body", "chunks"],
)
def test_a_slow_request_gets_408(port: int, sent: bytes, slowly: bytes, part: str) -> None:
    received, seconds = send_slowly(port, sent, slowly)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n") and b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["code"] == "request_timeout" and error["message"].startswith(part)
    assert SECONDS <= seconds < TIMEOUT / 2


def test_a_slow_body_after_the_response_closes_the_connection(port: int) -> None:
    received, seconds = send_slowly(
        port, b"GET /version HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n", b" " * 5000
    )
    assert received.startswith(b"HTTP/1.1 200 OK") and seconds < TIMEOUT / 2


def test_slow_requests_within_the_limit_and_other_requests_are_served(llm) -> None:
    with running(llm, 30) as (app, port), connect(port) as silent, connect(port) as slow:
        clock = LoopClock(app)

        def pass_seconds(seconds: float) -> None:
            """Let the server read everything that was sent, and set its clock forward."""
            assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=TIMEOUT).status_code == 200
            clock.advance(seconds)

        silent.sendall(HEAD)
        for part in (HEAD + LENGTH, BODY[:5]):
            slow.sendall(part)
            pass_seconds(12)
        slow.sendall(BODY[5:])
        assert answer(slow).startswith(b"HTTP/1.1 200 OK")
        pass_seconds(24)
        assert read_all(silent).startswith(b"HTTP/1.1 408 ")
        # The same connection once more: the clock begins anew with each request.
        slow.sendall(HEAD + LENGTH)
        pass_seconds(24)
        slow.sendall(BODY)
        assert answer(slow).startswith(b"HTTP/1.1 200 OK")
        slow.sendall(HEAD)
        pass_seconds(36)
        assert read_all(slow).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("stream", [False, True])
def test_generation_may_take_longer_than_the_receive_timeout(port: int, llm, monkeypatch, stream: bool) -> None:
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda *arguments: (time.sleep(SECONDS / 20), step(*arguments))[1])
    ask = {"prompt": [5, 6], "max_tokens": 40, "ignore_eos": True, "stream": stream}
    started = time.monotonic()
    reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=ask, timeout=TIMEOUT)
    assert reply.status_code == 200 and time.monotonic() - started > 1.5 * SECONDS
    assert "data: [DONE]" in reply.text if stream else reply.json()["usage"]["completion_tokens"] == 40


def test_a_receive_timeout_of_zero_is_rejected() -> None:
    with pytest.raises(UserError, match="`receive_seconds` is 0"):
        ServerOptions(receive_seconds=0)
