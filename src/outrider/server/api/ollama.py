"""Ollama's API: `/api/generate`, `/api/chat`, and the endpoints that describe the model."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from ...types import Completion, Output
from ..context import Context, context_of
from ..reasoning import has_reasoning
from ..tools.parser import Delta
from .conversation import Answer, AnswerStream, Conversation, gather
from .errors import ApiError
from .generation import Generation, respond
from .ollama_requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
    as_chat_request,
    as_completion_request,
    ignored_options,
)
from .requests import ChatRequest, CompletionRequest, read_body
from .sse import EventStream
from .translate import EngineInput, check_chat, completion_inputs

API_VERSION = "0.12.6"  # the version of Ollama whose API this follows; clients compare it
JSON, LINES = "application/json", "application/x-ndjson"

encode = msgspec.json.Encoder().encode


async def generate(http_request: Request) -> Response:
    context = context_of(http_request)
    given = await read_body(http_request, OllamaGenerateRequest)
    model = check_model(context, given.model)
    if not given.prompt:
        return loaded(model, given, {"response": ""})
    tokenizer = context.llm.llm.tokenizer
    request: ChatRequest | CompletionRequest
    with OllamaGeneration.renamed_errors():
        if given.raw or tokenizer.chat_template is None:
            request = as_completion_request(given, context.llm.llm.resolved.max_context)
        else:
            request = as_chat_request(given, has_reasoning(tokenizer.chat_template))
        generation = OllamaGeneration(request, context, model, is_chat=False)
    generation.ignored += ignored_options(given.options)
    return await respond(http_request, generation)


async def chat(http_request: Request) -> Response:
    context = context_of(http_request)
    given = await read_body(http_request, OllamaChatRequest)
    model = check_model(context, given.model)
    if not given.messages:
        return loaded(model, given, {"message": {"role": "assistant", "content": ""}})
    with OllamaGeneration.renamed_errors():
        request = as_chat_request(given, has_reasoning(context.llm.llm.tokenizer.chat_template))
        generation = OllamaGeneration(request, context, model, is_chat=True)
    generation.ignored += ignored_options(given.options)
    return await respond(http_request, generation)


def check_model(context: Context, name: str | None) -> str:
    """Return the name as the client wrote it. Ollama adds the tag `latest` to names without one."""
    context.check_model(name.removesuffix(":latest") if name not in context.names and name else name)
    return name or context.names[0]


def loaded(model: str, given: OllamaChatRequest | OllamaGenerateRequest, empty: dict[str, Any]) -> Response:
    """Answer a request without a prompt, by which clients load or unload a model."""
    reason = "unload" if given.keep_alive in (0, "0") else "load"
    return json_response({"model": model, "created_at": now(), **empty, "done": True, "done_reason": reason})


class OllamaGeneration(Generation):
    """Builds the response of one request, whole or as lines of JSON."""

    field_names = (
        (r"`(max_completion_tokens|max_tokens)\b", "`options.num_predict"),
        (r"`repetition_penalty\b", "`options.repeat_penalty"),
        (r"`response_format\.json_schema\.schema\b|`response_format\b", "`format"),
        (r"`(stop|temperature|top_p|top_k|min_p|seed)\b", r"`options.\1"),
    )

    def __init__(self, request: ChatRequest | CompletionRequest, context: Context, model: str, is_chat: bool) -> None:
        super().__init__(request, context)
        self.model, self.is_chat = model, is_chat
        self.started = time.perf_counter()
        self.conversation: Conversation | None = None
        if isinstance(request, ChatRequest):
            check_chat(request)
            self.conversation = Conversation(request, context)
            self.ignored += ["think"] if self.conversation.ignored else []

    @property
    def num_sequences(self) -> int:
        return 1

    async def prepare(self) -> list[EngineInput]:
        if self.conversation is not None:
            return [await self.conversation.prepare()]
        assert isinstance(self.request, CompletionRequest) and isinstance(self.request.prompt, str)
        return await completion_inputs(self.request, [self.request.prompt], self.context)

    def parser(self) -> AnswerStream:
        return self.conversation.stream() if self.conversation is not None else AnswerStream(None, None)

    async def whole(self) -> bytes:
        await self.finish()
        [(_, _, completion)] = self.choices([0])
        answer = gather([self.parser().push(completion.text, final=True)])
        return encode(self._line(answer) | self._summary(completion))

    def stream(self) -> EventStream:
        return EventStream(self.events(), end=b"", on_error=error_line, media_type=LINES)

    async def events(self) -> AsyncGenerator[bytes, None]:
        parser, sent = None, 0
        calls: list[Delta] = []  # deltas of the calls, which are sent whole
        async with aclosing(self.outputs()) as stream:
            async for _ in stream:
                [(_, _, completion)] = self.choices([0])
                parser = parser or self.parser()
                ends = completion.finish_reason is not None
                delta = parser.push(completion.text[sent:], ends)
                sent = len(completion.text)
                lines: list[dict[str, Any]] = []
                if pieces := delta.pop("tool_calls", None):
                    calls.append({"tool_calls": pieces})
                if delta:
                    lines.append(self._line(gather([delta])) | {"done": False})
                if ends and calls:
                    lines.append(self._line(gather(calls)) | {"done": False})
                if ends:
                    lines.append(self._line(Answer("")) | self._summary(completion))
                if lines:
                    yield b"".join(encode(line) + b"\n" for line in lines)

    def _line(self, answer: Answer) -> dict[str, Any]:
        head = {"model": self.model, "created_at": now()}
        content, calls = answer.content or "", []
        for call in answer.calls:
            arguments = parsed(call.arguments)
            if arguments is None:  # cut off or invalid: show it as it is
                content += json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
            else:
                calls.append({"function": {"name": call.name, "arguments": arguments}})
        thinking = {"thinking": answer.reasoning} if answer.reasoning else {}
        if not self.is_chat:
            return {**head, "response": content, **thinking}
        message = {"role": "assistant", "content": content, **thinking}
        return {**head, "message": {**message, "tool_calls": calls} if calls else message}

    def _summary(self, completion: Completion) -> dict[str, Any]:
        """Return the last fields of a response: counts of tokens, and durations in nanoseconds."""
        output: Output = self.latest[0]
        total = time.perf_counter() - self.started
        stats = output.stats
        first = stats.first_token_seconds if stats is not None else total
        later = stats.seconds - first if stats is not None else 0.0
        return {
            "done": True,
            "done_reason": completion.finish_reason,
            "total_duration": nanoseconds(total),
            "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": nanoseconds(first),
            "eval_count": len(completion.token_ids),
            "eval_duration": nanoseconds(later),
        }


def parsed(arguments: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if they are not an object."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def error_line(error: ApiError) -> bytes:
    return encode({"error": error.message}) + b"\n"


def nanoseconds(seconds: float) -> int:
    return max(int(seconds * 1e9), 1)


def now() -> str:
    return timestamp(time.time())


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def json_response(value: Any) -> Response:
    return Response(encode(value), media_type=JSON)


# ---- descriptions of the model ----


async def tags(http_request: Request) -> Response:
    context = context_of(http_request)
    return json_response({"models": [describe(context, name) for name in served_names(context)]})


async def running(http_request: Request) -> Response:
    """Answer `/api/ps`: the served model never expires."""
    context = context_of(http_request)
    length = context.llm.llm.resolved.max_context
    more = {"size_vram": 0, "expires_at": "9999-12-31T23:59:59Z", "context_length": length}
    return json_response({"models": [describe(context, name) | more for name in served_names(context)]})


async def show(http_request: Request) -> Response:
    context = context_of(http_request)
    given = await read_body(http_request, OllamaShowRequest)
    check_model(context, given.model or given.name)
    config, tokenizer = context.llm.engine.model.config, context.llm.llm.tokenizer
    capabilities = ["completion"]
    capabilities += ["tools"] if "tools" in tokenizer.chat_names else []
    capabilities += ["thinking"] if has_reasoning(tokenizer.chat_template) else []
    architecture = config.architecture
    info = {
        "general.architecture": architecture,
        "general.parameter_count": parameter_count(context),
        f"{architecture}.context_length": context.llm.llm.resolved.max_context,
        f"{architecture}.embedding_length": config.width,
        f"{architecture}.block_count": config.layers,
        f"{architecture}.feed_forward_length": config.mlp_width,
        f"{architecture}.attention.head_count": config.heads,
        f"{architecture}.attention.head_count_kv": config.kv_heads,
        f"{architecture}.vocab_size": config.vocabulary,
    }
    body = {
        "modelfile": f"FROM {context.names[0]}\n",
        "parameters": "",
        "template": tokenizer.chat_template or "",
        "details": details(context),
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": timestamp(context.started),
    }
    return json_response(body)


async def version(http_request: Request) -> Response:
    return json_response({"version": API_VERSION, "outrider": __version__})


def served_names(context: Context) -> list[str]:
    """Return the names of the model, then those of its adapters."""
    return [*context.names, *context.llm.engine.adapters.loaded]


def describe(context: Context, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(context.started),
        "size": stored_bytes(Path(context.llm.llm.resolved.model)),
        "digest": hashlib.sha256(context.llm.llm.resolved.model.encode()).hexdigest(),
        "details": details(context),
    }


def stored_bytes(model: Path) -> int:
    """Return the bytes of the weights on disk; 0 if they are not in a file or folder."""
    files = model.glob("*.safetensors") if model.is_dir() else [model]
    return sum(file.stat().st_size for file in files if file.is_file())


def details(context: Context) -> dict[str, Any]:
    architecture = context.llm.engine.model.config.architecture
    model = context.llm.llm.resolved.model
    level = re.search(r"\b(Q\d\w*|F16|F32|BF16)\.gguf$", model, re.IGNORECASE)
    return {
        "parent_model": "",
        "format": "safetensors" if Path(model).is_dir() else "gguf",
        "family": architecture,
        "families": [architecture],
        "parameter_size": short_count(parameter_count(context)),
        "quantization_level": level[1].upper() if level else "",
    }


def parameter_count(context: Context) -> int:
    """Return the number of weights in the matrices of the model."""
    config = context.llm.engine.model.config
    attention = config.width * config.head_dim * 2 * (config.heads + config.kv_heads)
    embeddings = config.vocabulary * config.width * (1 if config.tied_head else 2)
    return embeddings + config.layers * (attention + 3 * config.width * config.mlp_width)


def short_count(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
