"""What a request says about the shape of its answer, in any of the three spellings.

structured(asked) -> StructuredOutput | None
    from OpenAI's `response_format`, vLLM's `structured_outputs`, or the older `guided_*` fields; two are refused.
    A forced tool call is a format too: see tools.plan, which takes the result of this.
field_of(asked) -> str
    which of these fields it was, for errors.
as_json(schema) -> StructuredOutput
    answers that fit a JSON schema.
"""

from __future__ import annotations

import json
from typing import Any

from ...types import StructuredOutput
from .errors import ApiError
from .requests import (
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    Sampling,
    StructuredOutputs,
)

Named = dict[str, StructuredOutput]  # by the field that asks for it


def structured(asked: Sampling) -> StructuredOutput | None:
    found = _asked_for(asked)
    if len(found) > 1:
        first, second = list(found)[:2]
        raise refusal(second, f"`{second}` and `{first}` both fix the shape of the answer: keep one of them")
    return next(iter(found.values()), None)


def field_of(asked: Sampling) -> str:
    """Which field of the request fixes the shape of the answer; where none does, a forced call may."""
    return next(iter(_asked_for(asked)), "tools")


def _asked_for(asked: Sampling) -> Named:
    found: Named = {}
    if asked.response_format is not None:
        found |= _response_format(asked.response_format)
    if asked.structured_outputs is not None:
        found |= _structured_outputs(asked.structured_outputs)
    return found | _kinds("guided_", asked.guided_json, asked.guided_regex, asked.guided_choice, asked.guided_grammar)


def as_json(schema: dict[str, Any]) -> StructuredOutput:
    return StructuredOutput("json", json.dumps(schema))


def refusal(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def _response_format(asked: ResponseFormat) -> Named:
    match asked:
        case JsonObjectFormat():
            return {"response_format": StructuredOutput("json_object", "")}
        case JsonSchemaFormat(json_schema):
            field = "response_format.json_schema.schema"
            if json_schema.schema is None:
                raise refusal(field, f"`{field}` is missing: pass the schema, or ask for `json_object`")
            return {"response_format": _schema(field, json_schema.schema)}
        case RegexFormat(regex, pattern):
            if regex and pattern:
                field = "response_format.pattern"
                raise refusal(field, f"`{field}` and `response_format.regex` are one thing: give one of them")
            return {"response_format": StructuredOutput("regex", _filled("response_format.regex", regex or pattern))}
        case GrammarFormat(grammar):
            return {"response_format": StructuredOutput("grammar", _filled("response_format.grammar", grammar))}
        case _:  # text: any shape
            return {}


def _structured_outputs(asked: StructuredOutputs) -> Named:
    found = _kinds("structured_outputs.", asked.json, asked.regex, asked.choice, asked.grammar)
    if asked.json_object:
        found["structured_outputs.json_object"] = StructuredOutput("json_object", "")
    if not found:
        field = "structured_outputs"
        raise refusal(
            field, f"`{field}` asks for nothing: set one of `json`, `regex`, `choice`, `grammar`, `json_object`"
        )
    return found


def _kinds(
    prefix: str, schema: str | dict[str, Any] | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Named:
    found: Named = {}
    if schema is not None:
        found[f"{prefix}json"] = _schema(f"{prefix}json", schema)
    if regex is not None:
        found[f"{prefix}regex"] = StructuredOutput("regex", _filled(f"{prefix}regex", regex))
    if choice is not None:
        found[f"{prefix}choice"] = _choice(f"{prefix}choice", choice)
    if grammar is not None:
        found[f"{prefix}grammar"] = StructuredOutput("grammar", _filled(f"{prefix}grammar", grammar))
    return found


def _schema(field: str, schema: str | dict[str, Any]) -> StructuredOutput:
    value: Any = schema
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise refusal(field, f"`{field}` is no JSON: pass a JSON schema, as an object or as its text") from None
    if not isinstance(value, dict):
        raise refusal(field, f'`{field}` is no object: pass a JSON schema such as `{{"type": "object"}}`')
    try:
        return as_json(value)
    except RecursionError:
        raise refusal(field, f"`{field}` is nested too deeply: make it flatter") from None


def _choice(field: str, choices: list[str]) -> StructuredOutput:
    if not choices or not all(choices):
        raise refusal(field, f"`{field}` must hold at least one text, and none that is empty")
    return StructuredOutput("choice", json.dumps(choices))


def _filled(field: str, text: str) -> str:
    if not text:
        raise refusal(field, f"`{field}` is empty: leave it out, or say what the answer must look like")
    return text
