"""Requests of OpenAI's Responses API: their types, and their translation to chat requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from .errors import ApiError, as_validation_error
from .requests import (
    ChatRequest,
    Function,
    FunctionCall,
    IgnoredFields,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedTool,
    Positive,
    ReasoningFormat,
    RequestStruct,
    ResponseFormat,
    SamplingRequest,
    TextFormat,
    Tool,
    ToolCallMessage,
    ignored_fields,
)

# ---- items of `input` ----


class InputText(RequestStruct, tag_field="type", tag="input_text"):
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None  # without effect: shared prefixes are found without it


class OutputText(RequestStruct, tag_field="type", tag="output_text"):
    text: str
    # Clients send parts back as they received them, with these fields.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class Refusal(RequestStruct, tag_field="type", tag="refusal"):
    refusal: str


class ReasoningText(RequestStruct, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(RequestStruct, tag_field="type", tag="summary_text"):
    text: str


class InputMessage(RequestStruct, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(RequestStruct, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    parsed_arguments: Any = None
    namespace: None = None
    caller: Any = None
    async_: bool | None = msgspec.field(default=None, name="async")


class FunctionCallOutputItem(RequestStruct, kw_only=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: str | None = None
    name: str | None = None
    namespace: None = None
    caller: Any = None


class ReasoningItem(RequestStruct, kw_only=True):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    status: str | None = None


ITEM_KINDS: dict[str, type[RequestStruct]] = {
    "message": InputMessage,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}

# ---- the request ----


class FunctionTool(RequestStruct, tag_field="type", tag="function"):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(RequestStruct, tag_field="type", tag="function"):
    name: str


class ResponseJsonSchema(RequestStruct, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(RequestStruct):
    format: TextFormat | JsonObjectFormat | ResponseJsonSchema | None = None
    verbosity: str | None = None


class ReasoningOptions(RequestStruct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponseStreamOptions(RequestStruct):
    include_obfuscation: bool | None = None  # accepted without effect: no padding is ever added


class ResponsesRequest(SamplingRequest, kw_only=True):
    """`POST /v1/responses`"""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Positive | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_format: ReasoningFormat | None = None
    # Without effect, and named in the header `x-outrider-ignored`
    include: list[str] | None = None
    max_tool_calls: int | None = None
    # Accepted only with a value that has no effect
    truncation: Annotated[str | None, Meta(extra_json_schema={"enum": ["disabled", None]})] = None
    background: Annotated[bool | None, Meta(extra_json_schema={"enum": [False, None]})] = None
    top_logprobs: None = None  # `/v1/chat/completions` returns log-probabilities
    conversation: None = None
    prompt: None = None
    context_management: None = None
    moderation: None = None


# Fields that all requests have, and that a chat request takes over unchanged.
SHARED_FIELDS = tuple(set(SamplingRequest.__struct_fields__) - set(IgnoredFields.__struct_fields__))


def as_chat_request(request: ResponsesRequest, messages: Sequence[Message]) -> ChatRequest:
    """Translate a request; `messages` is the whole conversation without the instructions."""
    head = [Message(role="system", content=request.instructions)] if request.instructions else []
    choice = request.tool_choice
    return ChatRequest(
        messages=[*head, *messages],
        max_completion_tokens=request.max_output_tokens,
        tools=[Tool(function_of(tool)) for tool in request.tools] if request.tools else None,
        tool_choice=NamedTool(NamedFunction(choice.name)) if isinstance(choice, NamedFunctionTool) else choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=response_format(request.text),
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        chat_template_kwargs=request.chat_template_kwargs,
        enable_thinking=request.enable_thinking,
        reasoning_format=request.reasoning_format,
        **{name: getattr(request, name) for name in SHARED_FIELDS},
    )


def function_of(tool: FunctionTool) -> Function:
    return Function(tool.name, tool.description, tool.parameters, tool.strict)


def response_format(text: TextOptions | None) -> ResponseFormat | None:
    given = text.format if text is not None else None
    if isinstance(given, ResponseJsonSchema):
        return JsonSchemaFormat(JsonSchema(name=given.name or "", schema=given.schema, strict=given.strict))
    return given


def without_effect(request: ResponsesRequest) -> list[str]:
    """Return the fields that a request sets and that have no effect. Responses are stored, with their metadata."""
    names = [name for name in ignored_fields(request) if name not in ("store", "metadata", "verbosity")]
    names += [name for name in ("include", "max_tool_calls") if getattr(request, name)]
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        names.append("text.verbosity")
    for name in ("summary", "generate_summary", "context", "mode"):
        if request.reasoning is not None and getattr(request.reasoning, name) is not None:
            names.append(f"reasoning.{name}")
    return names


# ---- messages ----


def input_messages(given: str | list[dict[str, Any]]) -> list[Message]:
    """Return the messages of `input`. Calls and reasoning belong to the answer that they were part of."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    reasoning = ""  # of the answer that follows
    for item in (read_item(index, item) for index, item in enumerate(given)):
        match item:
            case ReasoningItem(content=content):
                reasoning = "".join(part.text for part in content or ())
                continue
            case FunctionCallItem():
                add_call(messages, item, reasoning)
            case FunctionCallOutputItem():
                messages.append(Message(role="tool", content=joined(item.output), tool_call_id=item.call_id))
            case InputMessage():
                message = Message(role=item.role, content=joined(item.content))
                message.reasoning_content = reasoning or None if item.role == "assistant" else None
                messages.append(message)
        reasoning = ""
    if not messages:
        raise ApiError(400, "`input` has no message: add one to the reasoning", param="input")
    return messages


def read_item(index: int, item: dict[str, Any]) -> RequestStruct:
    """Decode an item by its type; items without a type are messages."""
    kind = item.get("type", "message")
    field = f"input[{index}]"
    if not isinstance(kind, str) or kind not in ITEM_KINDS:
        known = ", ".join(f"`{name}`" for name in ITEM_KINDS)
        message = f"`{field}.type` is {kind!r}, which is not supported: use {known}"
        raise ApiError(400, message, param=f"{field}.type", code="unsupported_value")
    struct = ITEM_KINDS[kind]
    try:
        return msgspec.convert(item, struct)
    except msgspec.ValidationError as error:
        raise as_validation_error(error, struct, field) from None


def add_call(messages: list[Message], item: FunctionCallItem, reasoning: str) -> None:
    """Add a call to the answer before it, or as an answer of its own."""
    if not messages or messages[-1].role != "assistant" or reasoning:
        messages.append(Message(role="assistant", tool_calls=[], reasoning_content=reasoning or None))
    answer = messages[-1]
    call = ToolCallMessage(FunctionCall(item.name, item.arguments), item.call_id)
    answer.tool_calls = [*(answer.tool_calls or ()), call]


def joined(content: str | Iterable[InputText | OutputText | Refusal]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)
