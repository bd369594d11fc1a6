"""Clients that never read: their slots are released when the engine is done, and they are disconnected."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from live_server import LoopClock

from outrider.errors import UserError
from outrider.server.app import build_app, listen, serve
from outrider.server.options import ServerOptions
from outrider.server.timeouts import timed_protocol
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
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=ask, timeout=TIMEOUT).status_code == 200
        assert len(app.state.server.server_state.connections) >= 2  # they are still there


def test_a_client_that_never_reads_is_disconnected(llm) -> None:
    with running(llm, send_seconds=30) as (app, port), never_reading(port) as line:
        clock = LoopClock(app)
        (protocol,) = clock.connections
        wait_until(lambda: protocol.send_timer and llm.engine.is_idle)
        while clock.connections:  # until buffers of the system take no more
            clock.advance(31)
            wait_until(lambda: protocol.send_timer or not clock.connections)
        wait_until(lambda: app.state.context.admission.active == 0)
        received = b""
        while data := line.recv(2**16):
            received += data
        assert b"[DONE]" not in received


def test_a_client_that_reads_slowly_gets_everything(llm) -> None:
    with running(llm, send_seconds=30) as (app, port), never_reading(port) as line:
        clock, received = LoopClock(app), b""
        (protocol,) = clock.connections
        line.settimeout(TIMEOUT)
        for _ in range(4):
            wait_until(lambda: protocol.send_timer)
            timer = protocol.send_timer
            while protocol.send_timer is timer:  # until something was sent
                received += line.recv(8192)
            clock.advance(20)
        while b"[DONE]" not in received[-100:]:
            data = line.recv(8192)
            assert data, "the server closed the connection"
            received += data
        assert received.startswith(b"HTTP/1.1 200 OK") and len(received) > 20_000


def test_the_send_timeout_begins_anew_if_a_part_was_sent() -> None:
    unsent, timers, aborted = [900, 500, 500], [], []
    protocol: Any = object.__new__(timed_protocol(1, 1, send_seconds=7))
    protocol.loop = SimpleNamespace(call_later=lambda *timer: timers.append(timer))
    protocol.transport = SimpleNamespace(get_write_buffer_size=lambda: unsent[0], abort=lambda: aborted.append(True))
    protocol._watch_sending()
    for _ in range(2):
        unsent.pop(0)
        seconds, check = timers.pop()
        assert seconds == 7 and not aborted and not timers
        check()
    assert aborted and not timers


def test_a_send_timeout_of_zero_is_rejected() -> None:
    with pytest.raises(UserError, match="`send_seconds` is 0"):
        ServerOptions(send_seconds=0)
