"""Requests of Ollama's API: their types, and their translation to chat and completion requests."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from msgspec import Meta

from .errors import ApiError
from .requests import (
    ChatRequest,
    CompletionRequest,
    FunctionCall,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    Penalty,
    Probability,
    RequestStruct,
    ResponseFormat,
    Strings,
    Tool,
    ToolCallMessage,
)

# Ollama's defaults, for models whose file sets none.
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}


class OllamaOptions(RequestStruct, kw_only=True):
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, lt=2**31)] | None = None  # -1 and -2: the rest of the context
    stop: str | Strings | None = None
    seed: Annotated[int, Meta(ge=-(2**31), le=2**63 - 1)] | None = None  # negative: random
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Without effect, and named in the header `x-outrider-ignored`: the server's own options decide.
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    repeat_last_n: int | None = None  # `repeat_penalty` counts prompt and answer
    penalize_newline: bool | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    # Accepted only with a value that has no effect
    mirostat: Literal[0] | None = None
    typical_p: float | None = None
    tfs_z: float | None = None


IGNORED_OPTIONS = OllamaOptions.__struct_fields__[
    OllamaOptions.__struct_fields__.index("num_ctx") : OllamaOptions.__struct_fields__.index("mirostat")
]
# Options that a request has under another name, or the same.
OPTION_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


class OllamaFields(RequestStruct, kw_only=True):
    """Fields that generations and chats share."""

    model: str | None = None
    stream: bool | None = None  # default: true
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: str | float | None = None  # accepted: the model stays loaded as long as the server runs
    speculate: Annotated[str, Meta(min_length=1, max_length=64)] | bool | None = None
    speculate_width: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    # Accepted only with a value that has no effect
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None


class OllamaFunctionCall(RequestStruct):
    name: str
    arguments: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it
    index: int | None = None
    description: str | None = None


class OllamaToolCall(RequestStruct):
    function: OllamaFunctionCall
    id: str | None = None
    type: str | None = None


class OllamaMessage(RequestStruct, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[list[str], Meta(max_length=0)] | None = None


class OllamaChatRequest(OllamaFields, kw_only=True):
    """`POST /api/chat`"""

    messages: list[OllamaMessage] = []  # noqa: RUF012 - msgspec copies it
    tools: list[Tool] | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """`POST /api/generate`"""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None  # true: the prompt goes to the model as it is, without the chat template
    images: Annotated[list[str], Meta(max_length=0)] | None = None
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    context: Annotated[list[int], Meta(max_length=0)] | None = None  # `/api/chat` keeps conversations


class OllamaShowRequest(RequestStruct, kw_only=True):
    """`POST /api/show`"""

    model: str | None = None
    name: str | None = None  # the older name of `model`
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


def check_options(options: OllamaOptions | None) -> None:
    for name in ("typical_p", "tfs_z"):
        if options is not None and getattr(options, name) not in (None, 1):
            message = f"`options.{name}` is not supported: remove it, or use `top_p` or `min_p`"
            raise ApiError(400, message, param=f"options.{name}", code="unsupported_field")


def ignored_options(options: OllamaOptions | None) -> list[str]:
    """Return the options that a request sets and that have no effect."""
    if options is None:
        return []
    return [f"options.{name}" for name in IGNORED_OPTIONS if getattr(options, name) is not None]


def as_chat_request(given: OllamaChatRequest | OllamaGenerateRequest, thinks: bool) -> ChatRequest:
    """Translate a request that uses the chat template. thinks: whether that template has reasoning blocks."""
    if given.think and not thinks:
        raise ApiError(400, "`think` is set, but this model does not support thinking: remove it", param="think")
    if isinstance(given, OllamaChatRequest):
        messages, tools = [as_message(message) for message in given.messages], given.tools
    else:
        head = [Message(role="system", content=given.system)] if given.system else []
        messages, tools = [*head, Message(role="user", content=given.prompt)], None
    return ChatRequest(
        messages=messages,
        tools=tools or None,
        max_completion_tokens=max_tokens(given.options),
        reasoning_effort=given.think if isinstance(given.think, str) else None,
        enable_thinking=bool(given.think) if thinks and given.think is not None else None,
        **shared_fields(given),
    )


def as_completion_request(given: OllamaGenerateRequest, context: int) -> CompletionRequest:
    """Translate a request without the chat template. context: the context length."""
    limit = max_tokens(given.options)
    return CompletionRequest(prompt=given.prompt, max_tokens=limit or context, **shared_fields(given))


def shared_fields(given: OllamaFields) -> dict[str, Any]:
    options = given.options or OllamaOptions()
    check_options(given.options)
    found = {new: getattr(options, old) for old, new in OPTION_NAMES.items()}
    fields = {**DEFAULTS, **{name: value for name, value in found.items() if value is not None}}
    fields["seed"] = -1 if options.seed is not None and options.seed < 0 else options.seed
    fields |= {"speculate": given.speculate, "speculate_width": given.speculate_width}
    return fields | {"stream": given.stream is not False, "response_format": response_format(given.format)}


def max_tokens(options: OllamaOptions | None) -> int | None:
    limit = options.num_predict if options is not None else None
    return None if limit is None or limit < 0 else max(limit, 1)


def response_format(given: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not given:
        return None
    if given == "json":
        return JsonObjectFormat()
    assert isinstance(given, dict)
    return JsonSchemaFormat(JsonSchema(name="", schema=given))


def as_message(message: OllamaMessage) -> Message:
    calls = [
        ToolCallMessage(FunctionCall(call.function.name, json.dumps(call.function.arguments)), call.id)
        for call in message.tool_calls or ()
    ]
    return Message(
        role=message.role,
        content=message.content,
        name=message.name or message.tool_name,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.thinking,
    )
