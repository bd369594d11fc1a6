"""Request types with the type and the limits of every field; unknown fields are rejected by name.

The class names appear in the OpenAPI document.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, to_builtins
from starlette.requests import Request

from .errors import ApiError, as_validation_error


class RequestStruct(Struct, forbid_unknown_fields=True):
    """The base of all request types. Unknown fields are errors, so that a misspelled option is not ignored."""


class TextPart(RequestStruct, tag_field="type", tag="text"):
    text: str


class RefusalPart(RequestStruct, tag_field="type", tag="refusal"):
    refusal: str


Content = str | list[TextPart | RefusalPart]


class FunctionCall(RequestStruct):
    name: str
    arguments: str = ""


class ToolCallMessage(RequestStruct):
    """A call that the model made earlier in the conversation."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None  # sent back by clients that assemble a stream


class Message(RequestStruct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name of `reasoning_content`
    # Clients send responses back as they received them, with these fields.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(RequestStruct):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestStruct):
    function: Function
    type: Literal["function"] = "function"


class NamedFunction(RequestStruct):
    name: str


class NamedTool(RequestStruct):
    function: NamedFunction
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class TextFormat(RequestStruct, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(RequestStruct, tag_field="type", tag="json_object"):
    pass


class JsonSchema(RequestStruct):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(RequestStruct, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class RegexFormat(RequestStruct, tag_field="type", tag="regex"):
    regex: str = ""
    pattern: str = ""  # another name of `regex`


class GrammarFormat(RequestStruct, tag_field="type", tag="grammar"):
    grammar: str


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat


class StructuredOutputs(RequestStruct):
    """vLLM's format constraint: exactly one of these fields."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(RequestStruct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # accepted without effect: no padding is ever added


class Prediction(RequestStruct):
    content: str | list[TextPart]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


def template_message(message: Message) -> dict[str, Any]:
    """Convert a message to the form that chat templates read: content as text, no empty fields."""
    role = "system" if message.role == "developer" else message.role  # OpenAI's newer name of the system role
    converted: dict[str, Any] = {"role": role, "content": content_text(message.content)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            converted[name] = value
    if message.reasoning is not None:
        converted.setdefault("reasoning_content", message.reasoning)
    if message.tool_calls:
        converted["tool_calls"] = [
            {"id": call.id, "type": call.type, "function": to_builtins(call.function)} for call in message.tool_calls
        ]
    return converted


def content_text(content: Content | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


Body = TypeVar("Body", bound=RequestStruct)
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
TopCount = Annotated[int, Meta(ge=0, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(gt=0, le=1)]
Strings = Annotated[list[str], Meta(max_length=256)]
# `none`: <think> blocks stay in the content; else they become `reasoning_content`. The names are llama.cpp's.
ReasoningFormat = Literal["auto", "deepseek", "none"]


class IgnoredFields(RequestStruct, kw_only=True):
    """Fields of current SDKs that are accepted and have no effect; the description gives the reason.

    A response lists those that were set in its header `x-outrider-ignored`.
    """

    user: Annotated[str | None, Meta(description="names the end user: users are not distinguished here")] = None
    safety_identifier: Annotated[str | None, Meta(description="the newer name of `user`")] = None
    metadata: Annotated[dict[str, str] | None, Meta(description="labels for stored responses")] = None
    store: Annotated[bool | None, Meta(description="only `/v1/responses` stores responses")] = None
    service_tier: Annotated[str | None, Meta(description="there is only one service tier")] = None
    verbosity: Annotated[str | None, Meta(description="state the wanted length in the prompt")] = None
    prompt_cache_key: Annotated[str | None, Meta(description="shared prefixes are found without a key")] = None
    prompt_cache_retention: Annotated[str | None, Meta(description="prefixes stay until the cache is full")] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, Meta(description="the cache has no options")] = None
    spaces_between_special_tokens: Annotated[bool | None, Meta(description="no space is ever added")] = None


class SamplingRequest(IgnoredFields, kw_only=True):
    """Fields of all requests that generate text."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: Annotated[list[Count], Meta(min_length=1)] | None = None
    bad_words: Strings | None = None
    stop: str | Strings | None = None
    stop_token_ids: list[Count] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    seed: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None  # -1: random
    stream: bool | None = None
    # Speculation
    prediction: Prediction | None = None
    speculate: Annotated[str, Meta(min_length=1, max_length=64)] | bool | None = None
    speculate_width: Count | None = None
    num_speculative_tokens: Count | None = None  # vLLM's name of `speculate_width`
    always_draft: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


class GenerationRequest(SamplingRequest, kw_only=True):
    """Fields that chats and completions share."""

    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    prompt_logprobs: TopCount | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None
    trace: bool | None = None
    # Structured output
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Accepted only with a value that has no effect
    priority: Annotated[int | None, Meta(extra_json_schema={"enum": [0, None]})] = None
    use_beam_search: Annotated[bool | None, Meta(extra_json_schema={"enum": [False, None]})] = None
    length_penalty: Annotated[float | None, Meta(extra_json_schema={"enum": [1, None]})] = None
    truncate_prompt_tokens: None = None
    logits_processors: None = None
    kv_transfer_params: None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """`POST /v1/completions`"""

    prompt: str | Annotated[list[str | Count | list[Count]], Meta(min_length=1, max_length=2**20)]
    max_tokens: Count | None = None
    logprobs: TopCount | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None  # must equal `n`, because all samples are returned
    suffix: None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """`POST /v1/chat/completions`"""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Reasoning
    reasoning_effort: str | None = None  # for chat templates that read it; others ignore it
    enable_thinking: bool | None = None  # the same
    reasoning_format: ReasoningFormat | None = None
    # Accepted only with a value that has no effect
    modalities: Annotated[list[str] | None, Meta(extra_json_schema={"enum": [["text"], None]})] = None
    web_search_options: None = None
    audio: None = None
    functions: None = None
    function_call: None = None
    moderation: None = None
    chat_template: None = None
    documents: None = None
    mm_processor_kwargs: None = None


# Values without effect, of fields that are not supported otherwise, and the reason why.
NEUTRAL_VALUES: dict[str, tuple[Any, str]] = {
    "priority": (0, "requests run in the order of their arrival"),
    "use_beam_search": (False, "beam search is not available"),
    "length_penalty": (1, "beam search is not available"),
    "modalities": (["text"], "output is text only"),
    "truncation": ("disabled", "shorten the conversation, or leave it out"),
    "background": (False, "send the request, and wait for the response"),
}
# Values of ignored fields that ask for what happens anyway: no warning.
DEFAULT_VALUES: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
}


def ignored_fields(request: IgnoredFields) -> list[str]:
    """Return the fields that a request sets and that have no effect."""
    names = IgnoredFields.__struct_fields__
    values = ((name, getattr(request, name)) for name in names)
    return [name for name, value in values if value is not None and value not in DEFAULT_VALUES.get(name, ())]


class TokenizeRequest(RequestStruct, kw_only=True):
    """`POST /tokenize`"""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestStruct, kw_only=True):
    """`POST /detokenize`"""

    tokens: list[Count]
    model: str | None = None


@functools.cache
def decoder(kind: type[Body]) -> msgspec.json.Decoder[Body]:
    return msgspec.json.Decoder(kind)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Decode the body of an HTTP request; raise 400 with the name of the field that is wrong."""
    data = await request.body()
    try:
        body: Body = decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise as_validation_error(error, kind) from None
    for name, (neutral, reason) in NEUTRAL_VALUES.items():
        value = getattr(body, name, None)
        if value is not None and value != neutral and not (isinstance(neutral, tuple) and value in neutral):
            raise ApiError(400, f"`{name}` is not supported: {reason}", param=name, code="unsupported_field")
    return body
