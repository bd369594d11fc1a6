"""Tools over HTTP: prompts, forced calls, parsed calls, invalid tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider import AsyncLLM, SamplingParams
from outrider.server.app import build_app
from outrider.server.options import ServerOptions

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks somewhere",
        "parameters": {
            "type": "object",
            "properties": {"where": {"$ref": "#/$defs/Place"}, "twice": {"type": "boolean"}},
            "required": ["where", "twice"],
            "additionalProperties": False,
            "$defs": {"Place": {"enum": ["here", "there"]}},
        },
    },
}
REST = {"type": "function", "function": {"name": "rest"}}
ASK = [{"role": "user", "content": "go"}]
NAMED = {"type": "function", "function": {"name": "look"}}
HISTORY = [
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "123456789", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "123456789", "content": [{"type": "text", "text": "a wall"}]},
]

# One template per series of models, each with its own notation of tools, calls and results.
HERMES = """{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}
{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments":
{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}[assistant]"""
LLAMA = """{% if not tools is defined %}{% set tools = none %}{% endif %}
{% if tools is not none %}Use {"name": ..., "parameters": ...}: {{ tools | tojson }}{% endif %}
{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>
{% if m.tool_calls %}{{ '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"""
MISTRAL = """{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}
{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{ c.function | tojson }}{% endfor %}]</s>{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{% else %}{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"""
OWN = """{{ tools | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}|{% endfor %}"""

LOOK_CALL = '{"name": "look", "arguments": {"where": "here", "twice": true}}'
SAID = {
    "hermes": (HERMES, f"Let me see.\n<tool_call>\n{LOOK_CALL}\n</tool_call>", "Let me see."),
    "llama": (LLAMA, LOOK_CALL.replace("arguments", "parameters"), None),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{LOOK_CALL}]", None),
    "own": (OWN, LOOK_CALL, None),
}


def post(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/chat/completions", json={"messages": ASK, **fields})


def answer(client: TestClient, **fields: Any) -> tuple[dict[str, Any], str]:
    response = post(client, **fields)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice["message"], choice["finish_reason"]


def gathered(client: TestClient, **fields: Any) -> tuple[dict[str, Any], str]:
    """Return the same from a stream, assembled as clients do."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    reason = ""
    lines = post(client, stream=True, **fields).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        message["content"] += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
        for piece in choice["delta"].get("tool_calls") or ():
            if piece["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({key: piece[key] for key in ("id", "type", "function")})
            else:
                message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message, reason


@pytest.fixture(scope="module")
def llm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = tmp_path_factory.mktemp("tools") / "roomy"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    engine = AsyncLLM(str(folder), max_requests=4)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def client(llm: AsyncLLM) -> TestClient:
    return TestClient(build_app(llm, ServerOptions(names=("tiny",))))


@pytest.mark.parametrize("name", SAID)
def test_calls_in_the_models_own_syntax_are_parsed(scripted: Any, name: str) -> None:
    template, script, content = SAID[name]
    engine, client = scripted(template, script)
    message, reason = answer(client, tools=[LOOK, REST], seed=1)
    assert (message["content"], reason) == (content, "tool_calls")
    [call] = message["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "look", "arguments": '{"where": "here", "twice": true}'}
    assert engine.params.structured is None
    streamed, reason = gathered(client, tools=[LOOK, REST], seed=1)
    assert (streamed["content"] or None, streamed["tool_calls"], reason) == (
        content,
        message["tool_calls"],
        "tool_calls",
    )


@pytest.mark.parametrize("name", SAID)
def test_the_prompt_contains_tools_calls_and_results(scripted: Any, name: str) -> None:
    engine, client = scripted(SAID[name][0], "A wall.")
    fields = {"messages": [*HISTORY, *ASK], "tools": [LOOK, REST]}
    message, reason = answer(client, **fields)
    assert (message["content"], reason) == ("A wall.", "stop")
    assert "tool_calls" not in message
    prompt = engine.llm.tokenizer.decode(engine.prompt, skip_special=False)
    assert json.dumps(LOOK["function"]["parameters"])[:60] in prompt
    assert '"rest"' in prompt
    assert "a wall" in prompt
    assert '{"n": 1}' in prompt or "{'n': 1}" in prompt


def test_calls_marked_by_special_tokens_are_parsed(scripted: Any) -> None:
    engine, client = scripted(MISTRAL, f"[TOOL_CALLS] [{LOOK_CALL}]</s>", special=("[TOOL_CALLS]",))
    message, _ = answer(client, tools=[LOOK])
    assert engine.params.skip_special_tokens is False
    assert message["content"] is None
    [call] = message["tool_calls"]
    assert len(call["id"]) == 9  # the template accepts no other length


def test_text_without_calls_is_content(scripted: Any) -> None:
    script = ' <tool_call>{"name": "fly", "arguments": {}}</tool_call>'
    _, client = scripted(HERMES, script)
    assert answer(client, tools=[LOOK])[0]["content"] == script
    streamed, reason = gathered(client, tools=[LOOK])
    assert (streamed, reason) == ({"content": script, "tool_calls": []}, "stop")


def test_tool_choice_none_parses_no_calls(scripted: Any) -> None:
    engine, client = scripted(HERMES, SAID["hermes"][1])
    message, reason = answer(client, tools=[LOOK], tool_choice="none")
    assert (message["content"], reason) == (SAID["hermes"][1], "stop")
    assert "look" not in engine.llm.tokenizer.decode(engine.prompt)


def test_parallel_tool_calls_false_returns_one_call(scripted: Any) -> None:
    _, client = scripted(HERMES, SAID["hermes"][1] * 2)
    assert len(answer(client, tools=[LOOK])[0]["tool_calls"]) == 2
    assert len(answer(client, tools=[LOOK], parallel_tool_calls=False)[0]["tool_calls"]) == 1


def test_tools_with_a_json_format_allow_a_call_or_json(scripted: Any) -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    engine, client = scripted(HERMES, LOOK_CALL)
    message, _ = answer(client, tools=[LOOK], response_format=form)
    assert message["tool_calls"][0]["function"]["name"] == "look"
    asked = json.loads(engine.params.structured.value)
    assert asked["$defs"]["the.answer"]["properties"]["x"] == {"$ref": "#/$defs/the.answer/$defs/X"}
    engine.script = '{"x": 3}'
    assert answer(client, tools=[LOOK], response_format=form)[0]["content"] == '{"x": 3}'
    params = SamplingParams(structured=engine.params.structured, temperature=0, max_tokens=1)
    assert engine.llm.generate(["x"], params)[0].completions[0].text == "{"


# Forced calls, with a model of random weights and a template that knows of no tools


@pytest.mark.parametrize("seed", range(3))
def test_a_named_tool_choice_forces_its_call(client: TestClient, seed: int) -> None:
    fields = {"tools": [LOOK, REST], "tool_choice": NAMED, "seed": seed, "max_tokens": 200}
    message, reason = answer(client, **fields)
    assert (message["content"], reason) == (None, "tool_calls")
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "look"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["where"] in ("here", "there")
    assert type(arguments["twice"]) is bool
    streamed, reason = gathered(client, **fields)
    assert (streamed["tool_calls"], streamed["content"], reason) == (message["tool_calls"], "", "tool_calls")
    assert answer(client, **fields, speculate="ngram")[0] == message


def test_tool_choice_required_forces_a_call(client: TestClient) -> None:
    names = set()
    for seed in range(6):
        fields = {"tools": [LOOK, REST], "tool_choice": "required", "seed": seed, "max_tokens": 900}
        message, _ = answer(client, **fields, parallel_tool_calls=False)
        [call] = message["tool_calls"]
        names.add(call["function"]["name"])
    assert names == {"look", "rest"}
    message, _ = answer(client, **fields)
    assert all(json.loads(call["function"]["arguments"]) is not None for call in message["tool_calls"])
    assert len(message["tool_calls"]) >= 1


def test_a_truncated_call_has_finish_reason_length(client: TestClient) -> None:
    fields = {"tools": [LOOK], "tool_choice": NAMED, "seed": 1, "max_tokens": 5}
    message, reason = answer(client, **fields)
    assert (message["content"], reason) == (gathered(client, **fields)[0]["content"], "length")
    assert message["content"].startswith("{")


def test_call_ids_are_unique_and_reproducible_with_a_seed(client: TestClient) -> None:
    fields = {"tools": [LOOK], "tool_choice": NAMED, "max_tokens": 200, "n": 3, "seed": 5}
    first, second = (
        [choice["message"]["tool_calls"][0]["id"] for choice in post(client, **each).json()["choices"]]
        for each in (fields, {**fields, "seed": 6})
    )
    assert len({*first, *second}) == 6
    again = post(client, **fields).json()["choices"]
    assert [choice["message"]["tool_calls"][0]["id"] for choice in again] == first
    assert all(name.startswith("call_") and len(name) == 29 for name in first)


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "template without tools": ({"tools": [LOOK]}, "tools", "its chat template does not support them"),
    "empty": ({"tools": []}, "tools", "pass 1 to 128"),
    "many": ({"tools": [tool(name=f"f{n}") for n in range(129)]}, "tools", "129"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
    "bad name": ({"tools": [REST, tool(name="a b")]}, "tools[1].function.name", "`tools[1].function.name`"),
    "dotted name": ({"tools": [tool(name="a.b")]}, "tools[0].function.name", "`tools[0].function.name`"),
    "twice": ({"tools": [REST, LOOK, REST]}, "tools[2].function.name", "`rest` again"),
    "no schema": ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "object"),
    "a list": ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters", '"array"'),
    "not a function": ({"tools": [{"type": "search"}]}, "tools[0].type", "`tools[0].type`"),
    "no tools": ({"tool_choice": "required"}, "tool_choice", "there are no `tools`"),
    "no such tool": (
        {"tools": [REST], "tool_choice": NAMED},
        "tool_choice.function.name",
        "'look', which is not one of the `tools`: use `rest`",
    ),
    "no such choice": ({"tools": [REST], "tool_choice": "maybe"}, "tool_choice", "`tool_choice`"),
    "a format too": (
        {"tools": [REST], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
        "cannot have another output format",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_tools_are_named(client: TestClient, name: str) -> None:
    fields, param, said = REFUSED[name]
    response = post(client, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"].replace("...", "0") == param
    assert said in error["message"].replace("[...]", "[0]")


def test_formats_that_exclude_calls_are_rejected(scripted: Any) -> None:
    _, client = scripted(HERMES)
    response = post(client, tools=[LOOK], guided_regex="[0-9]+")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def test_deeply_nested_schemas_are_rejected(client: TestClient) -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    response = post(client, tools=[tool(parameters=deep)], tool_choice="required")
    assert response.status_code == 400


@pytest.mark.slow
def test_a_real_model_makes_a_forced_call() -> None:
    engine = AsyncLLM("smollm2-135m", max_requests=2)
    try:
        client = TestClient(build_app(engine, ServerOptions(names=("real",))))
        assert "does not support them" in post(client, tools=[LOOK]).json()["error"]["message"]
        fields = {"tools": [LOOK, REST], "tool_choice": NAMED, "temperature": 0}
        message, reason = answer(client, messages=[{"role": "user", "content": "Look over there, twice."}], **fields)
        assert reason == "tool_calls"
        [call] = message["tool_calls"]
        assert json.loads(call["function"]["arguments"])["where"] in ("here", "there")
        result = {"role": "tool", "tool_call_id": call["id"], "content": "There is a cat."}
        message, _ = answer(client, messages=[*ASK, message, result, *ASK], max_tokens=8)
        assert message["content"]
    finally:
        engine.close()
