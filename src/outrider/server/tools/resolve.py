"""Tools: what a request offers and demands, what the model is told of it, and who reads its calls.

plan(asked, tokenizer) -> ToolPlan    for every chat, with tools or without; refuses what cannot be done
    .messages, .tools                 for Tokenizer.apply_chat
    .structured                       for SamplingParams: the format asked for, or the one that forces a call
    .keep_special                     whether the answer needs `skip_special_tokens=False`
    .parser                           ToolParser, or None where the answer is content as it is (see tool_calls.py)
parser_for(template, names, ...) -> ToolParser
"""

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
from ..api.requests import ChatRequest, Function, NamedTool, Tool, plain
from ..api.response_format import as_json, refusal
from ..api.response_format import structured as asked_format
from .parser import FORCED, GENERIC, HERMES, LLAMA, MISTRAL, Style, ToolParser

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MOST_TOOLS = 128
ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class ToolPlan:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    structured: StructuredOutput | None = None
    keep_special: bool = False
    parser: ToolParser | None = None


def plan(asked: ChatRequest, tokenizer: Tokenizer) -> ToolPlan:
    form = asked_format(asked)
    messages = [plain(message) for message in asked.messages]
    functions = _check_tools(asked.tools)
    choice = _check_choice(asked, functions)
    if choice == "none":
        return ToolPlan(messages, structured=form)
    understood = "tools" in tokenizer.chat_names
    forced = choice != "auto"
    if not understood and not forced:
        message = "`tools` do not reach the model: its chat template has no place for them"
        raise refusal("tools", f"{message}; leave them out, or force a call with `tool_choice`")
    parallel = asked.parallel_tool_calls is not False
    try:
        structured = forced_call(choice, functions, parallel, form) if forced else call_or_answer(functions, form)
    except RecursionError:
        raise refusal("tools", "`tools` hold a schema that is nested too deeply: make it flatter") from None
    parser = parser_for(
        tokenizer.chat_template or "",
        functions,
        in_json=structured is not None,
        parallel=parallel,
        make_id=_ids(asked),
    )
    ends = tuple(tokenizer.spelling(token) or "" for token in sorted(tokenizer.end_ids))
    keep_special = any(_is_special(tokenizer, marker) for marker in parser.style.markers)
    return ToolPlan(
        messages=messages if understood else _told(messages, functions.values()),
        tools=[_as_json(function) for function in functions.values()] if understood else None,
        structured=structured,
        keep_special=keep_special,
        parser=replace(parser, ends=tuple(filter(None, ends))) if keep_special else parser,
    )


def parser_for(
    template: str,
    names: Iterable[str],
    in_json: bool = False,
    parallel: bool = True,
    make_id: Callable[[int, int], str] | None = None,
) -> ToolParser:
    """The reader of calls that this chat template teaches; `in_json`: of those that a grammar demands instead."""
    taught = style_of(template)
    style = replace(FORCED, id_length=taught.id_length, id_prefix=taught.id_prefix) if in_json else taught

    def named(answer: int, call: int) -> str:
        digest = make_id(answer, call) if make_id is not None else secrets.token_hex(20)
        return style.id_prefix + _spell(digest, style.id_length)

    return ToolParser(style, frozenset(names), named, parallel)


def style_of(template: str) -> Style:
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return LLAMA
    return GENERIC


def _check_tools(tools: Sequence[Tool] | None) -> dict[str, Function]:
    if tools is None:
        return {}
    if not 1 <= len(tools) <= MOST_TOOLS:
        raise refusal("tools", f"`tools` holds {len(tools)} of them: pass between 1 and {MOST_TOOLS}, or leave it out")
    functions: dict[str, Function] = {}
    for index, function in enumerate(tool.function for tool in tools):
        field = f"tools[{index}].function"
        if NAME.fullmatch(function.name) is None:
            what = "expected 1 to 64 letters, digits, `_` or `-`"
            raise refusal(f"{field}.name", f"`{field}.name` is {function.name!r}: {what}")
        if function.name in functions:
            raise refusal(f"{field}.name", f"`{field}.name` is `{function.name}` again: give every tool its own name")
        if (function.parameters or {}).get("type", "object") != "object":
            what = "the arguments of a call are an object, so its schema must say so"
            raise refusal(f"{field}.parameters", f"`{field}.parameters` has the type {_type(function)}: {what}")
        functions[function.name] = function
    return functions


def _type(function: Function) -> str:
    return json.dumps((function.parameters or {}).get("type"))


