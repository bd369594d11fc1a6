"""Errors in OpenAI's format, {"error": {"message", "type", "param", "code"}}, or Ollama's, {"error": message}."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import msgspec
from msgspec import inspect
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ...async_llm import EngineStoppedError
from ...errors import ContextLengthError, UserError

UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`")
MISSING_FIELD = re.compile(r"Object missing required field `(.*)`")
INVALID_VALUE = re.compile(r"Invalid (?:enum )?value '?(.*?)'?$")
NOTHING_ACCEPTED = ("Expected `null`", "Expected `array` of length <= 0")
STEP = re.compile(r"\w+|\[")  # of a path such as `.messages[0].role`: a field, or an index after its bracket
CLIENT_DISCONNECTED = 499  # nginx's status, for the log only
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error response: a status, and one sentence that gives the reason."""

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
    """Convert any exception to the error that the client gets; internal errors reveal no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        field = re.match(r"`([\w.]+)`", str(error))
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return ApiError(400, str(error), param=field[1] if field else None, code=code)
    if isinstance(error, EngineStoppedError):
        return ApiError(503, "the engine has stopped: send the request to another server", kind="server_error")
    if isinstance(error, HTTPException):
        kind = ERROR_TYPES.get(
            error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error"
        )
        return ApiError(error.status_code, error.detail, kind=kind, headers=error.headers)
    return ApiError(500, "the server failed on this request: see its log for the reason", kind="server_error")


def error_response(error: BaseException, path: str = "") -> Response:
    """Return an error in the format of the API that `path` belongs to: OpenAI's, or Ollama's below `/api`."""
    api_error = as_api_error(error)
    body = msgspec.json.encode({"error": api_error.message} if path.startswith("/api/") else api_error.body())
    return Response(body, api_error.status, headers=api_error.headers, media_type="application/json")


def error_event(error: ApiError) -> bytes:
    """Encode an error as an event, for a stream that has begun."""
    return b"data: " + msgspec.json.encode(error.body()) + b"\n\n"


async def on_error(request: Request, error: Exception) -> Response:
    path = request.url.path
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        absent = f"`{path}`" if error.status_code == 404 else f"`{request.method}` of `{path}`"
        error.detail = f"{absent} does not exist here: `GET /openapi.json` lists all paths"
    return error_response(error, path)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Return a response for the log alone: the client hung up before its request was complete."""
    return Response(status_code=CLIENT_DISCONNECTED)


def as_validation_error(error: Exception, kind: type[msgspec.Struct], parent: str = "") -> ApiError:
    """Convert a decoding error of msgspec to a sentence that names the field.

    kind: the type that was expected. parent: the field that was decoded.
    """
    if not isinstance(error, msgspec.ValidationError):
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    reason, _, location = str(error).partition(" - at ")
    path = location.replace("`key` in ", "").strip("`").removeprefix("$")
    accepted = accepted_values(inspect.type_info(kind), STEP.findall(path))
    path = f"{parent}{path}".removeprefix(".")
    if match := UNKNOWN_FIELD.match(reason):
        return _unknown_field(path, match[1], kind.__struct_fields__)
    if match := MISSING_FIELD.match(reason):
        name = f"{path}.{match[1]}" if path else match[1]
        return ApiError(400, f"`{name}` is missing: this field is required", param=name, code="missing_field")
    match = INVALID_VALUE.match(reason)
    if reason in NOTHING_ACCEPTED or (match and not any(accepted)):
        return ApiError(400, f"`{path}` is not supported: remove it", param=path, code="unsupported_field")
    if match:
        known = " or ".join(f"`{value}`" for value in accepted)
        message = f"`{path}` is `{match[1]}`, which is not supported: use {known}"
        return ApiError(400, message, param=path, code="unsupported_value")
    if not path:
        return ApiError(400, f"the body is not a valid request: {_lower(reason)}", code="invalid_type")
    return ApiError(400, f"`{path}` is invalid: {_lower(reason)}", param=path, code="invalid_value")


def accepted_values(kind: inspect.Type, path: Sequence[str]) -> list[object]:
    """Return the values that the type lists for the field at a path, such as the roles of a message."""
    match kind:
        case inspect.Metadata(type=inner):
            return accepted_values(inner, path)
        case inspect.UnionType(types=types):
            return [value for member in types for value in accepted_values(member, path)]
        case inspect.LiteralType(values=values) if not path:
            return list(values)
        case inspect.ListType(item_type=item) if path[:1] == ["["]:
            return accepted_values(item, path[2:])
        case inspect.StructType(tag_field=name, tag=tag) if path[:1] == [name]:
            return [tag]
        case inspect.StructType(fields=fields):
            return [v for f in fields if path[:1] == [f.encode_name] for v in accepted_values(f.type, path[1:])]
    return []


def _unknown_field(path: str, name: str, known_fields: Sequence[str]) -> ApiError:
    param = f"{path}.{name}" if path else name
    close = get_close_matches(name, known_fields, n=1) if not path else []
    hint = f"did you mean `{close[0]}`?" if close else "remove it"
    return ApiError(400, f"`{param}` is not a known field: {hint}", param=param, code="unknown_field")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
