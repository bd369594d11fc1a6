"""What clients put inside their requests: messages, tools, formats. As OpenAI names them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins


class Part(Struct, forbid_unknown_fields=True):
    """The base of all that clients send: a field that nobody reads is an error."""


class TextPart(Part, tag_field="type", tag="text"):
    text: str


class RefusalPart(Part, tag_field="type", tag="refusal"):
    refusal: str


Content = str | list[TextPart | RefusalPart]


class FunctionCall(Part):
    name: str
    arguments: str = ""


class ToolCallMessage(Part):
    """A call that the model made earlier in the conversation."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None  # clients that gather a stream send it back


class Message(Part, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name for it
    # Clients send answers back as they got them, with these in them.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(Part):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    function: Function
    type: Literal["function"] = "function"


class NamedFunction(Part):
    name: str


class NamedTool(Part):
    function: NamedFunction
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class TextFormat(Part, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Part, tag_field="type", tag="json_object"):
    pass


class JsonSchema(Part):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Part, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class RegexFormat(Part, tag_field="type", tag="regex"):
    regex: str = ""
    pattern: str = ""  # another name of the same


class GrammarFormat(Part, tag_field="type", tag="grammar"):
    grammar: str


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat


class StructuredOutputs(Part):
    """vLLM's spelling: one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers: there is none to leave out


class Prediction(Part):
    content: str | list[TextPart]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


def plain(message: Message) -> dict[str, Any]:
    """The message as chat templates read it: text for content, and only what is there."""
    role = "system" if message.role == "developer" else message.role  # the newer name of the same thing
    told: dict[str, Any] = {"role": role, "content": text_of(message.content)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            told[name] = value
    if message.reasoning is not None:
        told.setdefault("reasoning_content", message.reasoning)
    if message.tool_calls:
        told["tool_calls"] = [
            {"id": call.id, "type": call.type, "function": to_builtins(call.function)} for call in message.tool_calls
        ]
    return told


def text_of(content: Content | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
