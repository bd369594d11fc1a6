"""Resolve the tools of a chat request: the prompt, the output format and the parser of calls that follow from them."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ...tokenizer import Tokenizer
from ...types import StructuredOutput
from ..api.requests import ChatRequest, Function, NamedTool, Tool, template_message
from ..api.response_format import invalid_value, json_schema_output, structured_output
from .parser import FORCED, GENERIC, HERMES, LLAMA, MISTRAL, ToolCallStyle, ToolParser

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_TOOLS = 128  # OpenAI's limit
MAX_CALLS = 16  # calls in one forced response: small models would not stop by themselves
ID_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# JSON schema keywords whose values are data: a `$ref` inside is not a reference.
DATA_KEYWORDS = frozenset(("const", "enum", "default", "examples"))
# JSON schema keywords whose values map names to schemas.
NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
CONTENT_SCHEMA = "the.answer"  # under `$defs`; tool names contain no dot

Schema = dict[str, Any]


@dataclass(frozen=True)
class ResolvedTools:
    """The effects of a chat request's tools on its prompt, its sampling and its output."""

    messages: list[dict[str, Any]]  # for the chat template
    tools: list[dict[str, Any]] | None = None  # for the chat template
    structured: StructuredOutput | None = None  # the requested format, or the one that forces a call
    keep_special: bool = False  # whether special tokens must appear in the output, because they mark calls
    parser: ToolParser | None = None  # None: the output is content only


def resolve_tools(request: ChatRequest, tokenizer: Tokenizer) -> ResolvedTools:
    """Return the effects of the tools, for requests with and without them; raise 400 if they cannot be used."""
    output_format = structured_output(request)
    messages = [template_message(message) for message in request.messages]
    functions = _check_tools(request.tools)
    choice = _check_choice(request, functions)
    if choice == "none":
        return ResolvedTools(messages, structured=output_format)
    template_has_tools = "tools" in tokenizer.chat_names
    forced = choice != "auto"
    if not template_has_tools and not forced:
        message = "`tools` cannot be passed to the model, because its chat template does not support them"
        raise invalid_value("tools", f"{message}: remove them, or force a call with `tool_choice`")
    parallel = request.parallel_tool_calls is not False
    structured: StructuredOutput | None
    try:
        if forced:
            structured = forced_call(choice, functions, parallel, output_format)
        else:
            structured = call_or_content(functions, output_format)
    except RecursionError:
        raise invalid_value("tools", "`tools` contain a schema that is nested too deeply: use a flatter one") from None
    parser = parser_for(
        tokenizer.chat_template or "",
        functions,
        in_json=structured is not None,
        parallel=parallel,
        make_id=_seeded_ids(request),
    )
    end_texts = tuple(tokenizer.spelling(token) or "" for token in sorted(tokenizer.end_ids))
    keep_special = any(_is_special(tokenizer, marker) for marker in parser.style.markers)
    return ResolvedTools(
        messages=messages if template_has_tools else _with_tools(messages, functions.values()),
        tools=[_as_json(function) for function in functions.values()] if template_has_tools else None,
        structured=structured,
        keep_special=keep_special,
        parser=replace(parser, end_texts=tuple(filter(None, end_texts))) if keep_special else parser,
    )


def parser_for(
    template: str,
    names: Iterable[str],
    in_json: bool = False,
    parallel: bool = True,
    make_id: Callable[[int, int], str] | None = None,
) -> ToolParser:
    """Return the parser for the calls that this chat template teaches; `in_json`: that a grammar forces instead."""
    taught = style_of(template)
    style = replace(FORCED, id_length=taught.id_length, id_prefix=taught.id_prefix) if in_json else taught

    def call_id(choice: int, call: int) -> str:
        digest = make_id(choice, call) if make_id is not None else secrets.token_hex(20)
        return style.id_prefix + _encode_id(digest, style.id_length)

    return ToolParser(style, frozenset(names), call_id, parallel)


def style_of(template: str) -> ToolCallStyle:
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return LLAMA
    return GENERIC


def _check_tools(tools: Sequence[Tool] | None) -> dict[str, Function]:
    """Return the functions by name; raise 400 if one is invalid."""
    if tools is None:
        return {}
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise invalid_value("tools", f"`tools` has {len(tools)} entries: pass 1 to {MAX_TOOLS}, or remove it")
    functions: dict[str, Function] = {}
    for index, function in enumerate(tool.function for tool in tools):
        field = f"tools[{index}].function"
        if TOOL_NAME.fullmatch(function.name) is None:
            expected = "expected 1 to 64 letters, digits, `_` or `-`"
            raise invalid_value(f"{field}.name", f"`{field}.name` is {function.name!r}: {expected}")
        if function.name in functions:
            message = f"`{field}.name` is `{function.name}` again: give every tool its own name"
            raise invalid_value(f"{field}.name", message)
        kind = (function.parameters or {}).get("type", "object")
        if kind != "object":
            message = f"`{field}.parameters` has the type {json.dumps(kind)}: the arguments of a call are an object"
            raise invalid_value(f"{field}.parameters", message)
        functions[function.name] = function
    return functions


