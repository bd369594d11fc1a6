"""What clients may ask: every field with its type and its limits. What is not here is refused by name."""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, to_builtins
from starlette.requests import Request

from .errors import ApiError, as_validation_error


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


Asked = TypeVar("Asked", bound=Part)
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
Likeliest = Annotated[int, Meta(ge=0, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(gt=0, le=1)]
Texts = Annotated[list[str], Meta(max_length=256)]


class Neutral(Part, kw_only=True):
    """Fields that change nothing here and are sent all the same, each with the reason."""

    user: Annotated[str | None, Meta(description="names the end user to a provider: nobody is told apart here")] = None
    safety_identifier: Annotated[str | None, Meta(description="the newer name of `user`")] = None
    metadata: Annotated[dict[str, str] | None, Meta(description="labels for stored answers: none is stored")] = None
    prompt_cache_key: Annotated[str | None, Meta(description="shared prefixes are found without a key")] = None
    prompt_cache_retention: Annotated[str | None, Meta(description="prefixes stay as long as there is room")] = None
    spaces_between_special_tokens: Annotated[bool | None, Meta(description="no space is ever added")] = None


class Sampling(Neutral, kw_only=True):
    """What both kinds of completion have in common."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: Annotated[list[Count], Meta(min_length=1)] | None = None
    bad_words: Texts | None = None
    stop: str | Texts | None = None
    stop_token_ids: list[Count] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    seed: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None  # -1: any
    prompt_logprobs: Likeliest | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Speculation
    prediction: Prediction | None = None
    speculate: Annotated[str, Meta(min_length=1, max_length=64)] | bool | None = None
    speculate_width: Count | None = None
    num_speculative_tokens: Count | None = None  # the same under vLLM's name
    trace: bool | None = None
    # Formats
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Known, and only with the value that asks for nothing
    priority: Annotated[int | None, Meta(extra_json_schema={"enum": [0, None]})] = None
    use_beam_search: Annotated[bool | None, Meta(extra_json_schema={"enum": [False, None]})] = None
    length_penalty: Annotated[float | None, Meta(extra_json_schema={"enum": [1, None]})] = None
    truncate_prompt_tokens: None = None
    logits_processors: None = None
    kv_transfer_params: None = None
    cache_salt: None = None


class CompletionRequest(Sampling, kw_only=True):
    """`POST /v1/completions`"""

    prompt: str | Annotated[list[str | Count | list[Count]], Meta(min_length=1, max_length=2**20)]
    max_tokens: Count | None = None
    logprobs: Likeliest | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None  # as many as `n`: all are returned
    suffix: None = None


class ChatRequest(Sampling, kw_only=True):
    """`POST /v1/chat/completions`"""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Known, and only with the value that asks for nothing
    store: Annotated[bool | None, Meta(extra_json_schema={"enum": [False, None]})] = None
    service_tier: Annotated[str | None, Meta(extra_json_schema={"enum": ["auto", "default", None]})] = None
    verbosity: Annotated[str | None, Meta(extra_json_schema={"enum": ["medium", None]})] = None
    modalities: Annotated[list[str] | None, Meta(extra_json_schema={"enum": [["text"], None]})] = None
    reasoning_effort: None = None
    web_search_options: None = None
    audio: None = None
    functions: None = None
    function_call: None = None
    moderation: None = None
    chat_template: None = None
    documents: None = None
    mm_processor_kwargs: None = None


# Values that ask for nothing, of fields that could ask for something; the others are refused.
NEUTRAL: dict[str, tuple[Any, str]] = {
    "priority": (0, "requests are served in the order in which they come"),
    "use_beam_search": (False, "there is no beam search"),
    "length_penalty": (1, "there is no beam search"),
    "store": (False, "nothing is stored"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "verbosity": ("medium", "say in the prompt how long the answer should be"),
    "modalities": (["text"], "answers are text"),
}


class TokenizeRequest(Part, kw_only=True):
    """`POST /tokenize`"""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Part, kw_only=True):
    """`POST /detokenize`"""

    tokens: list[Count]
    model: str | None = None


@functools.cache
def decoder(kind: type[Asked]) -> msgspec.json.Decoder[Asked]:
    return msgspec.json.Decoder(kind)


async def read(request: Request, kind: type[Asked]) -> Asked:
    """The body as a request, or a refusal that names the field."""
    body = await request.body()
    try:
        asked: Asked = decoder(kind).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise as_validation_error(error, kind.__struct_fields__) from None
    for name, (value, reason) in NEUTRAL.items():
        given = getattr(asked, name, None)
        if given is not None and given != value and not (isinstance(value, tuple) and given in value):
            raise ApiError(400, f"`{name}` is not supported: {reason}", param=name, code="unsupported_field")
    return asked
