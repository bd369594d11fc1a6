"""JSON schemas of answers that are to be a call, or may be one; those of the arguments stand in them."""

from __future__ import annotations

import json
from typing import Any

from ..types import StructuredOutput
from .formats import as_json, refusal
from .messages import Function, NamedTool

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
