"""Short questions: which models, which tokens, is it well, how does it do."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from ..context import Context, context_of
from .errors import ApiError
from .requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, plain, read
from .translate import encode


def json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def describe(context: Context, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "outrider",
        "root": context.llm.llm.resolved.model,
        "max_model_len": context.llm.llm.resolved.max_context,
    }


async def list_models(request: Request) -> Response:
    context = context_of(request)
    return json({"object": "list", "data": [describe(context, name) for name in context.options.names]})


async def show_model(request: Request) -> Response:
    context = context_of(request)
    return json(describe(context, context.check_model(request.path_params["name"])))


async def tokenize(request: Request) -> Response:
    context = context_of(request)
    asked = await read(request, TokenizeRequest)
    context.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give either `prompt` or `messages`, and not both", param="prompt")
    tokenizer = context.llm.llm.tokenizer
    if asked.messages is not None:
        messages = [plain(message) for message in asked.messages]
        text = tokenizer.apply_chat(messages, asked.add_generation_prompt, variables=asked.chat_template_kwargs)
    else:
        text = asked.prompt or ""
    special = asked.add_special_tokens if asked.add_special_tokens is not None else asked.messages is None
    tokens = await encode(tokenizer, text, special)
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": context.llm.llm.resolved.max_context,
        "tokens": tokens,
    }
    if asked.return_token_strs:
        answer["token_strs"] = [tokenizer.spelling(token) or "" for token in tokens]
    return json(answer)


async def detokenize(request: Request) -> Response:
    context = context_of(request)
    asked = await read(request, DetokenizeRequest)
    context.check_model(asked.model)
    size = context.llm.engine.model.config.vocabulary
    for token in asked.tokens:
        if not 0 <= token < size:
            raise ApiError(400, f"`tokens` holds {token}: the vocabulary ends at {size - 1}", param="tokens")
    return json({"prompt": context.llm.llm.tokenizer.decode(asked.tokens, skip_special=False)})


async def health(request: Request) -> Response:
    health = context_of(request).health
    reason = health.reason
    return json({"status": "ok"}) if reason is None else json({"status": "failed", "reason": reason}, 503)


async def metrics(request: Request) -> Response:
    body, kind = context_of(request).metrics.render()
    return Response(body, headers={"content-type": kind})


async def version(request: Request) -> Response:
    return json({"version": __version__})


async def pause(request: Request) -> Response:
    await context_of(request).llm.pause()
    return json({"paused": True})


async def resume(request: Request) -> Response:
    await context_of(request).llm.resume()
    return json({"paused": False})


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


async def openapi(request: Request) -> Response:
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
