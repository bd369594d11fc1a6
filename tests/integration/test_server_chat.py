"""`/v1/chat/completions`: messages in, a message out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider import LLM, AsyncLLM, SamplingParams
from outrider.server.app import build_app
from outrider.server.options import ServerOptions

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
ENDLESS = {"temperature": 0, "ignore_eos": True, "max_completion_tokens": 12}


@pytest.fixture(scope="module")
def llm(model) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(str(model), max_requests=8)
    yield engine
    engine.close()


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


@pytest.fixture(scope="module")
def plain(model) -> LLM:
    """Another engine over the same model, without a server before it."""
    return LLM(str(model))


def engine_text(plain: LLM, prompt: str) -> str:
    tokens = plain.tokenizer.encode(prompt, add_special=False)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return plain.generate([tokens], params)[0].completions[0].text


def test_a_chat_has_openais_shape(ask, llm, plain) -> None:
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


def test_an_answer_can_be_sent_back_as_it_came(ask, plain) -> None:
    said = ask()["choices"][0]["message"]
    follow = ask([*MESSAGES, {**said, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}])
    prompt = f"[system] Be brief.|[user] Hello|[assistant] {said['content']}|[assistant] "
    assert follow["choices"][0]["message"]["content"] == engine_text(plain, prompt)


def test_parts_and_developers(ask) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    told = ask([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert told["choices"] == ask()["choices"]


def test_the_last_message_can_be_continued(ask, plain) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    found = ask(messages, continue_final_message=True)["choices"][0]["message"]["content"]
    assert found == engine_text(plain, "[system] Be brief.|[user] Hello|[assistant] Well, ")
    without = ask(messages, add_generation_prompt=False)
    # The tiny template opens an answer whatever it is told.
    assert without["choices"] == ask(messages)["choices"]


def test_logprobs_have_the_bytes_of_each_token(ask) -> None:
    [choice] = ask(logprobs=True, top_logprobs=3, temperature=1, seed=1, skip_special_tokens=False)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 12
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] <= entry["top_logprobs"][0]["logprob"] <= 0
    [bare] = ask(logprobs=True)["choices"]
    assert [entry["top_logprobs"] for entry in bare["logprobs"]["content"]] == [[]] * 12


def test_several_answers(ask) -> None:
    answer = ask(n=3, temperature=1, seed=9)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["completion_tokens"] == 36


def test_the_default_is_what_is_left_of_the_context(client, llm) -> None:
    fields = {"messages": MESSAGES, "ignore_eos": True}
    assert client.post("/v1/chat/completions", json=fields).json()["usage"]["completion_tokens"] == 60
    free = TestClient(build_app(llm, ServerOptions(names=("tiny",))))
    usage = free.post("/v1/chat/completions", json=fields).json()["usage"]
    assert usage["total_tokens"] == llm.llm.resolved.max_context


def test_the_older_name_of_max_completion_tokens(client) -> None:
    fields = {"messages": MESSAGES, "ignore_eos": True, "max_tokens": 5}
    assert client.post("/v1/chat/completions", json=fields).json()["usage"]["completion_tokens"] == 5


def test_a_format_binds_the_answer(ask) -> None:
    found = ask(structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False)
    assert found["choices"][0]["message"]["content"] in ("yes", "no")
    assert found["choices"][0]["finish_reason"] == "stop"


def test_what_changes_nothing_is_let_through(ask) -> None:
    extras = {
        "user": "me",
        "safety_identifier": "me",
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "store": False,
        "service_tier": "auto",
        "verbosity": "medium",
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "priority": 0,
        "functions": None,
        "response_format": {"type": "text"},
    }
    assert ask(**extras)["choices"] == ask()["choices"]
