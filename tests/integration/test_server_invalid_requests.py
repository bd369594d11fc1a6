"""Invalid and unsupported requests: the error names the field and the remedy; no field is silently ignored."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from outrider import AsyncLLM
from outrider.errors import UserError
from outrider.server.api.requests import ChatRequest, CompletionRequest
from outrider.server.app import build_app
from outrider.server.options import ServerOptions

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def client(llm) -> TestClient:
    return TestClient(build_app(llm, ServerOptions(names=("tiny",), max_tokens=50, max_prompt_tokens=40)))


@pytest.fixture(scope="module")
def refusal(client) -> Any:
    def ask(path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
        given = {"messages": [USER]} if path == CHAT else {"prompt": "a"} if path == TEXT else {}
        response = client.post(path, json={**given, **body})
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert not error["message"].endswith(".")
        return error

    return ask


BOTH: dict[str, Any] = {
    "temperature": "hot",
    "n": 0,
    "top_p": 1.5,
    "top_k": -2,
    "min_p": 2,
    "seed": "x",
    "presence_penalty": 3,
    "frequency_penalty": -3,
    "repetition_penalty": 0,
    "logit_bias": {"5": 200},
    "allowed_token_ids": [],
    "stop": 5,
    "bad_words": "x",
    "ignore_eos": "yes",
    "stream": 1,
    "speculate": 3,
    "speculate_width": -1,
    "prediction": "text",
    "model": 4,
    "max_tokens": -1,
    "response_format": {"type": "xml"},
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", BOTH)
def test_an_invalid_value_is_named(refusal, path, name) -> None:
    error = refusal(path, {name: BOTH[name]})
    assert error["param"].startswith(name)
    assert f"`{name}" in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"suffix": "end"}, "suffix"),
        (TEXT, {"best_of": 4}, "best_of"),
        (TEXT, {"logprobs": True}, "logprobs"),
        (TEXT, {"logprobs": 101}, "logprobs"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": ["a", 5]}, "prompt"),
        (TEXT, {"prompt": [[5], "a"]}, "prompt"),
        (TEXT, {"prompt": None}, "prompt"),
        (TEXT, {"prompt": ["a"] * 5, "n": 128}, "prompt"),
        (TEXT, {"speculate": ""}, "speculate"),
        (TEXT, {"stop": [""]}, "stop"),
        (TEXT, {"use_beam_search": True}, "use_beam_search"),
        (TEXT, {"priority": 3}, "priority"),
        (TEXT, {"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        (TEXT, {"logit_bias": {"five": 1}}, "logit_bias"),
        (TEXT, {"logit_bias": {"5000": 1}}, "logit_bias"),
        (TEXT, {"speculate_width": 1, "num_speculative_tokens": 2}, "num_speculative_tokens"),
        (TEXT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (TEXT, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        (TEXT, {"max_tokens": 51}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 51}, "max_completion_tokens"),
        (CHAT, {"max_tokens": 51}, "max_tokens"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [USER, {**USER, "mood": "good"}]}, "messages[1].mood"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"audio": {"voice": "a"}}, "audio"),
        (CHAT, {"functions": []}, "functions"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"reasoning_format": "xml"}, "reasoning_format"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"chat_template": "x"}, "chat_template"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" not in value else "",
)
def test_an_unsupported_field_is_named(refusal, path, body, param) -> None:
    error = refusal(path, body)
    assert error["param"] == param
    assert f"`{param}`" in error["message"]


def test_errors_use_the_field_names_of_the_request(refusal) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        assert f"between 0 and `{name}` (10)" in refusal(CHAT, {"min_tokens": 20, name: 10})["message"]
    shaped = {"guided_regex": "a", "ignore_eos": True}
    assert "`ignore_eos` and `guided_regex`" in refusal(TEXT, shaped)["message"]


def test_a_misspelled_field_gets_a_suggestion(refusal) -> None:
    error = refusal(TEXT, {"temprature": 0.5})
    assert (error["param"], error["code"]) == ("temprature", "unknown_field")
    assert "`temperature`" in error["message"]
    assert "remove it" in refusal(TEXT, {"zebra": 0.5})["message"]


def test_errors_of_the_engine_reach_the_client(refusal) -> None:
    assert "no method called `magic`" in refusal(TEXT, {"speculate": "magic"})["message"]
    assert "41 tokens" in refusal(TEXT, {"prompt": [5] * 41})["message"]
    assert "the vocabulary ends at" in refusal(TEXT, {"prompt": [5, 5000]})["message"]
    assert "prompt is empty" in refusal(TEXT, {"prompt": "", "add_special_tokens": False})["message"]
    assert "not loaded" in refusal(TEXT, {"speculate": "os.path"})["message"]


def test_an_unknown_model_gets_404(refusal) -> None:
    for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
        error = refusal(path, {"model": "gpt", **({"tokens": [5]} if path == "/detokenize" else {})}, status=404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "`tiny`" in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'"\xff"', b"[" * 100_000, b'{"n": 1e999}'])
def test_a_body_that_is_not_a_request_gets_400(client, body) -> None:
    response = client.post(TEXT, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(("the body is not", "`n` is invalid"))


def test_unknown_paths_and_methods_get_404_and_405(client) -> None:
    for response, status in ((client.get("/v2"), 404), (client.get(TEXT), 405)):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "`/v1/moderations` does not exist" in client.post("/v1/moderations", json={}).json()["error"]["message"]
    assert "`GET` of `/v1/completions`" in client.get(TEXT).json()["error"]["message"]
    assert "`/api/pull` does not exist" in client.post("/api/pull", json={}).json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "param", "accepted"),
    [
        (CHAT, {"messages": [{"role": "alien", "content": "hi"}]}, "messages[0].role", "`user`"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "`text`",
        ),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "`json_schema`"),
        (CHAT, {"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type", "`function`"),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0].type", "`function`"),
        ("/v1/responses", {"input": [{"role": "alien", "content": "hi"}]}, "input[0].role", "`user`"),
    ],
)
def test_the_values_that_a_field_accepts_are_listed(refusal, path, body, param, accepted) -> None:
    error = refusal(path, body)
    assert error["param"] == param and accepted in error["message"]


def test_a_prompt_beyond_the_context_has_the_code_of_openai(model) -> None:
    llm = AsyncLLM(model, max_context=32)
    client = TestClient(build_app(llm, ServerOptions()))
    for prompt in ([5] * 40, [[5], [5] * 40]):
        error = client.post(TEXT, json={"prompt": prompt, "max_tokens": 2}).json()["error"]
        assert error["code"] == "context_length_exceeded"
    assert client.post(TEXT, json={"prompt": [[]], "max_tokens": 2}).json()["error"]["code"] is None
    llm.close()


def test_invalid_unicode_is_rejected(client) -> None:
    response = client.post(TEXT, content=b'{"prompt": "\\ud800"}')
    assert response.status_code == 400


@pytest.mark.parametrize(
    ("field", "value"), [("port", 70000), ("max_waiting", 0), ("drain_seconds", -1), ("names", ("",))]
)
def test_invalid_server_options_are_rejected(field, value) -> None:
    with pytest.raises(UserError, match=f"`{field}`"):
        ServerOptions(**{field: value})


def test_openapi_lists_every_field(client) -> None:
    body = client.get("/openapi.json").json()
    assert body["openapi"].startswith("3.1")
    for kind in (CompletionRequest, ChatRequest):
        listed = body["components"]["schemas"][kind.__name__]
        assert set(listed["properties"]) == set(kind.__struct_fields__)
        assert listed["additionalProperties"] is False
    text = json.dumps(body)
    for name in msgspec.json.decode(text)["components"]["schemas"]:
        assert name.isidentifier()
    references = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert references <= set(body["components"]["schemas"])
    assert {TEXT, CHAT, "/v1/models", "/tokenize", "/health"} <= set(body["paths"])


@pytest.mark.parametrize("bad", [[], [5] * 39, [5] * 200])
@pytest.mark.parametrize("stream", [False, True])
def test_of_several_prompts_the_refused_one_is_numbered(model, bad: list[int], stream: bool) -> None:
    llm = AsyncLLM(model, max_context=32)
    client = TestClient(build_app(llm, ServerOptions(max_prompt_tokens=40)))
    body = {"prompt": [[5, 6], bad, [7]], "max_tokens": 2, "stream": stream}
    response = client.post(TEXT, json=body)
    assert '"message":"prompt 1 ' in response.text
    alone = client.post(TEXT, json={**body, "prompt": [bad], "stream": False})
    assert alone.status_code == 400 and alone.json()["error"]["message"].startswith("the prompt ")
    wrong = client.post(TEXT, json={**body, "stop_token_ids": [10**6], "prompt": [[5], [6]], "stream": False})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "stop_token_ids"
    llm.close()
