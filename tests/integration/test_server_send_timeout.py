"""Clients that never read: their slots are released when the engine is done, and they are disconnected."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest

from outrider.errors import UserError
from outrider.server.app import build_app, listen, serve
from outrider.server.options import ServerOptions
from waiting import TIMEOUT, wait_until

ENGINE = {"max_requests": 1}
# About 600 kB of events, which no buffer holds.
BODY = json.dumps(
    {"prompt": [5, 6], "max_tokens": 100, "ignore_eos": True, "stream": True, "logprobs": 90, "speculate": False}
).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    + f"Content-Length: {len(BODY)}\r\n\r\n".encode()
)


@contextmanager
def running(llm: Any, **options: Any) -> Iterator[tuple[Any, int]]:
    """Run a server as `outrider serve` does, with small send buffers; yield the application and the port."""
    server_options = ServerOptions(port=0, **options)
    app, listener = build_app(llm, server_options), listen(server_options)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    thread = threading.Thread(target=serve, args=(app, server_options, listener), daemon=True)
    close, llm.close = llm.close, lambda *arguments, **more: None  # the engine serves the next test too
    thread.start()
    try:
        yield app, listener.getsockname()[1]
    finally:
        app.state.server.should_exit = True
        thread.join(TIMEOUT)
        llm.close = close
    assert not thread.is_alive()


def never_reading(port: int) -> closing[socket.socket]:
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect(("127.0.0.1", port))
    line.sendall(HEAD + BODY)
    return closing(line)


def test_a_client_that_never_reads_gives_its_slot_back(llm) -> None:
    with running(llm, max_waiting=1) as (app, port), never_reading(port), never_reading(port):
        admission = app.state.context.admission
        wait_until(lambda: admission.active > 0)
        wait_until(lambda: llm.engine.is_idle and not llm.num_open)
        wait_until(lambda: admission.active == 0)
        ask = {"prompt": [5], "max_tokens": 1}
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=ask).status_code == 200
        assert len(app.state.server.server_state.connections) >= 2  # they are still there


def test_a_client_that_never_reads_is_disconnected(llm) -> None:
    with running(llm, send_seconds=0.3) as (app, port), never_reading(port) as line:
        wait_until(lambda: app.state.server.server_state.connections)
        wait_until(lambda: not app.state.server.server_state.connections)
        assert app.state.context.admission.active == 0
        received = b""
        while data := line.recv(2**16):
            received += data
        assert b"[DONE]" not in received


def test_a_client_that_reads_slowly_gets_everything(llm) -> None:
    with running(llm, send_seconds=0.3) as (_, port), never_reading(port) as line:
        received = b""
        line.settimeout(TIMEOUT)
        while b"[DONE]" not in received[-100:]:
            received += line.recv(8192)
            threading.Event().wait(0.01)
        assert received.startswith(b"HTTP/1.1 200 OK") and len(received) > 20_000


def test_a_send_timeout_of_zero_is_rejected() -> None:
    with pytest.raises(UserError, match="`send_seconds` is 0"):
        ServerOptions(send_seconds=0)
