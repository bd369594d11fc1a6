"""The life of the server process: listen, watch the engine, drain on a signal, exit."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from ..async_llm import EngineStoppedError
from ..errors import UserError
from . import logs
from .context import Context
from .options import ServerOptions
from .receive_timeout import timed_protocol

GRACE = 5  # seconds after the drain to send the last chunks and to close connections
# Seconds that an idle connection stays open: longer than in most proxies and clients, so that they close it first and
# never send a request into a connection that is being closed.
KEEP_ALIVE = 65
BACKLOG = 2048  # connections that the kernel queues, as in uvicorn
ABORT_INTERVAL = 0.05  # seconds between two attempts to abort all requests

log = logging.getLogger(__name__)


def listen(options: ServerOptions) -> socket.socket:
    """Bind the port. Call it before the model is loaded, so that a port in use is reported at once."""
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
    except OSError as error:
        address = f"{options.host}:{options.port}"
        raise UserError(f"cannot listen at `{address}` ({error.strerror}): pass another `--host` or `--port`") from None


def serve(app: Starlette, options: ServerOptions, listener: socket.socket | None = None) -> int:
    """Serve until a signal arrives or the engine dies; return the exit status of the process."""
    context: Context = app.state.context
    logs.configure()
    app.state.server = server = DrainingServer(app, context)
    listener = listener or listen(options)
    host, port = listener.getsockname()[:2]
    log.info("serving `%s` at http://%s:%d", context.options.names[0], f"[{host}]" if ":" in host else host, port)
    server.run(sockets=[listener])
    context.llm.close(timeout=GRACE)
    return 1 if server.failed else 0


class DrainingServer(uvicorn.Server):
    """uvicorn's server that also watches the engine, and on a signal lets running requests finish.

    While it drains it still accepts connections: new requests get 503 with Retry-After, and `/health` fails.
    """

    def __init__(self, app: Starlette, context: Context) -> None:
        config = uvicorn.Config(
            app,
            http=timed_protocol(context.options.receive_seconds, KEEP_ALIVE),
            access_log=False,
            log_config=None,
            log_level="warning",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
        )
        super().__init__(config)
        self.context = context
        self.failed = False
        self._drain_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_until is not None:  # a second signal: exit at once
            os._exit(128 + sig)
        self._drain_until = time.monotonic() + self.context.options.drain_seconds
        self.context.admission.drain()
        self.context.health.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self.context.health.dead:
            log.critical("%s: the server exits", self.context.health.reason)
            self.failed = True
            return True
        if self._drain_until is not None and await self._drained(self._drain_until):
            return True
        return await super().on_tick(counter)

    async def _drained(self, deadline: float) -> bool:
        """Return whether no request is left; after `deadline`, abort the requests that are."""
        admission = self.context.admission
        if admission.active and time.monotonic() < deadline:
            return False
        if admission.active:
            log.warning("%d requests are aborted: `drain_seconds` are over", admission.active)
            try:
                # Aborted requests still get a last chunk with a finish reason.
                await asyncio.wait_for(self._abort_all(), 2 * GRACE)
            except (TimeoutError, EngineStoppedError):
                log.warning("the engine does not respond: exiting without it")
        return True

    async def _abort_all(self) -> None:
        """Abort repeatedly for a while, because admitted requests may not have reached the engine yet."""
        end = time.monotonic() + GRACE
        while self.context.admission.active and time.monotonic() < end:
            await self.context.llm.abort_all()
            await asyncio.sleep(ABORT_INTERVAL)
