"""`GET /openapi.json`: what is accepted, made from the types that requests are read with."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from .context import context_of
from .protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
REQUESTS: dict[str, tuple[type[msgspec.Struct], str, tuple[str, ...]]] = {
    "/v1/completions": (CompletionRequest, "Go on with a text", (JSON, EVENTS)),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation", (JSON, EVENTS)),
    "/tokenize": (TokenizeRequest, "The tokens of a text or a conversation", (JSON,)),
    "/detokenize": (DetokenizeRequest, "The text of tokens", (JSON,)),
}
QUESTIONS = {
    "/v1/models": ("get", "What is served here", JSON),
    "/v1/models/{model}": ("get", "One of them", JSON),
    "/health": ("get", "Whether the engine is well", JSON),
    "/metrics": ("get", "Figures for Prometheus", TEXT),
    "/version": ("get", "The version of the server", JSON),
    "/pause": ("post", "Stop between two steps, and lose nothing", JSON),
    "/resume": ("post", "Go on", JSON),
}
REFUSALS = {
    "400": "The request is wrong: `param` names the field",
    "401": "The API key is missing or wrong",
    "404": "No such model",
    "413": "The body is too large",
    "429": "The queue is full: `Retry-After` says when to come back",
    "503": "The server is shutting down, or its engine has stopped",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


async def show(request: Request) -> Response:
    keys = bool(context_of(request).options.api_keys)
    return Response(document(keys), media_type=JSON)


@functools.cache
def document(keys: bool) -> bytes:
    kinds = [kind for kind, _, _ in REQUESTS.values()]
    references, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for (path, (_, summary, answers)), reference in zip(REQUESTS.items(), references, strict=True):
        body = {"required": True, "content": {JSON: {"schema": reference}}}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": responses(answers)}}
    for path, (method, summary, kind) in QUESTIONS.items():
        paths[path] = {method: {"summary": summary, "responses": responses((kind,))}}
    paths["/v1/models/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    told: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": ERROR}},
    }
    if keys:
        told["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        told["security"] = [{"key": []}]
    return msgspec.json.encode(told)


def responses(kinds: tuple[str, ...]) -> dict[str, Any]:
    refusal = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    told: dict[str, Any] = {"200": {"description": "The answer", "content": {kind: {} for kind in kinds}}}
    return told | {status: {"description": text, "content": refusal} for status, text in REFUSALS.items()}
