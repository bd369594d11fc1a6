"""A real server on a free port, in a thread, for clients that need a socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

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
