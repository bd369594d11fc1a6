"""The server: the ASGI application (`build_app`), and the process that serves it (`serve`).

The process listens, watches the engine, drains on a signal, and exits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..async_llm import AsyncLLM, EngineStoppedError
from ..errors import UserError
from ..tokenizer import TokenTexts
from . import logs, playground
from .admission import Admission, AdmissionMiddleware
from .api import adapters, chat, completions, info, ollama, openai_responses
from .api.errors import ApiError, on_disconnect, on_error
from .api.generation import IGNORED_HEADER
from .context import Context, Health
from .logs import RequestLog
from .metrics import Metrics
from .options import ServerOptions
from .response_store import ResponseStore
from .timeouts import ACCEPTED_AT_ONCE, timed_protocol
from .tracing import Tracer

Handler = Callable[[Request], Awaitable[Response]]
GRACE = 5  # seconds after the drain to send the last chunks and to close connections
# Seconds that an idle connection stays open: longer than in most proxies and clients, so that they close it first and
# never send a request into a connection that is being closed.
KEEP_ALIVE = 65
BACKLOG = 2048  # connections that the kernel queues, as in uvicorn
ABORT_INTERVAL = 0.05  # seconds between two attempts to abort all requests
log = logging.getLogger(__name__)


def build_app(llm: AsyncLLM, options: ServerOptions) -> Starlette:
    """Build the application without a socket; uvicorn, Ray Serve or a test runs it."""
    options = replace(options, names=options.names or (llm.llm.resolved.model,))
    admission = Admission(options, llm)
    app = Starlette(
        routes=routes(options),
        middleware=[
            Middleware(RequestLog, lines=options.log_requests, as_json=options.log_json),
            *cors(options.allow_origins),
            Middleware(AdmissionMiddleware, admission=admission),
        ],
        exception_handlers={
            **dict.fromkeys((ApiError, UserError, HTTPException), on_error),
            ClientDisconnect: on_disconnect,
        },
    )
    app.router.redirect_slashes = False  # a redirect would name the host that the client sent
    app.state.context = Context(
        llm=llm,
        options=options,
        admission=admission,
        metrics=Metrics(llm, options.names[0], admission, open_tracer(options.otlp_traces_endpoint)),
        health=Health(llm),
        texts=TokenTexts(llm.llm.tokenizer),
        responses=ResponseStore(options.max_stored_responses),
        started=int(time.time()),
    )
    return app


def open_tracer(endpoint: str | None) -> Tracer | None:
    return None if endpoint is None else Tracer.open(endpoint)


def cors(origins: Sequence[str]) -> list[Middleware]:
    """Return the middleware that lets pages of other origins call the server; none without such origins."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", IGNORED_HEADER],
        )
    ]


def routes(options: ServerOptions) -> list[BaseRoute]:
    """Return all routes; AdmissionMiddleware decides which of them need an API key."""
    handlers: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/completions", completions.create),
        ("POST", "/v1/chat/completions", chat.create),
        ("POST", "/v1/responses", openai_responses.create),
        ("GET", "/v1/responses/{response_id}", openai_responses.retrieve),
        ("DELETE", "/v1/responses/{response_id}", openai_responses.delete),
        ("GET", "/v1/models", info.list_models),
        ("GET", "/v1/models/{name:path}", info.show_model),
        ("POST", "/v1/load_lora_adapter", adapters.load),
        ("POST", "/v1/unload_lora_adapter", adapters.unload),
        ("POST", "/v1/embeddings", info.no_embeddings),
        ("POST", "/api/generate", ollama.generate),
        ("POST", "/api/chat", ollama.chat),
        ("GET", "/api/tags", ollama.tags),
        ("GET", "/api/ps", ollama.running),
        ("POST", "/api/show", ollama.show),
        ("GET", "/api/version", ollama.version),
        ("POST", "/api/embed", info.no_embeddings),
        ("POST", "/api/embeddings", info.no_embeddings),
        ("POST", "/tokenize", info.tokenize),
        ("POST", "/detokenize", info.detokenize),
        ("GET", "/health", info.health),
        ("GET", "/metrics", info.metrics),
        ("GET", "/version", info.version),
        ("POST", "/pause", info.pause),
        ("POST", "/resume", info.resume),
        ("POST", "/reset_prefix_cache", info.reset_prefix_cache),
        ("GET", "/openapi.json", info.openapi),
    ]
    page = playground.routes() if options.playground else []
    return [*(Route(path, handler, methods=[method]) for method, path, handler in handlers), *page]


def listen(options: ServerOptions) -> socket.socket:
    """Bind the port. Call it before the model is loaded, so that a port in use is reported at once."""
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
    except OSError as error:
        address, reason = f"{options.host}:{options.port}", str(error.strerror).partition(" (")[0]
        raise UserError(f"cannot listen at `{address}` ({reason}): pass another `--host` or `--port`") from None


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
    context.metrics.close()
    return 1 if server.failed else 0


class DrainingServer(uvicorn.Server):
    """uvicorn's server that also watches the engine, and on a signal lets running requests finish.

    While it drains it still accepts connections: new requests get 503 with Retry-After, and `/health` fails.
    """

    def __init__(self, app: Starlette, context: Context) -> None:
        config = uvicorn.Config(
            app,
            http=timed_protocol(context.options.receive_seconds, KEEP_ALIVE, context.options.send_seconds),
            access_log=False,
            log_config=None,
            log_level="warning",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
            backlog=ACCEPTED_AT_ONCE,
        )
        super().__init__(config)
        self.context = context
        self.failed = False
        self._drain_until: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio takes one number for the queue of the system and for its own loop

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
