"""One line a request: who asked what, how it ended, what it cost. Never what was said."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..types import Output, SpecStats
from .api.errors import error_response

log = logging.getLogger("outrider.server.requests")

# What may stand in a header and in a line of a log without pretending to be something else.
HARMLESS = re.compile(r"[\w.:/+=@-]{1,128}")
QUIET = frozenset({"/health", "/metrics"})  # asked for every few seconds: only their failures are worth a line


@dataclass
class Entry:
    """What is known of a request in the end. It may have asked the engine for several outputs."""

    request_id: str
    method: str
    path: str
    started: float = field(default_factory=time.perf_counter)
    status: int = 0  # none was sent
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_seconds: float | None = None
    reasons: list[str] = field(default_factory=list)
    speculation: SpecStats = field(default_factory=SpecStats)

    def answered(self, output: Output | None, reason: str, tokens: int, first: float | None) -> None:
        """The engine is done with one output of this request."""
        self.reasons.append(reason)
        self.output_tokens += tokens
        if first is not None:
            self.first_token_seconds = min(first, self.first_token_seconds or first)
        if output is not None:
            self.prompt_tokens += len(output.prompt_token_ids)
            if output.stats is not None:
                self.speculation.add(output.stats.speculation)

    def facts(self) -> dict[str, Any]:
        spec_stats = self.speculation
        found: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(time.perf_counter() - self.started, 4),
        }
        if self.reasons:
            found |= {"finish_reason": "+".join(dict.fromkeys(self.reasons))}
            found |= {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        if self.first_token_seconds is not None:
            found["first_token_seconds"] = round(self.first_token_seconds, 4)
        if spec_stats.drafted:
            found |= {"drafted": spec_stats.drafted, "accepted": spec_stats.accepted}
            found["acceptance_length"] = round(spec_stats.mean_length, 3)
        return found

    def sentence(self) -> str:
        facts = self.facts()
        named = [f"{name}={facts[name]}" for name in facts if name not in ("method", "path", "status", "request_id")]
        return " ".join([self.method, self.path, str(self.status or "-"), *named, f"id={self.request_id}"])


current: ContextVar[Entry | None] = ContextVar("outrider_request", default=None)


class RequestLog:
    """ASGI middleware: every request has an id, which goes back in its answer; and a line in the log, if asked."""

    def __init__(self, app: ASGIApp, lines: bool = True, as_json: bool = False) -> None:
        self.app, self.lines, self.as_json = app, lines, as_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        entry = Entry(request_id(Headers(scope=scope)), scope["method"], scope["path"])
        scope.setdefault("state", {})["request_id"] = entry.request_id

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = entry.request_id
            await send(message)

        token = current.set(entry)
        try:
            await self.app(scope, receive, labelled)
        except Exception as error:
            log.exception("request `%s` failed", entry.request_id)
            if entry.status:
                raise  # the answer has begun: all that is left is to hang up
            await error_response(error)(scope, receive, labelled)
        finally:
            current.reset(token)
            if self.lines and not (entry.path in QUIET and entry.status == 200):
                self._write(entry)

    def _write(self, entry: Entry) -> None:
        level = logging.WARNING if entry.status >= 500 else logging.INFO
        log.log(level, json.dumps(entry.facts()) if self.as_json else entry.sentence())


def request_id(headers: Headers) -> str:
    """The client's own, if it is one; a new one otherwise."""
    given = headers.get("x-request-id", "")
    return given if HARMLESS.fullmatch(given) else uuid.uuid4().hex


def configure(level: int = logging.INFO) -> None:
    """Lines of this package on standard error, each by itself; whoever set up logging before is left alone."""
    root = logging.getLogger("outrider")
    if root.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(Plain("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False


class Plain(logging.Formatter):
    """A line that is JSON stays JSON, whole and alone."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == log.name and isinstance(record.msg, str) and record.msg.startswith("{"):
            return record.getMessage()
        return super().format(record)