def _check_choice(asked: ChatRequest, functions: dict[str, Function]) -> str | NamedTool:
    """`none`, `auto`, `required`, or the one tool to call."""
    choice = asked.tool_choice or ("auto" if functions else "none")
    if not functions:
        if choice not in ("none", "auto"):
            raise refusal("tool_choice", "`tool_choice` demands a call, and there are no `tools`: pass some")
        return "none"
    if isinstance(choice, NamedTool) and choice.function.name not in functions:
        field = "tool_choice.function.name"
        known = ", ".join(f"`{name}`" for name in functions)
        raise refusal(field, f"`{field}` is {choice.function.name!r}, which is none of the `tools`: name {known}")
    return choice


# What the model is told


def _as_json(function: Function) -> dict[str, Any]:
    """A tool as chat templates read it: what was given, in OpenAI's order."""
    given = {name: value for name, value in msgspec.structs.asdict(function).items() if value is not None}
    return {"type": "function", "function": given}


def _told(messages: list[dict[str, Any]], functions: Iterable[Function]) -> list[dict[str, Any]]:
    """For templates without a place for tools: what there is to call, at the head of the first message."""
    tools = "\n".join(json.dumps(_as_json(function)["function"], ensure_ascii=False) for function in functions)
    head = f'Answer with calls of these functions, as JSON with "name" and "arguments":\n{tools}'
    first = messages[0]
    content = f"{head}\n\n{first['content']}" if first["content"] else head
    return [{**first, "content": content}, *messages[1:]]


# Names of calls


def _ids(asked: ChatRequest) -> Callable[[int, int], str] | None:
    """With a seed the same request makes the same calls, to their ids; another turn of the conversation does not."""
    if asked.seed is None or asked.seed < 0:
        return None
    request = hashlib.blake2b(msgspec.json.encode([asked.seed, asked.messages]), digest_size=32).digest()

    def make(answer: int, call: int) -> str:
        return hashlib.blake2b(f"{answer} {call}".encode(), key=request, digest_size=20).hexdigest()

    return make


def _spell(digest: str, length: int) -> str:
    number, letters = int(digest, 16), []
    for _ in range(length):
        number, place = divmod(number, len(ALPHABET))
        letters.append(ALPHABET[place])
    return "".join(letters)


def _is_special(tokenizer: Tokenizer, text: str) -> bool:
    tokens = tokenizer.encode(text, add_special=False)
    return len(tokens) == 1 and tokens[0] in tokenizer.special_ids


MOST_CALLS = 16  # in one forced answer: a small model would not stop by itself
# What stands in a schema under these is data: a `$ref` in it refers to nothing.
DATA = frozenset(("const", "enum", "default", "examples"))
# Under these stand schemas by names of their own.
NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))

Schema = dict[str, Any]


def forced_call(
    choice: str | NamedTool, functions: dict[str, Function], parallel: bool, form: StructuredOutput | None
) -> StructuredOutput:
    if form is not None:
        message = "`tool_choice` demands a call, and a call has a shape of its own: leave out the format, or the demand"
        raise refusal("tool_choice", message)
    if isinstance(choice, NamedTool):
        name = choice.function.name
        return as_json(_rooted(_call_schema(name), {name: functions[name]}))
    calls = {"anyOf": [_call_schema(name) for name in functions]}
    several = {"type": "array", "items": calls, "minItems": 1, "maxItems": MOST_CALLS}
    return as_json(_rooted(several if parallel else calls, functions))


def call_or_answer(functions: dict[str, Function], form: StructuredOutput | None) -> StructuredOutput | None:
    """A call, or an answer in the format that was asked for."""
    if form is None:
        return None
    if form.kind not in ("json", "json_object"):
        message = f"`tools` do not go with a format of the kind `{form.kind}`: use a JSON schema, or leave them out"
        raise refusal("tools", message)
    answer: Any = json.loads(form.value) if form.kind == "json" else {"type": "object"}
    # No tool has a name with a dot in it.
    schema = _rooted({"anyOf": [*(_call_schema(name) for name in functions), _at("the.answer")]}, functions)
    schema["$defs"]["the.answer"] = _moved(answer, "#/$defs/the.answer")
    return as_json(schema)


def _call_schema(name: str) -> Schema:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": _at(name)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _at(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _rooted(schema: Schema, functions: dict[str, Function]) -> Schema:
    """The schema with those of the arguments below it, each in its place."""
    return {**schema, "$defs": {name: _arguments_schema(name, function) for name, function in functions.items()}}


def _arguments_schema(name: str, function: Function) -> Schema:
    if not function.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    moved: Schema = _moved(function.parameters, f"#/$defs/{name}")
    return {"type": "object", **moved}


def _moved(schema: Any, root: str) -> Any:
    """The schema with its references to `#` pointing to where it stands now."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: Schema = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            moved[key] = {name: _moved(each, root) for name, each in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        else:
            moved[key] = value if key in DATA else _moved(value, root)
    return moved
