"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider import LLM, SamplingParams
from outrider.server.app import build_app
from outrider.server.options import ServerOptions

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
ENDLESS = {"temperature": 0, "ignore_eos": True, "max_completion_tokens": 12}
ENGINE = {"max_requests": 8}


@pytest.fixture(scope="module")
def client(llm) -> TestClient:
    return TestClient(build_app(llm, ServerOptions(names=("tiny",), max_tokens=60)))


@pytest.fixture(scope="module")
def ask(client) -> Any:
    def post(messages: Any = MESSAGES, **fields: Any) -> dict[str, Any]:
        response = client.post("/v1/chat/completions", json={"messages": messages, **ENDLESS, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    return post


def engine_text(plain: LLM, prompt: str) -> str:
    tokens = plain.tokenizer.encode(prompt, add_special=False)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return plain.generate([tokens], params)[0].completions[0].text


def test_a_chat_response_has_openais_fields(ask, llm, plain) -> None:
    answer = ask()
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    [choice] = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": engine_text(plain, "[system] Be brief.|[user] Hello|[assistant] "),
        "refusal": None,
    }
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("length", None, None)
    assert answer["usage"]["prompt_tokens"] == len(llm.llm.chat_prompt(MESSAGES))
    assert answer["usage"]["completion_tokens"] == 12


def test_a_response_message_is_accepted_in_the_next_request(ask, plain) -> None:
    said = ask()["choices"][0]["message"]
    follow = ask([*MESSAGES, {**said, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}])
    prompt = f"[system] Be brief.|[user] Hello|[assistant] {said['content']}|[assistant] "
    assert follow["choices"][0]["message"]["content"] == engine_text(plain, prompt)


def test_content_parts_and_the_developer_role_are_accepted(ask) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    body = ask([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert body["choices"] == ask()["choices"]


def test_continue_final_message_continues_the_last_message(ask, plain) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    found = ask(messages, continue_final_message=True)["choices"][0]["message"]["content"]
    assert found == engine_text(plain, "[system] Be brief.|[user] Hello|[assistant] Well, ")
    without = ask(messages, add_generation_prompt=False)
    # The tiny template opens an answer whatever it is told.
    assert without["choices"] == ask(messages)["choices"]


def test_chat_logprobs_contain_the_bytes_of_each_token(ask) -> None:
    [choice] = ask(logprobs=True, top_logprobs=3, temperature=1, seed=1, skip_special_tokens=False)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 12
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] <= entry["top_logprobs"][0]["logprob"] <= 0
    [bare] = ask(logprobs=True)["choices"]
    assert [entry["top_logprobs"] for entry in bare["logprobs"]["content"]] == [[]] * 12


def test_n_returns_several_choices(ask) -> None:
    answer = ask(n=3, temperature=1, seed=9)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["completion_tokens"] == 36


def test_max_tokens_of_a_chat_defaults_to_the_rest_of_the_context(client, llm) -> None:
    fields = {"messages": MESSAGES, "ignore_eos": True}
    assert client.post("/v1/chat/completions", json=fields).json()["usage"]["completion_tokens"] == 60
    free = TestClient(build_app(llm, ServerOptions(names=("tiny",))))
    usage = free.post("/v1/chat/completions", json=fields).json()["usage"]
    assert usage["total_tokens"] == llm.llm.resolved.max_context


def test_max_tokens_is_accepted_for_max_completion_tokens(client) -> None:
    fields = {"messages": MESSAGES, "ignore_eos": True, "max_tokens": 5}
    assert client.post("/v1/chat/completions", json=fields).json()["usage"]["completion_tokens"] == 5


def test_response_format_constrains_the_answer(ask) -> None:
    found = ask(structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False)
    assert found["choices"][0]["message"]["content"] in ("yes", "no")
    assert found["choices"][0]["finish_reason"] == "stop"


IGNORED = {
    "user": "me",
    "safety_identifier": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "verbosity": "low",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "high",
    "enable_thinking": True,
}
NEUTRAL = {
    "store": False,
    "service_tier": "auto",
    "verbosity": "medium",
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "priority": 0,
    "functions": None,
    "response_format": {"type": "text"},
}


def test_fields_without_effect_are_named_in_a_header(client, ask) -> None:
    def post(**fields: Any) -> Any:
        return client.post("/v1/chat/completions", json={"messages": MESSAGES, **ENDLESS, **fields})

    response = post(**IGNORED)
    assert response.json()["choices"] == ask()["choices"]
    assert set(response.headers["x-outrider-ignored"].split(", ")) == set(IGNORED)
    assert post(stream=True, store=True).headers["x-outrider-ignored"] == "store"
    response = post(**NEUTRAL)
    assert response.json()["choices"] == ask()["choices"]
    assert "x-outrider-ignored" not in response.headers
    text = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "user": "me"})
    assert text.headers["x-outrider-ignored"] == "user"


def test_more_messages_than_tokens_of_the_context_are_not_rendered(client, llm, monkeypatch) -> None:
    monkeypatch.setattr(llm.llm.tokenizer, "chat_prompt", lambda *_, **__: pytest.fail("the chat was rendered"))
    count = llm.llm.resolved.max_context + 1
    response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}] * count})
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"
    assert f"`messages` has {count} messages and the context {count - 1} tokens" in response.json()["error"]["message"]
