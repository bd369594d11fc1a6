"""The request log, request ids, and unexpected failures."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from live_server import serving, unanswered
from starlette.testclient import TestClient

from outrider.server.app import build_app
from outrider.server.options import ServerOptions
from waiting import counted_steps, wait_until, wait_until_idle

ASK: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def test_the_request_id_is_returned(client) -> None:
    assert client.get("/version", headers={"X-Request-Id": "abc-123"}).headers["x-request-id"] == "abc-123"
    first, second = (client.get("/version").headers["x-request-id"] for _ in range(2))
    assert first != second and len(first) == 32
    assert client.get("/version", headers={"X-Request-Id": "a b\tc"}).headers["x-request-id"] not in ("a b\tc", "")
    refused = client.get("/no/such/path", headers={"X-Request-Id": "abc-124"})
    assert refused.status_code == 404 and refused.headers["x-request-id"] == "abc-124"


def test_the_json_log_line_has_token_counts_and_no_text(llm, caplog) -> None:
    caplog.set_level(logging.INFO, "outrider")
    client = TestClient(build_app(llm, ServerOptions(log_json=True)))
    client.get("/health")
    asked = {**ASK, "prompt": "a secret", "max_tokens": 9}
    body = client.post("/v1/completions", json=asked, headers={"X-Request-Id": "mine"}).json()
    (line,) = [json.loads(each.message) for each in caplog.records if each.name == "outrider.server.requests"]
    assert line["request_id"] == "mine" and line["path"] == "/v1/completions" and line["status"] == 200
    assert line["prompt_tokens"] == body["usage"]["prompt_tokens"] and line["output_tokens"] == 9
    assert line["finish_reason"] == "length" and 0 < line["first_token_seconds"] <= line["seconds"]
    assert "secret" not in json.dumps(line) and body["choices"][0]["text"] not in json.dumps(line)


def test_the_text_log_line_has_status_and_token_counts(llm, caplog) -> None:
    caplog.set_level(logging.INFO, "outrider")
    client = TestClient(build_app(llm, ServerOptions()))
    client.post("/v1/completions", json={**ASK, "max_tokens": 9})
    (line,) = [each.message for each in caplog.records if each.name == "outrider.server.requests"]
    assert line.startswith("POST /v1/completions 200 ") and "output_tokens=9" in line and "\n" not in line


@pytest.mark.parametrize("stream", [True, False])
def test_the_log_line_of_an_aborted_request_counts_its_prompt(llm, caplog, stream: bool) -> None:
    caplog.set_level(logging.INFO, "outrider")
    with serving(llm, names=("tiny",)) as address, counted_steps(llm, 2) as permits:
        with unanswered(address, "/v1/completions", {**ASK, "max_tokens": 200, "stream": stream}) as line:
            wait_until(lambda: llm.load.running == 1)
            if stream:
                assert line.recv(4096).startswith(b"HTTP/1.1 200 ")
        wait_until_idle(llm, permits)
    lines = [each.message for each in caplog.records if each.name == "outrider.server.requests"]
    (line,) = [each for each in lines if "/v1/completions" in each]
    assert "finish_reason=abort" in line and "prompt_tokens=3" in line


def test_an_unexpected_exception_becomes_500_with_the_request_id(llm, monkeypatch, caplog) -> None:
    client = TestClient(build_app(llm, ServerOptions()))
    monkeypatch.setattr(client.app.state.context.metrics, "render", lambda: 1 / 0)
    answer = client.get("/metrics", headers={"X-Request-Id": "mine"})
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "mine"
    assert answer.json()["error"]["type"] == "server_error" and "zero" not in answer.text
    assert any("mine" in each.message and each.exc_info for each in caplog.records)


def test_a_path_cannot_forge_a_log_line(llm, caplog) -> None:
    caplog.set_level(logging.INFO, "outrider.server.requests")
    client = TestClient(build_app(llm, ServerOptions()))
    client.get("/x%0aINFO%20GET%20/v1/models%20200%1b[31m%c2%9b")
    [line] = [record.getMessage() for record in caplog.records if record.name == "outrider.server.requests"]
    assert line.isprintable() and line.isascii()
    method, path, status, *_ = line.split(" ")
    assert (method, status) == ("GET", "404") and path.startswith("/x%0AINFO%20GET")


def test_a_client_that_hangs_up_within_its_body_is_no_failure(llm, caplog) -> None:
    caplog.set_level(logging.INFO)
    app = build_app(llm, ServerOptions())
    messages = [
        {"type": "http.request", "body": b'{"prompt": ', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 499
    assert "Traceback" not in caplog.text and "POST /v1/completions 499" in caplog.text


def test_a_path_with_a_slash_too_many_is_unknown(client) -> None:
    response = client.get("/health/", follow_redirects=False, headers={"Host": "evil.example"})
    assert response.status_code == 404 and "location" not in response.headers


@pytest.mark.parametrize("key", ["schl\u00fcssel", "\u9375", "caf\u00e9 \u2603"])
def test_keys_may_contain_any_characters(llm, key) -> None:
    client = TestClient(build_app(llm, ServerOptions(api_keys=(key,))))
    accepted = client.get("/v1/models", headers={b"Authorization": b"Bearer " + key.encode()})
    assert accepted.status_code == 200
    for wrong in (key.encode() + b"x", key.encode("utf-16"), b"\xff"):
        response = client.get("/v1/models", headers={b"Authorization": b"Bearer " + wrong.replace(b"\0", b"")})
        assert response.status_code == 401
