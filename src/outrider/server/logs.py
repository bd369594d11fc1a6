"""The request log: one line per request with its status, duration and token counts, never with its texts."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..types import Output, SpecStats
from . import tracing
from .api.errors import error_response

log = logging.getLogger("outrider.server.requests")

# Request ids that are safe to repeat in a header and in a log line.
SAFE_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
PATH_CHARACTERS = "/:@!$&'()*+,;=~"  # that a URL's path may contain besides letters, digits and `-._`
QUIET_PATHS = frozenset({"/health", "/metrics"})  # polled every few seconds: only their failures are logged


@dataclass
class RequestRecord:
    """The facts that the log line of one HTTP request states. A request may produce several engine outputs."""

    request_id: str
    method: str
    path: str
    started: float = field(default_factory=time.perf_counter)
    status: int = 0  # 0: no response was sent
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_seconds: float | None = None
    reasons: list[str] = field(default_factory=list)
    speculation: SpecStats = field(default_factory=SpecStats)
    trace_headers: dict[str, str] = field(default_factory=dict)

    def add_output(
        self, output: Output | None, reason: str, prompt_tokens: int, tokens: int, first: float | None
    ) -> None:
        """Add one finished output of the engine; None if the client disconnected before it was complete."""
        self.reasons.append(reason)
        self.prompt_tokens += prompt_tokens
        self.output_tokens += tokens
        if first is not None:
            self.first_token_seconds = min(first, self.first_token_seconds or first)
        if output is not None and output.stats is not None:
            self.speculation.add(output.stats.speculation)

    def as_json(self) -> dict[str, Any]:
        spec_stats = self.speculation
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(time.perf_counter() - self.started, 4),
        }
        if self.reasons:
            fields |= {"finish_reason": "+".join(dict.fromkeys(self.reasons))}
            fields |= {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        if self.first_token_seconds is not None:
            fields["first_token_seconds"] = round(self.first_token_seconds, 4)
        if spec_stats.drafted:
            fields |= {"drafted": spec_stats.drafted, "accepted": spec_stats.accepted}
            fields["acceptance_length"] = round(spec_stats.mean_acceptance_length, 3)
            fields["tokens_per_step"] = round(spec_stats.tokens_per_step, 3)
        if spec_stats.suspended:
            fields["suspended_steps"] = spec_stats.suspended
        return fields

    def as_text(self) -> str:
        fields = self.as_json()
        pairs = [f"{name}={fields[name]}" for name in fields if name not in ("method", "path", "status", "request_id")]
        # Quoted as in a URL, so that no path can contain a line or a field of its own.
        path = quote(self.path, safe=PATH_CHARACTERS)
        return " ".join([self.method, path, str(self.status or "-"), *pairs, f"id={self.request_id}"])


current: ContextVar[RequestRecord | None] = ContextVar("outrider_request", default=None)


class RequestLog:
    """ASGI middleware: returns a request id with every response, and logs a line per request if `lines` is set."""

    def __init__(self, app: ASGIApp, lines: bool = True, as_json: bool = False) -> None:
        self.app, self.lines, self.as_json = app, lines, as_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord(request_id(headers), scope["method"], scope["path"])
        record.trace_headers = {name: headers[name] for name in tracing.HEADERS if name in headers}
        scope.setdefault("state", {})["request_id"] = record.request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = record.request_id
            await send(message)

        token = current.set(record)
        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            log.exception("request `%s` failed", record.request_id)
            if record.status:
                raise  # the response has begun: the connection can only be closed
            await error_response(error, record.path)(scope, receive, send_with_id)
        finally:
            current.reset(token)
            if self.lines and not (record.path in QUIET_PATHS and record.status == 200):
                self._write(record)

    def _write(self, record: RequestRecord) -> None:
        level = logging.WARNING if record.status >= 500 else logging.INFO
        log.log(level, json.dumps(record.as_json()) if self.as_json else record.as_text())


def request_id(headers: Headers) -> str:
    """Return the client's X-Request-Id if it is safe to repeat, else a new id."""
    received = headers.get("x-request-id", "")
    return received if SAFE_ID.fullmatch(received) else uuid.uuid4().hex


def configure(level: int = logging.INFO) -> None:
    """Log this package to standard error, unless the process has configured logging already."""
    root = logging.getLogger("outrider")
    if root.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False


class LineFormatter(logging.Formatter):
    """Formats log lines; the JSON lines of the request log get no prefix, so that each line is valid JSON."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == log.name and isinstance(record.msg, str) and record.msg.startswith("{"):
            return record.getMessage()
        return super().format(record)
