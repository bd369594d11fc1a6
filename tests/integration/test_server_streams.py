"""Streams: they equal the whole response, report failures, and end when the client disconnects."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from live_server import serving, unanswered

from waiting import TIMEOUT, counted_steps, wait_until, wait_until_idle

MESSAGES = [{"role": "user", "content": "Hello"}]
ENDLESS = {"temperature": 0, "ignore_eos": True, "max_tokens": 24, "stream": True}
ENGINE = {"max_requests": 8, "speculate": "ngram:adaptive=no"}


def lines(response: Any) -> list[str]:
    text = response.text
    assert text.endswith("\n\n")
    return [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]


@pytest.fixture(scope="module")
def ask(client) -> Any:
    """Return the chunks of a stream that ended with [DONE]."""

    def post(path: str, **fields: Any) -> list[dict[str, Any]]:
        given = {"messages": MESSAGES} if "chat" in path else {"prompt": "once upon "}
        response = client.post(path, json={**given, **ENDLESS, **fields})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, last = lines(response)
        assert last == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    return post


@pytest.fixture(scope="module")
def whole(client) -> Any:
    def post(path: str, **fields: Any) -> dict[str, Any]:
        given = {"messages": MESSAGES} if "chat" in path else {"prompt": "once upon "}
        return client.post(path, json={**given, **ENDLESS, "stream": False, **fields}).json()

    return post


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """Return the texts by choice."""
    found: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        found[choice["index"]] = found.get(choice["index"], "") + piece
    return found


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "fields", [{}, {"n": 3, "temperature": 1, "seed": 4}, {"stop": ["e", "a"], "temperature": 1, "seed": 2}]
)
def test_the_chunks_add_up_to_the_whole_response(ask, whole, path, fields) -> None:
    chunks, answer = ask(path, **fields), whole(path, **fields)
    said = {c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]}
    assert texts(chunks) == said
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    ends = {c["index"]: c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]}
    assert ends == {choice["index"]: choice["finish_reason"] for choice in answer["choices"]}
    assert all("usage" not in chunk for chunk in chunks)


def test_the_first_chunk_of_a_chat_has_the_role(ask) -> None:
    first, *rest = ask(CHAT)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in rest)
    assert rest[-1]["choices"][0]["finish_reason"] == "length"


def test_a_chunk_contains_all_tokens_of_a_step(ask) -> None:
    """There is one chunk per step, so with drafts there are fewer chunks than tokens."""
    chunks = ask(TEXT, max_tokens=80)
    body = ask(TEXT, max_tokens=80, stream_options={"include_usage": True})[-1]
    kept = body["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    assert kept > 0
    assert len(chunks) <= 80 - kept


def test_usage_is_in_the_last_chunk(ask, whole) -> None:
    *chunks, last = ask(CHAT, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 24
    assert last["usage"]["total_tokens"] == whole(CHAT)["usage"]["total_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks)
    *chunks, last = ask(CHAT, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_logprobs_are_streamed_with_their_tokens(ask, whole, path) -> None:
    asked = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    chunks, answer = ask(path, **asked), whole(path, **asked)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    [choice] = answer["choices"]
    for part in choice["logprobs"]:
        if choice["logprobs"][part] is not None:
            assert [entry for piece in pieces for entry in piece[part]] == choice["logprobs"][part]


def test_echo_is_in_the_first_chunk(ask, whole) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 4}
    chunks, answer = ask(TEXT, **fields), whole(TEXT, **fields)
    assert texts(chunks)[0] == answer["choices"][0]["text"]
    offsets = [at for chunk in chunks for at in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == answer["choices"][0]["logprobs"]["text_offset"]


def test_several_prompts_are_streamed_together(ask, whole) -> None:
    prompts = ["the cat ", "a dog, "]
    said = {choice["index"]: choice["text"] for choice in whole(TEXT, prompt=prompts)["choices"]}
    assert texts(ask(TEXT, prompt=prompts)) == said


def test_a_trace_is_streamed_step_by_step(ask) -> None:
    chunks = ask(CHAT, trace=True, max_tokens=60)
    steps = [step for chunk in chunks if "speculation" in chunk for step in chunk["speculation"]["steps"]]
    assert "".join(text for step in steps for text in step["text"]) == texts(chunks)[0]
    assert any(step["accepted"] for step in steps)
    assert all("speculation" not in chunk for chunk in ask(CHAT))


def test_an_invalid_streaming_request_gets_an_error_status(client) -> None:
    response = client.post(TEXT, json={**ENDLESS, "prompt": [5] * 500})
    assert response.status_code == 400
    assert "500 tokens" in response.json()["error"]["message"]


def test_a_failing_stream_ends_with_an_error_event(client, llm, monkeypatch) -> None:
    step, count, begun = llm.engine.runner.step, 0, threading.Event()

    def sometimes(given: Any) -> Any:
        nonlocal count
        count += 1
        if count > 4:
            begun.wait(TIMEOUT)
            raise RuntimeError("a secret of the inside")
        return step(given)

    monkeypatch.setattr(llm.engine.runner, "step", sometimes)
    asked = {**ENDLESS, "prompt": "once upon ", "speculate": False}
    with (
        serving(llm, names=("tiny",)) as address,
        httpx.stream("POST", f"{address}{TEXT}", json=asked, timeout=TIMEOUT) as response,
    ):
        assert response.status_code == 200
        received = response.iter_lines()
        first = next(received)
        begun.set()
        *_, body, last = [first, *filter(None, received)]
    assert last == "data: [DONE]"
    assert json.loads(body.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "secret" not in body
    count = 10
    failed = client.post(TEXT, json={**ENDLESS, "stream": False, "prompt": "once upon "})
    assert failed.status_code == 500
    assert set(failed.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_frees_its_pages(llm, stream) -> None:
    asked = {**ENDLESS, "prompt": ["once upon ", "a time "], "n": 2, "max_tokens": 100, "stream": stream}
    with serving(llm, names=("tiny",)) as address, counted_steps(llm, 8) as permits:
        with unanswered(address, TEXT, asked) as line:
            wait_until(lambda: llm.load.running == 4)
            if stream:
                assert line.recv(4096).startswith(b"HTTP/1.1 200 ")
        wait_until_idle(llm, permits)
        assert llm.load.pages_used == 0
        assert not llm.engine.parents
