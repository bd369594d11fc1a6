"""The playground at `/`: a page that chats with the model and shows its drafts. Static files and one JSON endpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from ..speculation import available, drafts_from, find
from ..speculation.manager import SpeculationManager
from ..speculation.registry import has_model
from .context import context_of

FOLDER = Path(__file__).parent / "page"
SHARED = Path(__file__).parent.parent / "pages.css"  # also used by the page of `outrider trace`
# Fixed here: the operating system's table may map .js to another type, and browsers then refuse to run it.
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # revalidate every time: the ETag makes that cheap
}


class Page(StaticFiles):
    """The static files, each with its MIME type and a policy that forbids loading anything from other hosts."""

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
    """Return the routes of the page: `/`, the files under `/page`, and `/playground/info`."""
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
    """Describe the model and the drafting methods that a request may name. Needs the API key."""
    context = context_of(request)
    context.admission.check_key(request.headers)
    engine = context.llm.engine
    return JSONResponse(
        {
            "model": context.names[0],
            "context": engine.resolved.max_context,
            "max_tokens": context.options.max_tokens,
            "method": engine.spec_manager.plan.method or "none",
            "verification": engine.spec_manager.plan.verification,
            "adaptive": engine.spec_manager.plan.adaptive,
            "methods": drafting_methods(engine.spec_manager),
            "speculation": speculation_stats(engine.spec_manager),
        }
    )


def speculation_stats(spec_manager: SpeculationManager) -> dict[str, Any]:
    """Return the stats of finished requests by method; `suspension` says in numbers why drafts did not pay."""
    return {
        name: {
            "steps": spec_stats.steps,
            "drafted": spec_stats.drafted,
            "accepted": spec_stats.accepted,
            "mean_acceptance_length": spec_stats.mean_acceptance_length,
            "tokens_per_step": spec_stats.tokens_per_step,
            "suspended": spec_stats.suspended,
            "suspension": spec_stats.suspension.as_json() if spec_stats.suspension else None,
        }
        for name, spec_stats in dict(spec_manager.method_stats).items()
    }


def drafting_methods(spec_manager: SpeculationManager) -> list[Mapping[str, Any]]:
    """List the methods that a request may name: the engine's own, then open ones, then those without a model."""
    default = spec_manager.plan.method
    # A copy, because the engine's thread may open further methods meanwhile.
    opened = dict(spec_manager.methods)
    names = [default] if default else []
    from_text = [name for name in available() if not has_model(name)]
    names += [name for name in [*opened, *from_text] if not drafts_from(name)]
    listed: list[Mapping[str, Any]] = []
    for name in dict.fromkeys(names):
        if name in opened:
            needs = opened[name].needs
            listed.append({"name": name, "width": needs.width, "trees": needs.trees})
        else:
            listed.append({"name": name, "width": find(name).Options().width, "trees": False})
    return listed
