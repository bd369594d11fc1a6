"""The openai SDK against a real server: structured output and tool calls."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import openai
import pytest
from live_server import serving
from pydantic import BaseModel, ConfigDict, Field

from outrider import LLM
from outrider.async_llm import AsyncLLM

NAME = "tiny"
QUESTION = [{"role": "user", "content": "what is the weather?"}]
# Knows tools, and the way in which Hermes and Qwen write calls.
TEMPLATE = (
    "{% for tool in tools or [] %}[tool] {{ tool.function.name }}|{% endfor %}"
    "{% for message in messages %}[{{ message.role }}] {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}|"
    "{% endfor %}[assistant] "
)


class Sky(StrEnum):
    BLUE = "blue"
    GREY = "grey"


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sky: Sky
    rain: bool
    hours: list[bool] = Field(min_length=2, max_length=2)


def function(name: str, **properties: object) -> dict:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}


TOOLS = [
    function("look", where={"enum": ["up", "down"]}, twice={"type": "boolean"}),
    function("wait", unit={"enum": ["day", "week"]}),
]


@pytest.fixture(scope="module")
def client(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("shapes") / "skilled"
    shutil.copytree(model, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    llm = AsyncLLM(LLM(str(folder), speculate="ngram:adaptive=no"))
    with (
        serving(llm, names=(NAME,)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
    llm.close()


def ask(client: openai.OpenAI, **fields):
    return client.chat.completions.create(
        **{"model": NAME, "messages": QUESTION, "max_completion_tokens": 400, "temperature": 0, **fields}
    )


def plain(**fields) -> dict:
    """Return the same request without speculation."""
    return {**fields, "extra_body": {**fields.get("extra_body", {}), "speculate": False}}


# ---- structured output ----


def test_parse_returns_an_object(client) -> None:
    reply = client.chat.completions.parse(
        model=NAME, messages=QUESTION, response_format=Weather, max_completion_tokens=400, temperature=1, seed=2
    )
    parsed = reply.choices[0].message.parsed
    assert isinstance(parsed, Weather)
    assert reply.choices[0].finish_reason == "stop"
    assert Weather.model_validate_json(reply.choices[0].message.content) == parsed


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_holds_with_and_without_speculation(client, seed) -> None:
    schema = {"name": "weather", "schema": Weather.model_json_schema(), "strict": True}
    fields = {"response_format": {"type": "json_schema", "json_schema": schema}, "temperature": 1, "seed": seed}
    drafted, alone = ask(client, **fields), ask(client, **plain(**fields))
    Weather.model_validate_json(drafted.choices[0].message.content)
    assert drafted.choices[0].to_dict() == alone.choices[0].to_dict()


def test_a_stream_can_be_parsed(client) -> None:
    fields = {"model": NAME, "messages": QUESTION, "max_completion_tokens": 400, "temperature": 0}
    with client.chat.completions.stream(**fields, response_format=Weather) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    whole = client.chat.completions.parse(**fields, response_format=Weather)
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"structured_outputs": {"regex": "(ab|cd){3}"}}, "(ab|cd){3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"structured_outputs": {"grammar": 'start: "x" ("y" | "z") "x"'}}, "x[yz]x"),
    ],
)
def test_regex_choice_and_grammar_hold(client, field, pattern) -> None:
    for seed in range(3):
        fields = {"extra_body": field, "temperature": 1, "seed": seed}
        (choice,) = ask(client, **fields).choices
        assert re.fullmatch(pattern, choice.message.content)
        assert choice.finish_reason == "stop"
        assert ask(client, **plain(**fields)).choices[0].message.content == choice.message.content


def test_json_object_holds(client) -> None:
    for seed in range(8):
        (choice,) = ask(client, response_format={"type": "json_object"}, temperature=1, seed=seed).choices
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
            return
    pytest.fail("no answer of a random model came to its end")


def test_an_unsatisfiable_schema_is_rejected_by_field(client) -> None:
    schema = {"name": "nothing", "schema": {"type": "no such type"}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, response_format={"type": "json_schema", "json_schema": schema})
    assert caught.value.param.startswith("response_format")


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_that_other_fields_exclude_is_a_client_error(client, stream) -> None:
    fields = {"structured_outputs": {"choice": ["yes"]}, "bad_words": ["y"]}
    with pytest.raises(openai.BadRequestError, match="conflicts with other fields") as caught:
        ask(client, extra_body=fields, stream=stream)
    assert caught.value.param == "structured_outputs.choice"


# ---- tools ----


def calls(reply) -> list[tuple[str, dict]]:
    (choice,) = reply.choices
    assert choice.finish_reason in ("tool_calls", "stop")
    assert all(call.type == "function" and call.id for call in choice.message.tool_calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


def fits(name: str, arguments: dict) -> bool:
    if name == "look":
        return arguments["where"] in ("up", "down") and isinstance(arguments["twice"], bool) and len(arguments) == 2
    return name == "wait" and arguments in ({"unit": "day"}, {"unit": "week"})


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_is_made(client, seed) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1, "seed": seed}
    reply = ask(client, **fields)
    assert len(calls(reply)) == 1
    assert all(fits(*call) for call in calls(reply))
    assert calls(ask(client, **plain(**fields))) == calls(reply)


def test_a_named_call_is_made(client) -> None:
    for name in ("look", "wait"):
        choice = {"type": "function", "function": {"name": name}}
        ((called, arguments),) = calls(ask(client, tools=TOOLS, tool_choice=choice))
        assert called == name and fits(name, arguments)


def test_a_streamed_call_adds_up_to_the_whole_call(client) -> None:
    fields = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}}
    ((name, arguments),) = calls(ask(client, **fields))
    deltas = [
        piece
        for chunk in ask(client, **fields, stream=True)
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or []
    ]
    assert deltas[0].id and deltas[0].function.name == name
    assert all(piece.index == 0 and piece.id is None for piece in deltas[1:])
    assert len(deltas) > 2
    assert json.loads("".join(piece.function.arguments or "" for piece in deltas)) == arguments


def test_the_sdks_stream_helper_parses_calls(client) -> None:
    fields = {"model": NAME, "messages": QUESTION, "max_completion_tokens": 400, "temperature": 0}
    tools = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**fields, **tools) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert all(fits(*call) for call in calls(final))


def test_the_result_of_a_call_can_be_sent_back(client) -> None:
    reply = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    message = reply.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "it is grey"}
    answer = ask(client, messages=[*QUESTION, message, result], tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls
    assert answer.usage.prompt_tokens > reply.usage.prompt_tokens


def test_optional_tools_are_accepted(client) -> None:
    (choice,) = ask(client, tools=TOOLS, tool_choice="auto", max_completion_tokens=20).choices
    (never,) = ask(client, tools=TOOLS, tool_choice="none", max_completion_tokens=20).choices
    assert choice.message.content and not choice.message.tool_calls
    assert never.message.content == ask(client, max_completion_tokens=20).choices[0].message.content


def test_an_unknown_tool_is_rejected(client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "fly"}})
    assert caught.value.param.startswith("tool_choice")
