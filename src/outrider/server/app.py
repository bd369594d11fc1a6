"""The server as an ASGI application: routes and middleware."""

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
from .admission import Admission, AdmissionMiddleware
from .api import chat, completions, info
from .api.errors import ApiError, on_error
from .context import Context, Health, TokenTexts
from .logs import RequestLog
from .metrics import Metrics
from .options import ServerOptions

Handler = Callable[[Request], Awaitable[Response]]


def build_app(llm: AsyncLLM, options: ServerOptions) -> Starlette:
    """Build the application without a socket; uvicorn, Ray Serve or a test runs it."""
    options = replace(options, names=options.names or (llm.llm.resolved.model,))
    admission = Admission(options, llm)
    app = Starlette(
        routes=routes(options),
        middleware=[
            Middleware(RequestLog, lines=options.log_requests, as_json=options.log_json),
            Middleware(AdmissionMiddleware, admission=admission),
        ],
        exception_handlers=dict.fromkeys((ApiError, UserError, HTTPException), on_error),
    )
    app.state.context = Context(
        llm=llm,
        options=options,
        admission=admission,
        metrics=Metrics(llm, options.names[0], admission),
        health=Health(llm),
        texts=TokenTexts(llm.llm.tokenizer),
        started=int(time.time()),
    )
    return app


def routes(options: ServerOptions) -> list[BaseRoute]:
    """Return all routes; AdmissionMiddleware decides which of them need an API key."""
    handlers: list[tuple[str, str, Handler]] = [
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
    return [*(Route(path, handler, methods=[method]) for method, path, handler in handlers), *page]
