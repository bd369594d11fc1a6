"""Requests as bytes on a socket: path traversal, header and pipelining tricks, ranges, variants of the key."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from outrider.server.app import build_app, listen, serve
from outrider.server.options import ServerOptions
from waiting import TIMEOUT

KEY = "a-secret"
ALLOWED = f"Authorization: Bearer {KEY}\r\n"
BODY = json.dumps({"prompt": [5, 6, 7], "max_tokens": 2})


@pytest.fixture(scope="module")
def port(llm) -> Iterator[int]:
    """The port of a server as `outrider serve` runs it, with a key."""
    options = ServerOptions(port=0, api_keys=(KEY,), receive_seconds=5, names=("tiny",))
    app, listener = build_app(llm, options), listen(options)
    thread = threading.Thread(target=serve, args=(app, options, listener), daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    app.state.server.should_exit = True
    thread.join(TIMEOUT)
    assert not thread.is_alive()


def exchange(port: int, data: str | bytes) -> bytes:
    """Send bytes, and return all that arrives until the server closes the connection."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)) as line:
        line.sendall(data.encode("latin-1") if isinstance(data, str) else data)
        received = b""
        try:
            while piece := line.recv(2**16):
                received += piece
        except ConnectionResetError:
            pass
        return received


def statuses(answer: bytes) -> list[int]:
    return [int(part[1:4]) for part in answer.split(b"HTTP/1.1")[1:]]


CLOSE = "Connection: close\r\n"


def get(path: str, headers: str = "", last: str = CLOSE) -> str:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}{last}\r\n"


def post(headers: str, body: str = BODY) -> str:
    opening = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{opening}{CLOSE}{headers}\r\n{body}"


# ---- paths ----


@pytest.mark.parametrize(
    "path",
    [
        "/page/../options.py",
        "/page/%2e%2e/options.py",
        "/page/..%2foptions.py",
        "/page/%2e%2e%5coptions.py",
        "/page/....//options.py",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/vendor/../../options.py",
        "/page/%00index.html",
        "/page/index.html%00.js",
        "//page/../v1/models",
        "/page/../v1/models",
        "/health/../v1/models",
        "/PAGE/../v1/models",
        "/v1/responses/../models",
        "http://localhost/v1/models",
    ],
)
def test_no_path_leaves_the_page_or_goes_around_the_key(port: int, path: str) -> None:
    answer = exchange(port, get(path))
    assert statuses(answer) in ([400], [401], [404])
    assert b"ServerOptions" not in answer and b"root:" not in answer and b'"data"' not in answer


# ---- keys ----


@pytest.mark.parametrize(
    "headers",
    [
        "",
        f"Authorization: {KEY}\r\n",
        f"Authorization: Basic {KEY}\r\n",
        f"Authorization: Bearer {KEY}x\r\n",
        f"Authorization: Bearer {KEY[:-1]}\r\n",
        f"Authorization: Bearer {KEY.upper()}\r\n",
        f"Authorization: Bearer{KEY}\r\n",
        "Authorization: Bearer \r\n",
        "Authorization: Bearer\r\n",
        f"Authorization: Bearer x {KEY}\r\n",
        f"Authorization: Bearer x\r\nAuthorization: Bearer {KEY}\r\n",
        f"X-Api-Key: {KEY}\r\n",
        f"Cookie: key={KEY}\r\n",
        f"X-Authorization: Bearer {KEY}\r\n",
        "Authorization: Bearer " + "a" * 20_000 + "\r\n",
    ],
)
def test_only_the_key_itself_is_the_key(port: int, headers: str) -> None:
    assert statuses(exchange(port, get("/v1/models", headers))) == [401]
    assert statuses(exchange(port, get(f"/v1/models?api_key={KEY}", headers))) == [401]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_name_of_the_scheme_has_no_case(port: int, scheme: str) -> None:
    assert statuses(exchange(port, get("/v1/models", f"Authorization: {scheme} {KEY}\r\n"))) == [200]


# ---- pipelining and framing ----


def test_every_pipelined_request_needs_its_own_key(port: int) -> None:
    first = get("/v1/models", ALLOWED, "") + get("/v1/models", last="")
    answer = exchange(port, first + get("/v1/models", ALLOWED))
    assert statuses(answer) == [200, 401, 200]


def test_the_rest_of_a_body_is_no_request(port: int) -> None:
    """A body that looks like a request is read as a body, also where the answer comes before it was read."""
    inner = get("/v1/models", ALLOWED)
    assert statuses(exchange(port, post(f"Content-Length: {len(inner)}\r\n", inner)))[0] == 401
    answer = exchange(port, post(f"Content-Length: {len(inner)}\r\n{ALLOWED}", inner))
    assert statuses(answer) == [400] and b'"data"' not in answer


CHUNKED = f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n"
SMUGGLED = CHUNKED + get("/v1/models", ALLOWED)


@pytest.mark.parametrize(
    "headers, body",
    [
        (f"Content-Length: {len(BODY)}\r\nContent-Length: 5\r\n", BODY),
        (f"Content-Length: 5, {len(BODY)}\r\n", BODY),
        ("Content-Length: -1\r\n", BODY),
        (f"Content-Length: +{len(BODY)}\r\n", BODY),
        ("Content-Length: 0x10\r\n", BODY),
        ("Content-Length: 9999999999999999999999\r\n", BODY),
        ("Transfer-Encoding: gzip\r\n", BODY),
        ("Transfer-Encoding: chunked, chunked\r\n", CHUNKED),
        ("Transfer-Encoding: xchunked\r\n", CHUNKED),
        ("Transfer-Encoding : chunked\r\n", CHUNKED),
        ("Transfer-Encoding: chunked\r\n", "zz\r\n" + BODY),
        ("Transfer-Encoding: chunked\r\n", "-5\r\n" + BODY),
        (" Content-Length: 5\r\n", BODY),
        ("X-A: a\0b\r\n", BODY),
        ("X-A: " + "a" * 200_000 + "\r\n", BODY),
    ],
)
def test_ambiguous_framing_is_refused(port: int, headers: str, body: str) -> None:
    answer = exchange(port, post(ALLOWED + headers, body))
    assert len(statuses(answer)) <= 1 and set(statuses(answer)) <= {400, 401, 413}
    assert b'"choices"' not in answer


def test_of_two_lengths_the_chunks_count(port: int) -> None:
    """As RFC 9112 says, and the connection is closed or goes on behind the last chunk, not within the body."""
    headers = ALLOWED + f"Content-Length: {len(SMUGGLED)}\r\nTransfer-Encoding: chunked\r\n"
    answer = exchange(port, post(headers, SMUGGLED))
    assert statuses(answer) in ([400], [200], [200, 200])
    headers = ALLOWED + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"
    assert statuses(exchange(port, post(headers, CHUNKED))) in ([400], [200])


# ---- ranges ----


@pytest.mark.parametrize(
    "span", ["0-3", "3-", "-4", "99999999-", "5-2", "a-b", ",".join(f"{n}-{n + 1}" for n in range(1000)), "0-,0-,0-,0-"]
)
def test_ranges_never_make_an_answer_larger(port: int, span: str) -> None:
    whole = exchange(port, get("/page/settings.js"))
    answer = exchange(port, get("/page/settings.js", f"Range: bytes={span}\r\n"))
    assert statuses(whole) == [200] and statuses(answer)[0] in (200, 206, 400, 416)
    assert len(answer) < len(whole) + 500
