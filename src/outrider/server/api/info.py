"""Endpoints that do not generate: models, tokenize, detokenize, health, metrics, version, pause, resume, OpenAPI."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from ...tokenizer import ChatPrompt
from ..context import Context, context_of
from .adapters import LoadLoraRequest, UnloadLoraRequest
from .errors import ApiError
from .ollama_requests import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from .requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    read_body,
    template_message,
)
from .response_items import ResponsesRequest
from .translate import encode

JSON, EVENTS, LINES, TEXT = "application/json", "text/event-stream", "application/x-ndjson", "text/plain"
# path -> type of the request's body, summary, media types of the response
POST_ENDPOINTS: dict[str, tuple[type[msgspec.Struct], str, tuple[str, ...]]] = {
    "/v1/completions": (CompletionRequest, "Complete one or several prompts", (JSON, EVENTS)),
    "/v1/chat/completions": (ChatRequest, "Generate the next message of a conversation", (JSON, EVENTS)),
    "/v1/responses": (ResponsesRequest, "Generate a response in the format of OpenAI's Responses API", (JSON, EVENTS)),
    "/api/generate": (OllamaGenerateRequest, "Complete a prompt, in Ollama's format", (JSON, LINES)),
    "/api/chat": (OllamaChatRequest, "Generate the next message, in Ollama's format", (JSON, LINES)),
    "/api/show": (OllamaShowRequest, "Describe the model, in Ollama's format", (JSON,)),
    "/v1/load_lora_adapter": (LoadLoraRequest, "Load a LoRA adapter", (TEXT,)),
    "/v1/unload_lora_adapter": (UnloadLoraRequest, "Unload a LoRA adapter", (TEXT,)),
    "/tokenize": (TokenizeRequest, "Return the tokens of a text or a conversation", (JSON,)),
    "/detokenize": (DetokenizeRequest, "Return the text of tokens", (JSON,)),
}
# path -> method, summary, media type of the response
OTHER_ENDPOINTS = {
    "/v1/models": ("get", "List the served models", JSON),
    "/v1/models/{model}": ("get", "Describe one served model", JSON),
    "/v1/responses/{response_id}": ("get", "Return a stored response", JSON),
    "/api/tags": ("get", "List the served models, in Ollama's format", JSON),
    "/api/ps": ("get", "List the loaded models, in Ollama's format", JSON),
    "/api/version": ("get", "Return the version of Ollama's API", JSON),
    "/health": ("get", "Report whether the engine is working", JSON),
    "/metrics": ("get", "Return metrics in Prometheus' text format", TEXT),
    "/version": ("get", "Return the version of the server", JSON),
    "/pause": ("post", "Pause the engine between two steps; requests keep their state", JSON),
    "/resume": ("post", "Resume the engine", JSON),
    "/reset_prefix_cache": ("post", "Drop all cached prefixes; running requests recompute theirs", JSON),
}
FLAGS = {"true": True, "1": True, "false": False, "0": False}  # values of Boolean query parameters
ERROR_RESPONSES = {
    "400": "The request is invalid: `param` names the field",
    "401": "The API key is missing or wrong",
    "403": "The request comes from a web page of another site, or names a foreign host",
    "404": "The model is not served here",
    "413": "The request body is too large",
    "415": "The request body is not declared as JSON",
    "429": "The queue is full: retry after the seconds in `Retry-After`",
    "503": "The server is shutting down, or its engine has stopped",
}
ERROR_SCHEMA = {
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
OLLAMA_ERROR_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def describe_model(context: Context, name: str) -> dict[str, Any]:
    """Describe the served model, or an adapter of it, as vLLM does."""
    adapter = None if name in context.names else context.llm.engine.adapters.loaded.get(name)
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "outrider",
        "root": context.llm.llm.resolved.model if adapter is None else adapter.path,
        "parent": None if adapter is None else context.names[0],
        "max_model_len": context.llm.llm.resolved.max_context,
    }


async def list_models(http_request: Request) -> Response:
    context = context_of(http_request)
    models = [describe_model(context, name) for name in (*context.names, *context.llm.engine.adapters.loaded)]
    return json_response({"object": "list", "data": models})


async def show_model(http_request: Request) -> Response:
    context = context_of(http_request)
    return json_response(describe_model(context, context.check_model(http_request.path_params["name"])))


async def tokenize(http_request: Request) -> Response:
    context = context_of(http_request)
    request = await read_body(http_request, TokenizeRequest)
    context.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "pass either `prompt` or `messages`, but not both", param="prompt")
    tokenizer = context.llm.llm.tokenizer
    special = request.add_special_tokens if request.add_special_tokens is not None else request.messages is None
    async with context.admission.slot():  # a long text takes as much time as a short generation
        text: str | ChatPrompt = request.prompt or ""
        if request.messages is not None:
            messages = [template_message(message) for message in request.messages]
            variables = request.chat_template_kwargs
            text = tokenizer.chat_prompt(messages, request.add_generation_prompt, variables=variables)
        tokens = await encode(tokenizer, text, special)
    body: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": context.llm.llm.resolved.max_context,
        "tokens": tokens,
    }
    if request.return_token_strs:
        body["token_strs"] = [tokenizer.spelling(token) or "" for token in tokens]
    return json_response(body)


async def detokenize(http_request: Request) -> Response:
    context = context_of(http_request)
    request = await read_body(http_request, DetokenizeRequest)
    context.check_model(request.model)
    size = context.llm.engine.model.config.vocabulary
    for token in request.tokens:
        if not 0 <= token < size:
            raise ApiError(400, f"`tokens` contains {token}: the vocabulary ends at {size - 1}", param="tokens")
    decode = context.llm.llm.tokenizer.decode
    async with context.admission.slot():
        return json_response({"prompt": await asyncio.to_thread(decode, request.tokens, skip_special=False)})


async def no_embeddings(http_request: Request) -> Response:
    message = "the served model generates text and has no embedding output"
    raise ApiError(
        400, f"{message}: send this request to a server with an embedding model", code="unsupported_endpoint"
    )


async def health(http_request: Request) -> Response:
    context = context_of(http_request)
    reason = context.health.reason
    if reason is None:
        return json_response({"status": "paused" if context.llm.paused else "ok"})
    return json_response({"status": "failed", "reason": reason}, 503)


async def metrics(http_request: Request) -> Response:
    body, content_type = context_of(http_request).metrics.render()
    return Response(body, headers={"content-type": content_type})


async def version(http_request: Request) -> Response:
    return json_response({"version": __version__})


async def pause(http_request: Request) -> Response:
    llm, clear = context_of(http_request).llm, flag(http_request, "clear_cache")
    await llm.pause()
    if clear:
        await llm.clear_cache()
    return json_response({"paused": True})


async def resume(http_request: Request) -> Response:
    await context_of(http_request).llm.resume()
    return json_response({"paused": False})


async def reset_prefix_cache(http_request: Request) -> Response:
    await context_of(http_request).llm.clear_cache()
    return json_response({"reset": True})


def flag(http_request: Request, name: str) -> bool:
    """Return a Boolean query parameter; False if it is absent."""
    text = http_request.query_params.get(name, "false")
    if text.lower() not in FLAGS:
        raise ApiError(400, f"`{name}` is `{text}`: expected true or false", param=name, code="invalid_value")
    return FLAGS[text.lower()]


async def openapi(http_request: Request) -> Response:
    has_keys = bool(context_of(http_request).options.api_keys)
    return Response(openapi_document(has_keys), media_type=JSON)


@functools.cache
def openapi_document(has_keys: bool) -> bytes:
    """Build the OpenAPI document from the types that decode the requests."""
    kinds = [kind for kind, _, _ in POST_ENDPOINTS.values()]
    references, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for (path, (_, summary, media_types)), reference in zip(POST_ENDPOINTS.items(), references, strict=True):
        body = {"required": True, "content": {JSON: {"schema": reference}}}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": responses(path, media_types)}}
    for path, (method, summary, media_type) in OTHER_ENDPOINTS.items():
        paths[path] = {method: {"summary": summary, "responses": responses(path, (media_type,))}}
    for path, name in (("/v1/models/{model}", "model"), ("/v1/responses/{response_id}", "response_id")):
        paths[path]["get"]["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": ERROR_SCHEMA, "OllamaError": OLLAMA_ERROR_SCHEMA}},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return msgspec.json.encode(document)


def responses(path: str, media_types: tuple[str, ...]) -> dict[str, Any]:
    name = "OllamaError" if path.startswith("/api/") else "Error"
    error = {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    content: dict[str, Any] = {media_type: {} for media_type in media_types}
    success: dict[str, Any] = {"200": {"description": "The response", "content": content}}
    return success | {status: {"description": text, "content": error} for status, text in ERROR_RESPONSES.items()}
