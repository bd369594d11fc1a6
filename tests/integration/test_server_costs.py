"""Requests whose fields would stall all others are refused, or cost little."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from outrider import LLM, SamplingParams
from outrider.server.api.conversation import Conversation
from outrider.server.api.requests import ChatRequest
from outrider.server.app import build_app
from outrider.server.options import ServerOptions

VOCABULARY = 101


@pytest.fixture(scope="module")
def client(llm) -> TestClient:
    return TestClient(build_app(llm, ServerOptions(names=("tiny",), max_waiting=4096)))


COSTLY: dict[str, tuple[dict[str, Any], str]] = {
    "stop strings": ({"stop": ["a" * 15_000 + str(n) for n in range(256)], "n": 16}, "stop"),
    "banned words": ({"bad_words": ["word " * 3000] * 256}, "bad_words"),
    "a bias for many samples": ({"logit_bias": {str(n): 1 for n in range(49_000)}, "n": 64}, "logit_bias"),
    "a bias for many prompts": (
        {"logit_bias": {str(n): 1 for n in range(49_000)}, "prompt": ["a"] * 64},
        "logit_bias",
    ),
    "a choice of tokens for many samples": ({"allowed_token_ids": [5] * 49_000, "n": 64}, "allowed_token_ids"),
    "lists of the prompt for many choices": (
        {"prompt": [5] * 100, "prompt_logprobs": 100, "n": 128},
        "prompt_logprobs",
    ),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_field_is_refused_by_name(client, name: str) -> None:
    fields, param = COSTLY[name]
    began = time.monotonic()
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param and "at most" in answer.json()["error"]["message"]
    assert time.monotonic() - began < 10


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
BEYOND: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"n": 129}, "n"),
    (CHAT, {"n": 129}, "n"),
    (TEXT, {"prompt": ["a"] * 2049}, "prompt"),
    (TEXT, {"stop": ["a"] * 257}, "stop"),
    (TEXT, {"bad_words": ["a"] * 257}, "bad_words"),
    (TEXT, {"logprobs": 101}, "logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 101}, "top_logprobs"),
    (CHAT, {"prompt_logprobs": 101}, "prompt_logprobs"),
    (CHAT, {"tools": [TOOL] * 129}, "tools"),
    (TEXT, {"cache_salt": "a" * 257}, "cache_salt"),
    (TEXT, {"guided_regex": "a" * 131073}, "guided_regex"),
]


@pytest.mark.parametrize("path, fields, param", BEYOND, ids=[f"{param} {path}" for path, _, param in BEYOND])
def test_a_field_beyond_its_limit_is_named(client, path: str, fields: dict[str, Any], param: str) -> None:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    answer = client.post(path, json={**given, "max_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and f"`{param}`" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path, fields, param, lists",
    [
        (CHAT, {"prompt_logprobs": 3, "n": 2}, "prompt_logprobs", 1),
        (TEXT, {"prompt_logprobs": 3, "n": 2}, "prompt_logprobs", 2),
        (TEXT, {"logprobs": 3, "echo": True, "n": 2}, "logprobs", 2),
    ],
)
def test_lists_of_the_prompt_are_bounded(
    client, path: str, fields: dict[str, Any], param: str, lists: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "a" * 9}]} if path == CHAT else {"prompt": "a" * 9}
    )
    answer = client.post(path, json={**given, "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    entries = 4 * lists * answer.json()["usage"]["prompt_tokens"]
    monkeypatch.setattr("outrider.server.api.costs.MAX_PROMPT_LOGPROBS", entries)
    assert client.post(path, json={**given, "max_tokens": 1, **fields}).status_code == 200
    monkeypatch.setattr("outrider.server.api.costs.MAX_PROMPT_LOGPROBS", entries - 1)
    answer = client.post(path, json={**given, "max_tokens": 1, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert f"takes {entries} entries" in answer.json()["error"]["message"]


def test_a_long_prediction_is_cut_to_the_context(client, llm) -> None:
    encoded: list[int] = []
    tokenizer = llm.llm.tokenizer
    whole = tokenizer.encode

    def encode(text: str, *options: Any, **more: Any) -> list[int]:
        encoded.append(len(text))
        return whole(text, *options, **more)

    tokenizer.encode = encode
    try:
        fields = {"prompt": "a", "max_tokens": 4, "prediction": {"type": "content", "content": "ab" * 500_000}}
        assert client.post("/v1/completions", json=fields).status_code == 200
    finally:
        del tokenizer.encode
    assert max(encoded) <= 8 * llm.llm.resolved.max_context


def test_lists_of_the_prompt_are_computed_once(client, llm, monkeypatch) -> None:
    counted: list[int] = []
    runner = llm.engine.runner
    whole = runner._prompt_logprobs
    monkeypatch.setattr(runner, "_prompt_logprobs", lambda *given: counted.append(1) or whole(*given))
    fields = {"prompt": [5, 6, 7, 8], "max_tokens": 1, "n": 4, "prompt_logprobs": 1, "seed": 1}
    choices = client.post("/v1/completions", json=fields).json()["choices"]
    assert len(counted) == 1
    assert len(choices) == 4 and all(choice["prompt_logprobs"] == choices[0]["prompt_logprobs"] for choice in choices)
    assert len(choices[0]["prompt_logprobs"]) == 4


def test_banned_words_are_tokenized_once_for_all_samples(model, monkeypatch) -> None:
    llm = LLM(str(model))
    whole, encoded = llm.tokenizer.encode, []
    monkeypatch.setattr(
        llm.tokenizer, "encode", lambda text, *given, **more: encoded.append(text) or whole(text, *given, **more)
    )
    llm.generate([5, 6], SamplingParams(n=8, max_tokens=2, bad_words=["ab", "cd"]))
    assert len(encoded) == 4  # with and without a space


def test_a_request_that_waits_keeps_no_decoded_body(llm) -> None:
    """A body of 4 MB held 119 MB until its answer was complete."""
    context = build_app(llm, ServerOptions(names=("tiny",))).state.context
    message = {"role": "user", "content": [{"type": "text", "text": "a"}] * 20}
    request = msgspec.convert({"model": "tiny", "messages": [message]}, ChatRequest)
    conversation = Conversation(request, context)
    prepared = asyncio.run(conversation.prepare())
    assert prepared.tokens and not request.messages and not conversation.tools.messages
