"""The playground at `/`: a page to chat with the model and to watch it draft. Plain files, and one list of facts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from ..speculation import available, drafts_from, find
from ..speculation.manager import SpeculationManager
from .context import context_of

FOLDER = Path(__file__).parent / "page"
SHARED = Path(__file__).parent.parent / "pages.css"  # with a trace's page
# Fixed here: what the operating system calls a script differs, and browsers run none that is called wrongly.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # ask each time; the ETag makes the answer short
}


class Page(StaticFiles):
    """The files of the page, each called by its right type and forbidden to fetch anything from elsewhere."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Any,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        if response.status_code == 200:
            response.headers["content-type"] = TYPES[Path(full_path).suffix]
        response.headers.update(HEADERS)
        return response


def routes() -> list[BaseRoute]:
    """`/`, the files under `/page`, and what the page must know about the engine."""
    page = Page(directory=FOLDER)

    async def home(request: Request) -> Response:
        return await page.get_response("index.html", request.scope)

    async def shared(request: Request) -> Response:
        return page.file_response(SHARED, SHARED.stat(), request.scope)

    return [
        Route("/", home, methods=["GET"]),
        Route("/page/pages.css", shared, methods=["GET"]),
        Route("/playground/info", info, methods=["GET"]),
        Mount("/page", page),
    ]


async def info(request: Request) -> Response:
    """The model, and the methods that a request may name. Whoever may not ask the model may not ask this either."""
    context = context_of(request)
    context.guard.check_key(request.headers)
    engine = context.llm.engine
    return JSONResponse(
        {
            "model": context.names[0],
            "context": engine.resolved.max_context,
            "method": engine.spec_manager.plan.method or "none",
            "verification": engine.spec_manager.plan.verification,
            "methods": choices(engine.spec_manager),
        }
    )


def choices(spec_manager: SpeculationManager) -> list[Mapping[str, Any]]:
    """Whom a request may ask to draft: the engine's own method first, then what is open, then what needs no model."""
    own = spec_manager.plan.method
    # A copy: the engine's thread opens methods while we look.
    opened = dict(spec_manager.methods)
    names = [own] if own else []
    names += [name for name in [*opened, *filter(is_free, available())] if not drafts_from(name)]
    listed: list[Mapping[str, Any]] = []
    for name in dict.fromkeys(names):
        if name in opened:
            needs = opened[name].needs
            listed.append({"name": name, "width": needs.width, "trees": needs.trees})
        else:
            listed.append({"name": name, "width": find(name).Options().width, "trees": False})
    return listed


def is_free(name: str) -> bool:
    """Whether a method needs nothing but the text."""
    return all(field.name != "model" for field in fields(find(name).Options))
