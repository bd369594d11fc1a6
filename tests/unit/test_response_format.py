"""Structured output: three notations of a format, and an error for every contradiction."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from outrider.server.api.errors import ApiError
from outrider.server.api.requests import CompletionRequest
from outrider.server.api.response_format import structured_output
from outrider.types import StructuredOutput

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = StructuredOutput("json", json.dumps(SCHEMA))
OBJECT = StructuredOutput("json_object", "")
DIGITS = StructuredOutput("regex", "[0-9]+")
GRAMMAR = StructuredOutput("grammar", 'start: "a" | "b"')
CHOICE = StructuredOutput("choice", '["yes", "no"]')

NOTATIONS: dict[str, tuple[dict[str, Any], StructuredOutput | None]] = {
    "nothing": ({}, None),
    "text": ({"response_format": {"type": "text"}}, None),
    "object": ({"response_format": {"type": "json_object"}}, OBJECT),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        JSON,
    ),
    "regex": ({"response_format": {"type": "regex", "regex": "[0-9]+"}}, DIGITS),
    "pattern": ({"response_format": {"type": "regex", "pattern": "[0-9]+"}}, DIGITS),
    "grammar": ({"response_format": {"type": "grammar", "grammar": GRAMMAR.value}}, GRAMMAR),
    "vllm json": ({"structured_outputs": {"json": SCHEMA}}, JSON),
    "vllm json text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON),
    "vllm regex": ({"structured_outputs": {"regex": "[0-9]+"}}, DIGITS),
    "vllm choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, CHOICE),
    "vllm grammar": ({"structured_outputs": {"grammar": GRAMMAR.value}}, GRAMMAR),
    "vllm object": ({"structured_outputs": {"json_object": True, "json": None}}, OBJECT),
    "guided json": ({"guided_json": SCHEMA}, JSON),
    "guided json text": ({"guided_json": json.dumps(SCHEMA)}, JSON),
    "guided regex": ({"guided_regex": "[0-9]+"}, DIGITS),
    "guided choice": ({"guided_choice": ["yes", "no"]}, CHOICE),
    "guided grammar": ({"guided_grammar": GRAMMAR.value}, GRAMMAR),
    "text beside a choice": ({"response_format": {"type": "text"}, "guided_choice": ["yes", "no"]}, CHOICE),
}


def read(fields: dict[str, Any]) -> CompletionRequest:
    return msgspec.convert({"prompt": "x", **fields}, CompletionRequest)


@pytest.mark.parametrize("name", NOTATIONS)
def test_every_notation_of_a_format_is_understood(name: str) -> None:
    fields, expected = NOTATIONS[name]
    assert structured_output(read(fields)) == expected


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "two guides": ({"guided_json": SCHEMA, "guided_regex": "x"}, "guided_regex", "keep one of them"),
    "two kinds": (
        {"response_format": {"type": "json_object"}, "guided_choice": ["a"]},
        "guided_choice",
        "`guided_choice` and `response_format` both",
    ),
    "two in one": (
        {"structured_outputs": {"regex": "x", "json_object": True}},
        "structured_outputs.json_object",
        "one",
    ),
    "none in one": ({"structured_outputs": {}}, "structured_outputs", "is empty"),
    "false is none": ({"structured_outputs": {"json_object": False}}, "structured_outputs", "is empty"),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "is missing",
    ),
    "a list": ({"guided_json": "[1]"}, "guided_json", "`guided_json` is not an object"),
    "a vllm list": ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "is not an object"),
    "no json": ({"guided_json": "{"}, "guided_json", "`guided_json` is not valid JSON"),
    "a tower": ({"guided_json": "[" * 100_000}, "guided_json", "`guided_json` is"),
    "no choice": ({"guided_choice": []}, "guided_choice", "at least one"),
    "an empty choice": ({"guided_choice": ["a", ""]}, "guided_choice", "no empty one"),
    "an empty regex": ({"guided_regex": ""}, "guided_regex", "is empty"),
    "an empty format": ({"response_format": {"type": "regex", "regex": ""}}, "response_format.regex", "is empty"),
    "a format without": ({"response_format": {"type": "regex"}}, "response_format.regex", "is empty"),
    "two names": (
        {"response_format": {"type": "regex", "regex": "a", "pattern": "b"}},
        "response_format.pattern",
        "pass one of them",
    ),
    "an empty grammar": ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", "is empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradicting_formats_are_rejected(name: str) -> None:
    fields, param, said = REFUSED[name]
    with pytest.raises(ApiError) as refusal:
        structured_output(read(fields))
    assert (refusal.value.status, refusal.value.param) == (400, param)
    assert said in refusal.value.message


def test_deeply_nested_schemas_are_rejected() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(100_000):
        schema = {"properties": {"a": schema}}
    asked = read({})
    asked.guided_json = schema
    with pytest.raises(ApiError, match="nested too deeply"):
        structured_output(asked)
