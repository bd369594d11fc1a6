"""Web pages of other sites: refused, unless their origin is allowed (CORS)."""

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


# ---- foreign hosts, origins and types ----


def local(llm: Any, *origins: str, **options: Any) -> TestClient:
    """Return a client whose connection seems to end at a loopback address."""
    app = build_app(llm, ServerOptions(names=("tiny",), allow_origins=origins, **options))

    async def at_loopback(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "server": ("127.0.0.1", 8000)}, receive, send)

    return TestClient(at_loopback, base_url="http://localhost:8000")


FOREIGN = {"Origin": "https://evil.example"}


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate", "/pause", "/tokenize"])
def test_a_page_of_another_site_cannot_call_the_server(llm, path) -> None:
    client = local(llm)
    for origin in ("https://evil.example", "null", "http://localhost:9999", "https://localhost.evil.example"):
        response = client.post(path, json=ASK, headers={"Origin": origin})
        assert response.status_code == 403 and origin in response.text
    assert not llm.paused
    rebound = client.post(path, json=ASK, headers={"Host": "evil.example:8000", "Origin": "http://evil.example:8000"})
    assert rebound.status_code == 403 and "evil.example" in rebound.text
    assert not llm.paused


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:1", "app.localhost", "127.1.2.3"]
)
def test_names_of_this_machine_are_accepted(llm, host) -> None:
    assert local(llm).post("/v1/completions", json=ASK, headers={"Host": host}).status_code == 200


def test_the_servers_own_page_may_call_it(llm) -> None:
    for host, origin in (("localhost:8000", "http://localhost:8000"), ("[::1]:80", "http://[::1]")):
        response = local(llm).post("/v1/completions", json=ASK, headers={"Host": host, "Origin": origin})
        assert response.status_code == 200


def test_allowed_origins_and_keys_admit_other_hosts(llm) -> None:
    behind = {"Host": "app.example"}
    assert local(llm).post("/v1/completions", json=ASK, headers=behind).status_code == 403
    assert local(llm, PAGE).post("/v1/completions", json=ASK, headers=behind).status_code == 200
    assert local(llm, "*").post("/v1/completions", json=ASK, headers={**behind, **FOREIGN}).status_code == 200
    key = {"Authorization": "Bearer key"}
    keyed = local(llm, api_keys=("key",))
    assert keyed.post("/v1/completions", json=ASK, headers={**behind, **key}).status_code == 200
    assert keyed.post("/v1/completions", json=ASK, headers={**key, **FOREIGN}).status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_a_body_of_another_type_is_refused(llm, kind) -> None:
    client = local(llm)
    body = b'{"prompt": "a", "max_tokens": 1, "stream": false}'
    response = client.post("/v1/completions", content=body, headers={"Content-Type": kind})
    assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]
    # curl sends a form type by default, and Ollama's examples do not change it.
    assert client.post("/api/generate", content=body, headers={"Content-Type": kind}).status_code != 415
    own = {"Origin": "http://localhost:8000"}
    assert client.post("/api/generate", content=body, headers={"Content-Type": kind, **own}).status_code == 415
    for accepted in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"):
        assert (
            client.post(
                "/v1/completions", content=body.replace(b', "stream": false', b""), headers={"Content-Type": accepted}
            ).status_code
            == 200
        )


def test_health_says_when_the_engine_is_paused(llm) -> None:
    client = local(llm)
    assert client.get("/health").json() == {"status": "ok"}
    assert client.post("/pause").status_code == 200
    try:
        response = client.get("/health")
        assert (response.status_code, response.json()) == (200, {"status": "paused"})
    finally:
        client.post("/resume")
    assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://a b", ""])
def test_an_invalid_origin_is_rejected(origin) -> None:
    with pytest.raises(UserError, match="origin"):
        ServerOptions(allow_origins=(origin,))
