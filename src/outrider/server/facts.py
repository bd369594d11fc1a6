"""Short questions: which models, which tokens, is it well, how does it do."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from .context import Context, context_of
from .errors import ApiError
from .messages import plain
from .protocol import DetokenizeRequest, TokenizeRequest, read
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
