"""A real server on a free port, in a thread, for clients that need a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from outrider.async_llm import AsyncLLM
from outrider.server.app import build_app
from outrider.server.options import ServerOptions
from waiting import TIMEOUT, wait_until


@contextmanager
def serving(llm: AsyncLLM, **options: Any) -> Iterator[str]:
    """Serve the engine while the block runs; yield the address. The engine stays open."""
    app = build_app(llm, ServerOptions(port=0, **options))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, name="live-server", daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(TIMEOUT)
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def unanswered(address: str, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """Post a request without reading its response; disconnect when the block ends."""
    url, content = httpx.URL(address), json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((url.host, url.port or 80), timeout=TIMEOUT) as line:
        line.sendall(head.encode() + content)
        yield line


class LoopClock:
    """The clock of a server's event loop, which the test sets forward: time-outs come when it says so."""

    def __init__(self, app: Starlette) -> None:
        self.connections = app.state.server.server_state.connections
        wait_until(lambda: self.connections)
        self.loop: asyncio.AbstractEventLoop = next(iter(self.connections)).loop
        self.seconds, real = 0.0, self.loop.time
        self.loop.time = lambda: real() + self.seconds  # type: ignore[method-assign]

    def advance(self, seconds: float) -> None:
        self.seconds += seconds
        self.loop.call_soon_threadsafe(lambda: None)  # wakes the loop, which looks at its clock
