"""Ollama's API: fields, streams of lines, options, formats, tools, descriptions, refusals."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider import LLM, SamplingParams
from outrider.server.app import build_app
from outrider.server.options import ServerOptions

GENERATE, CHAT = "/api/generate", "/api/chat"
ASK = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "num_predict": 12}
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "look", "arguments": {"n": 1}}</tool_call>'
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}[assistant]
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""


def post(client: TestClient, path: str, **fields: Any) -> Any:
    given = {"messages": ASK} if path == CHAT else {"prompt": "Hello"}
    response = client.post(path, json={"model": "tiny", **given, **fields})
    assert response.status_code == 200, response.text
    return response


def whole(client: TestClient, path: str, **fields: Any) -> dict[str, Any]:
    return post(client, path, stream=False, **fields).json()


def lines(client: TestClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    response = post(client, path, **fields)
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def engine_text(plain: LLM, prompt: str, special: bool = False) -> str:
    params = SamplingParams(max_tokens=12, temperature=0, top_k=40, top_p=0.9)
    return plain.generate([plain.tokenizer.encode(prompt, add_special=special)], params)[0].completions[0].text


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_an_answer_has_ollamas_fields(client, plain, path) -> None:
    text = engine_text(plain, "[user] Hello|[assistant] ")
    body = whole(client, path, options=GREEDY)
    if path == CHAT:
        assert body["message"] == {"role": "assistant", "content": text}
    else:
        assert body["response"] == text
    assert (body["model"], body["done"]) == ("tiny", True)
    assert body["done_reason"] in ("length", "stop")
    assert datetime.fromisoformat(body["created_at"]).tzinfo is not None
    assert 0 < body["eval_count"] <= 12 and body["prompt_eval_count"] > 0
    durations = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
    assert all(isinstance(body[name], int) and body[name] >= 0 for name in durations)


@pytest.mark.parametrize("path", [GENERATE, CHAT])
def test_answers_are_streamed_as_lines_by_default(client, path) -> None:
    *parts, last = lines(client, path, options=GREEDY)
    expected = whole(client, path, options=GREEDY)
    key = "message" if path == CHAT else "response"
    texts = [part[key]["content"] if path == CHAT else part[key] for part in parts]
    assert "".join(texts) == (expected[key]["content"] if path == CHAT else expected[key])
    assert all(part["done"] is False and "eval_count" not in part for part in parts)
    assert last["done"] and last["eval_count"] == expected["eval_count"]
    assert last["done_reason"] == expected["done_reason"]


def test_generate_takes_a_system_text_or_a_raw_prompt(client, plain) -> None:
    found = whole(client, GENERATE, system="Be brief.", options=GREEDY)["response"]
    assert found == engine_text(plain, "[system] Be brief.|[user] Hello|[assistant] ")
    raw = whole(client, GENERATE, raw=True, options=GREEDY)["response"]
    assert raw == engine_text(plain, "Hello", special=True)


def test_options_reach_the_engine(scripted) -> None:
    engine, client = scripted(TEMPLATE, "Here.")
    whole(client, CHAT)
    params = engine.params
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.8, 40, 0.9, None)
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.6,
        "min_p": 0.1,
        "seed": 3,
        "num_predict": 9,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "stop": ["x", "y"],
        "num_ctx": 4096,
        "num_gpu": 1,
    }
    response = post(client, CHAT, stream=False, options=options, keep_alive="5m", speculate=False)
    params = engine.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.6, 0.1)
    assert (params.seed, params.max_tokens, params.repetition_penalty) == (3, 9, 1.2)
    assert (params.presence_penalty, params.frequency_penalty, params.stop) == (0.5, -0.5, ("x", "y"))
    assert params.speculate is False
    assert response.headers["x-outrider-ignored"] == "options.num_ctx, options.num_gpu"
    for unlimited in ({"num_predict": -1}, {"num_predict": -2, "seed": -1}):
        whole(client, GENERATE, options=unlimited)
        assert engine.params.max_tokens > 50 and engine.params.seed is None


def test_formats_constrain_the_answer(client, scripted) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(whole(client, CHAT, format=schema)["message"]["content"]) == {"a": 1}
    assert json.loads(whole(client, GENERATE, format=schema)["response"]) == {"a": 1}
    engine, other = scripted(TEMPLATE, "{}")
    whole(other, CHAT, format="json")
    assert engine.params.structured.kind == "json_object"
    whole(other, CHAT, format="")
    assert engine.params.structured is None


def test_tool_calls_have_objects_as_arguments(scripted) -> None:
    engine, client = scripted(TEMPLATE, f"Wait. {CALL}{CALL}")
    expected = [{"function": {"name": "look", "arguments": {"n": 1}}}] * 2
    message = whole(client, CHAT, tools=[LOOK])["message"]
    assert message == {"role": "assistant", "content": "Wait.", "tool_calls": expected}
    parts = lines(client, CHAT, tools=[LOOK])
    assert "".join(part["message"]["content"] for part in parts) == "Wait."
    assert [call for part in parts for call in part["message"].get("tool_calls", ())] == expected
    assert parts[-1]["done_reason"] == "stop"
    # The conversation goes on with the call and its result.
    result = {"role": "tool", "content": "a wall", "tool_name": "look"}
    whole(client, CHAT, messages=[*ASK, message, result])
    prompt = engine.llm.tokenizer.decode(engine.prompt)
    assert "[assistant]Wait." in prompt and '{"name": "look", "arguments": {"n": 1}}' in prompt
    assert "[tool]a wall" in prompt


def test_calls_that_are_cut_off_are_shown_as_text(scripted) -> None:
    _, client = scripted(TEMPLATE, '<tool_call>{"name": "look", "arguments": {"n": ')
    message = whole(client, CHAT, tools=[LOOK])["message"]
    assert "tool_calls" not in message and "look" in message["content"]


def test_thinking_is_a_field_of_its_own(scripted) -> None:
    engine, client = scripted(TEMPLATE, "<think>\nHm.\n</think>\n\nHere.")
    message = whole(client, CHAT, think=True)["message"]
    assert (message["thinking"], message["content"]) == ("Hm.", "Here.")
    parts = lines(client, GENERATE)
    assert "".join(part.get("thinking", "") for part in parts) == "Hm."
    assert "".join(part["response"] for part in parts) == "Here."
    whole(client, CHAT, think=False)
    assert engine.llm.tokenizer.decode(engine.prompt).endswith("<think></think>")


def test_requests_without_a_prompt_load_the_model(client) -> None:
    body = whole(client, CHAT, messages=[])
    assert (body["done"], body["done_reason"], body["message"]["content"]) == (True, "load", "")
    body = whole(client, GENERATE, prompt="", keep_alive=0)
    assert (body["done"], body["done_reason"], body["response"]) == (True, "unload", "")


def test_the_model_is_described(client, llm) -> None:
    [model] = client.get("/api/tags").json()["models"]
    assert (model["name"], model["model"], model["details"]["format"]) == ("tiny", "tiny", "safetensors")
    assert model["size"] == sum(file.stat().st_size for file in Path(llm.llm.resolved.model).glob("*.safetensors")) > 0
    [loaded] = client.get("/api/ps").json()["models"]
    assert loaded["name"] == "tiny" and loaded["context_length"] == llm.llm.resolved.max_context
    for name in ("tiny", "tiny:latest"):
        shown = client.post("/api/show", json={"model": name}).json()
        architecture = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{architecture}.context_length"] == llm.llm.resolved.max_context
        assert shown["capabilities"] == ["completion"]
    assert client.get("/api/version").json()["version"].count(".") == 2
    assert whole(client, CHAT, model="tiny:latest", options=GREEDY)["model"] == "tiny:latest"


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"model": "gpt"}, "`gpt` is not served here"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]},
            "`messages[0].images` is not supported",
        ),
        (GENERATE, {"images": ["aGk="]}, "`images` is not supported"),
        (GENERATE, {"suffix": "x"}, "`suffix` is not supported"),
        (GENERATE, {"template": "x"}, "`template`"),
        (GENERATE, {"context": [1]}, "`context`"),
        (GENERATE, {"options": {"mirostat": 1}}, "`options.mirostat` is not supported"),
        (GENERATE, {"options": {"typical_p": 0.5}}, "`options.typical_p`"),
        (GENERATE, {"options": {"temprature": 1}}, "`options.temprature`"),
        (GENERATE, {"options": {"num_predict": 51}}, "`options.num_predict`"),
        (GENERATE, {"options": {"num_predict": 51}, "raw": True}, "`options.num_predict`"),
        (CHAT, {"options": {"temperature": "hot"}}, "`options.temperature`"),
        (CHAT, {"format": "xml"}, "`format`"),
        (CHAT, {"tools": [LOOK]}, "`tools`"),
        (CHAT, {"think": True}, "`think`"),
        (CHAT, {"logprobs": True}, "`logprobs`"),
        ("/api/embed", {}, "no embedding output"),
        ("/v1/embeddings", {"input": "a"}, "no embedding output"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_refusals_have_ollamas_format(llm, path, body, named, stream) -> None:
    client = TestClient(build_app(llm, ServerOptions(names=("tiny",), max_tokens=50)))
    given = {"messages": ASK} if path == CHAT else {"prompt": "Hello"}
    response = client.post(path, json={**given, "stream": stream, **body})
    assert response.status_code == (404 if "model" in body else 400), response.text
    error = response.json()["error"]
    message = error["message"] if path.startswith("/v1/") else error
    assert named in message


def test_keys_are_required_here_too(llm) -> None:
    client = TestClient(build_app(llm, ServerOptions(api_keys=("key",))))
    response = client.get("/api/tags")
    assert response.status_code == 401 and isinstance(response.json()["error"], str)
