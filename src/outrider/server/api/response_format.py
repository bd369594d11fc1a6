"""Structured output: the format that a request asks for, in any of three notations.

`response_format` (OpenAI), `structured_outputs` (vLLM) and the older `guided_*` fields (vLLM). A forced tool call also
constrains the output: `resolve_tools` combines it with the format found here.
"""

from __future__ import annotations

import json
from typing import Any

from ...types import StructuredOutput
from .errors import ApiError
from .requests import (
    GenerationRequest,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    StructuredOutputs,
)

FormatsByField = dict[str, StructuredOutput]


def structured_output(request: GenerationRequest) -> StructuredOutput | None:
    """Return the requested output format; raise 400 if a request has two."""
    formats = _requested_formats(request)
    if len(formats) > 1:
        first, second = list(formats)[:2]
        raise invalid_value(second, f"`{second}` and `{first}` both set the output format: keep one of them")
    return next(iter(formats.values()), None)


def requested_field(request: GenerationRequest) -> str:
    """Return the field that sets the output format; `tools` if none does, because a forced call may."""
    return next(iter(_requested_formats(request)), "tools")


def json_schema_output(schema: dict[str, Any]) -> StructuredOutput:
    """Return the format of output that matches a JSON schema."""
    return StructuredOutput("json", json.dumps(schema))


def invalid_value(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def _requested_formats(request: GenerationRequest) -> FormatsByField:
    formats: FormatsByField = {}
    if request.response_format is not None:
        formats |= _from_response_format(request.response_format)
    if request.structured_outputs is not None:
        formats |= _from_structured_outputs(request.structured_outputs)
    return formats | _from_fields(
        "guided_", request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar
    )


def _from_response_format(value: ResponseFormat) -> FormatsByField:
    match value:
        case JsonObjectFormat():
            return {"response_format": StructuredOutput("json_object", "")}
        case JsonSchemaFormat(json_schema):
            field = "response_format.json_schema.schema"
            if json_schema.schema is None:
                raise invalid_value(field, f"`{field}` is missing: pass the schema, or use `json_object`")
            return {"response_format": _schema(field, json_schema.schema)}
        case RegexFormat(regex, pattern):
            if regex and pattern:
                field = "response_format.pattern"
                raise invalid_value(field, f"`{field}` and `response_format.regex` mean the same: pass one of them")
            text = _non_empty("response_format.regex", regex or pattern)
            return {"response_format": StructuredOutput("regex", text)}
        case GrammarFormat(grammar):
            return {"response_format": StructuredOutput("grammar", _non_empty("response_format.grammar", grammar))}
        case _:  # text: unconstrained
            return {}


def _from_structured_outputs(value: StructuredOutputs) -> FormatsByField:
    formats = _from_fields("structured_outputs.", value.json, value.regex, value.choice, value.grammar)
    if value.json_object:
        formats["structured_outputs.json_object"] = StructuredOutput("json_object", "")
    if not formats:
        field = "structured_outputs"
        message = f"`{field}` is empty: set one of `json`, `regex`, `choice`, `grammar`, `json_object`"
        raise invalid_value(field, message)
    return formats


def _from_fields(
    prefix: str, schema: str | dict[str, Any] | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> FormatsByField:
    formats: FormatsByField = {}
    if schema is not None:
        formats[f"{prefix}json"] = _schema(f"{prefix}json", schema)
    if regex is not None:
        formats[f"{prefix}regex"] = StructuredOutput("regex", _non_empty(f"{prefix}regex", regex))
    if choice is not None:
        formats[f"{prefix}choice"] = _choice(f"{prefix}choice", choice)
    if grammar is not None:
        formats[f"{prefix}grammar"] = StructuredOutput("grammar", _non_empty(f"{prefix}grammar", grammar))
    return formats


def _schema(field: str, schema: str | dict[str, Any]) -> StructuredOutput:
    value: Any = schema
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            message = f"`{field}` is not valid JSON: pass a JSON schema, as an object or as JSON text"
            raise invalid_value(field, message) from None
    if not isinstance(value, dict):
        raise invalid_value(field, f'`{field}` is not an object: pass a JSON schema such as `{{"type": "object"}}`')
    try:
        return json_schema_output(value)
    except RecursionError:
        raise invalid_value(field, f"`{field}` is nested too deeply: use a flatter schema") from None


def _choice(field: str, choices: list[str]) -> StructuredOutput:
    if not choices or not all(choices):
        raise invalid_value(field, f"`{field}` must contain at least one text, and no empty one")
    return StructuredOutput("choice", json.dumps(choices))


def _non_empty(field: str, text: str) -> str:
    if not text:
        raise invalid_value(field, f"`{field}` is empty: remove it, or describe the output")
    return text