def _check_choice(request: ChatRequest, functions: dict[str, Function]) -> str | NamedTool:
    """Return `none`, `auto`, `required`, or the one tool to call."""
    choice = request.tool_choice or ("auto" if functions else "none")
    if not functions:
        if choice not in ("none", "auto"):
            raise invalid_value("tool_choice", "`tool_choice` forces a call, but there are no `tools`: pass some")
        return "none"
    if isinstance(choice, NamedTool) and choice.function.name not in functions:
        field = "tool_choice.function.name"
        known = ", ".join(f"`{name}`" for name in functions)
        message = f"`{field}` is {choice.function.name!r}, which is not one of the `tools`: use {known}"
        raise invalid_value(field, message)
    return choice


# ---- prompts ----


def _as_json(function: Function) -> dict[str, Any]:
    """Return a tool as chat templates read it: the fields that were set, in OpenAI's order."""
    fields = {name: value for name, value in msgspec.structs.asdict(function).items() if value is not None}
    return {"type": "function", "function": fields}


def _with_tools(messages: list[dict[str, Any]], functions: Iterable[Function]) -> list[dict[str, Any]]:
    """Describe the tools at the head of the first message, for chat templates that do not support tools."""
    tools = "\n".join(json.dumps(_as_json(function)["function"], ensure_ascii=False) for function in functions)
    head = f'Answer with calls of these functions, as JSON with "name" and "arguments":\n{tools}'
    first = messages[0]
    content = f"{head}\n\n{first['content']}" if first["content"] else head
    return [{**first, "content": content}, *messages[1:]]


# ---- ids of calls ----


def _seeded_ids(request: ChatRequest) -> Callable[[int, int], str] | None:
    """Return a function that derives ids from the seed and the messages; None without a seed."""
    if request.seed is None or request.seed < 0:
        return None
    key = hashlib.blake2b(msgspec.json.encode([request.seed, request.messages]), digest_size=32).digest()

    def make(choice: int, call: int) -> str:
        return hashlib.blake2b(f"{choice} {call}".encode(), key=key, digest_size=20).hexdigest()

    return make


def _encode_id(digest: str, length: int) -> str:
    number, letters = int(digest, 16), []
    for _ in range(length):
        number, letter = divmod(number, len(ID_ALPHABET))
        letters.append(ID_ALPHABET[letter])
    return "".join(letters)


def _is_special(tokenizer: Tokenizer, text: str) -> bool:
    tokens = tokenizer.encode(text, add_special=False)
    return len(tokens) == 1 and tokens[0] in tokenizer.special_ids


# ---- JSON schemas of calls ----


def forced_call(
    choice: str | NamedTool, functions: dict[str, Function], parallel: bool, output_format: StructuredOutput | None
) -> StructuredOutput:
    """Return the format that forces a call of the named tool, or of any tool."""
    if output_format is not None:
        message = "`tool_choice` forces a call, which cannot have another output format: remove one of them"
        raise invalid_value("tool_choice", message)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        return json_schema_output(_with_definitions(_call_schema(name), {name: functions[name]}))
    call = {"anyOf": [_call_schema(name) for name in functions]}
    calls = {"type": "array", "items": call, "minItems": 1, "maxItems": MAX_CALLS}
    return json_schema_output(_with_definitions(calls if parallel else call, functions))


def call_or_content(functions: dict[str, Function], output_format: StructuredOutput | None) -> StructuredOutput | None:
    """Return the format that allows a call, or content in the requested format."""
    if output_format is None:
        return None
    if output_format.kind not in ("json", "json_object"):
        message = f"`tools` cannot be combined with a `{output_format.kind}` format: use a JSON schema, or remove them"
        raise invalid_value("tools", message)
    content: Any = json.loads(output_format.text) if output_format.kind == "json" else {"type": "object"}
    either = [*(_call_schema(name) for name in functions), _reference(CONTENT_SCHEMA)]
    schema = _with_definitions({"anyOf": either}, functions)
    schema["$defs"][CONTENT_SCHEMA] = _rebase(content, f"#/$defs/{CONTENT_SCHEMA}")
    return json_schema_output(schema)


def _call_schema(name: str) -> Schema:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": _reference(name)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _reference(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _with_definitions(schema: Schema, functions: dict[str, Function]) -> Schema:
    """Add the schemas of the arguments under `$defs`."""
    return {**schema, "$defs": {name: _arguments_schema(name, function) for name, function in functions.items()}}


def _arguments_schema(name: str, function: Function) -> Schema:
    if not function.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    rebased: Schema = _rebase(function.parameters, f"#/$defs/{name}")
    return {"type": "object", **rebased}


def _rebase(schema: Any, root: str) -> Any:
    """Rewrite the references to `#` in a schema that now stands at `root`."""
    if isinstance(schema, list):
        return [_rebase(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    rebased: Schema = {}
    for key, value in schema.items():
        if key in NAMED_SCHEMAS and isinstance(value, dict):
            rebased[key] = {name: _rebase(inner, root) for name, inner in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            rebased[key] = root + value[1:]
        else:
            rebased[key] = value if key in DATA_KEYWORDS else _rebase(value, root)
    return rebased
