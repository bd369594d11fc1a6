"""Web pages of other origins: CORS."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider.errors import UserError
from outrider.server.app import build_app
from outrider.server.options import ServerOptions

PAGE = "https://app.example"
ASK = {"prompt": "a", "max_tokens": 1, "user": "me"}


def client_of(llm: Any, *origins: str, **options: Any) -> TestClient:
    return TestClient(build_app(llm, ServerOptions(names=("tiny",), allow_origins=origins, **options)))


def test_an_allowed_page_may_call_the_server(llm) -> None:
    client = client_of(llm, PAGE, "http://localhost:3000", api_keys=("key",))
    wanted = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    asked = client.options(
        "/v1/completions", headers={**wanted, "Access-Control-Request-Headers": "authorization, content-type"}
    )
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in asked.headers["access-control-allow-headers"]
    answer = client.post("/v1/completions", json=ASK, headers={"Origin": PAGE, "Authorization": "Bearer key"})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
    assert "x-outrider-ignored" in answer.headers["access-control-expose-headers"]
    # The page can read errors too.
    refused = client.post("/v1/completions", json=ASK, headers={"Origin": PAGE})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == PAGE
    other = client.options("/v1/completions", headers={**wanted, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_a_star_allows_every_page(llm) -> None:
    answer = client_of(llm, "*").post("/v1/completions", json=ASK, headers={"Origin": PAGE})
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"


def test_without_the_option_there_are_no_cors_headers(llm) -> None:
    answer = client_of(llm).get("/v1/models")
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://a b", ""])
def test_an_invalid_origin_is_rejected(origin) -> None:
    with pytest.raises(UserError, match="origin"):
        ServerOptions(allow_origins=(origin,))
