"""The server as an ASGI application: who answers what."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ..async_llm import AsyncLLM
from ..errors import UserError
from . import playground
from .admission import Gate, Guard
from .api import chat, completions, info
from .api.errors import ApiError, on_error
from .context import Context as Context
from .context import Health, Texts
from .logs import RequestLog
from .metrics import Metrics
from .options import ServerOptions

Handler = Callable[[Request], Awaitable[Response]]


def build_app(llm: AsyncLLM, options: ServerOptions) -> Starlette:
    """Everything but the sockets: uvicorn, Ray Serve or a test drives it."""
    options = replace(options, names=options.names or (llm.llm.resolved.model,))
    guard = Guard(options, llm)
    app = Starlette(
        routes=routes(options),
        middleware=[
            Middleware(RequestLog, lines=options.log_requests, as_json=options.log_json),
            Middleware(Gate, guard=guard),
        ],
        exception_handlers=dict.fromkeys((ApiError, UserError, HTTPException), on_error),
    )
    app.state.context = Context(
        llm=llm,
        options=options,
        guard=guard,
        metrics=Metrics(llm, options.names[0], guard),
        health=Health(llm),
        texts=Texts(llm.llm.tokenizer),
        started=int(time.time()),
    )
    return app


def routes(options: ServerOptions) -> list[BaseRoute]:
    """Who may ask them is the gate's to say."""
    answers: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/completions", completions.create),
        ("POST", "/v1/chat/completions", chat.create),
        ("GET", "/v1/models", info.list_models),
        ("GET", "/v1/models/{name:path}", info.show_model),
        ("POST", "/tokenize", info.tokenize),
        ("POST", "/detokenize", info.detokenize),
        ("GET", "/health", info.health),
        ("GET", "/metrics", info.metrics),
        ("GET", "/version", info.version),
        ("POST", "/pause", info.pause),
        ("POST", "/resume", info.resume),
        ("GET", "/openapi.json", info.openapi),
    ]
    page = playground.routes() if options.playground else []
    return [*(Route(path, handler, methods=[method]) for method, path, handler in answers), *page]
