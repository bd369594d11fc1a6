"""What goes wrong, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ...async_llm import EngineStoppedError
from ...errors import UserError

UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
MISSING = re.compile(r"Object missing required field `(.*)`")
TAG = re.compile(r"Invalid value '(.*)'")
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that gets no answer: a status, and one sentence that says why."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def as_api_error(error: BaseException) -> ApiError:
    """Any failure as what the client hears of it. What is not the client's mistake tells nothing of the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        named = re.match(r"`([\w.]+)`", str(error))
        return ApiError(400, str(error), param=named[1] if named else None)
    if isinstance(error, EngineStoppedError):
        return ApiError(503, "the engine has stopped: ask another server", kind="server_error")
    if isinstance(error, HTTPException):
        kind = KINDS.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
        return ApiError(error.status_code, error.detail, kind=kind, headers=error.headers)
    return ApiError(500, "the server failed on this request: its log says how", kind="server_error")


def error_response(error: BaseException) -> Response:
    answer = as_api_error(error)
    return Response(
        msgspec.json.encode(answer.body()), answer.status, headers=answer.headers, media_type="application/json"
    )


def error_event(error: ApiError) -> bytes:
    """For a stream that has begun."""
    return b"data: " + msgspec.json.encode(error.body()) + b"\n\n"


async def on_error(request: Request, error: Exception) -> Response:
    return error_response(error)


def as_validation_error(error: Exception, known: Sequence[str]) -> ApiError:
    """What does not fit the request's type, as one sentence that names the field."""
    if not isinstance(error, msgspec.ValidationError):
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return ApiError(400, f"the body is not JSON: {said}", code="invalid_json")
    said, _, place = str(error).partition(" - at ")
    path = place.replace("`key` in ", "").strip("`").removeprefix("$").removeprefix(".")
    if found := UNKNOWN.match(said):
        return _unknown(path, found[1], known)
    if found := MISSING.match(said):
        name = f"{path}.{found[1]}" if path else found[1]
        return ApiError(400, f"`{name}` is missing: the request needs it", param=name, code="missing_field")
    if said.startswith("Expected `null`"):
        return ApiError(400, f"`{path}` is not supported: leave it out", param=path, code="unsupported_field")
    if (found := TAG.match(said)) and path.endswith(".type"):
        return ApiError(400, f"`{path}` is `{found[1]}`, which is not supported", param=path, code="unsupported_value")
    if not path:
        return ApiError(400, f"the body is no such request: {_lower(said)}", code="invalid_type")
    return ApiError(400, f"`{path}` is wrong: {_lower(said)}", param=path, code="invalid_value")


def _unknown(path: str, name: str, known: Sequence[str]) -> ApiError:
    param = f"{path}.{name}" if path else name
    close = get_close_matches(name, known, n=1) if not path else []
    hint = f"did you mean `{close[0]}`?" if close else "leave it out"
    return ApiError(400, f"`{param}` is not a field that this server knows: {hint}", param=param, code="unknown_field")


def _lower(said: str) -> str:
    return said[:1].lower() + said[1:]
