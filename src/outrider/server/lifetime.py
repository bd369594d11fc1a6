"""From the first socket to the last answer: listen, watch over the engine, drain, go."""

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
from .receive_timeout import protocol

GRACE = 5  # seconds for what is left after the drain: last chunks on their way, connections to close
KEEP_ALIVE = 65  # seconds; longer than most proxies and clients keep a silent connection, so that they close it
BACKLOG = 2048

log = logging.getLogger(__name__)


def listen(options: ServerOptions) -> socket.socket:
    """Take the port. Worth doing before a model is loaded: a port that is taken is no reason to wait for one."""
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        raise UserError(f"cannot listen at `{where}` ({error.strerror}): pass another `--host` or `--port`") from None


def serve(app: Starlette, options: ServerOptions, listener: socket.socket | None = None) -> int:
    """Answer until a signal comes or the engine dies. Returns what the process should exit with."""
    context: Context = app.state.context
    logs.configure()
    app.state.keeper = keeper = Keeper(app, context)
    taken = listener or listen(options)
    host, port = taken.getsockname()[:2]
    log.info("serving `%s` at http://%s:%d", context.options.names[0], f"[{host}]" if ":" in host else host, port)
    keeper.run(sockets=[taken])
    context.llm.close(timeout=GRACE)
    return 1 if keeper.failed else 0


class Keeper(uvicorn.Server):
    """uvicorn's server, which also watches the engine, and on a signal lets the present requests end.

    While it drains it still listens: newcomers hear 503 and when to come back, and `/health` turns red.
    """

    def __init__(self, app: Starlette, context: Context) -> None:
        config = uvicorn.Config(
            app,
            http=protocol(context.options.receive_seconds, KEEP_ALIVE),
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
        if self._drain_until is not None:  # asked twice: no more patience
            os._exit(128 + sig)
        self._drain_until = time.monotonic() + self.context.options.drain_seconds
        self.context.guard.drain()
        self.context.health.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self.context.health.dead:
            log.critical("%s: the server exits", self.context.health.reason)
            self.failed = True
            return True
        if self._drain_until is not None and await self._drained(self._drain_until):
            return True
        return await super().on_tick(counter)

    async def _drained(self, until: float) -> bool:
        guard = self.context.guard
        if guard.seats and time.monotonic() < until:
            return False
        if guard.seats:
            log.warning("%d requests are cut short: `drain_seconds` are over", guard.seats)
            try:
                # They end as if they had been aborted, so their clients get a proper last word.
                await asyncio.wait_for(self._abort_all(), 2 * GRACE)
            except (TimeoutError, EngineStoppedError):
                log.warning("the engine does not answer: it is left behind")
        return True

    async def _abort_all(self) -> None:
        """Again and again for a while: some were let in, and are still on their way to the engine."""
        end = time.monotonic() + GRACE
        while self.context.guard.seats and time.monotonic() < end:
            await self.context.llm.abort_all()
            await asyncio.sleep(0.05)
