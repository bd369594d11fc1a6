"""The gateway and the ASGI bridge: forwarding, retries, and errors when a replica is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from outrider.scale.gateway import (
    REPLICA_HEADER,
    TRIES,
    ForwardedRequest,
    Gateway,
    ReplicaLostError,
    Reply,
    collect_response,
    merge_metrics,
    stream_response,
)
from outrider.scale.router import RoutingHints
from outrider.server.admission import AdmissionMiddleware, RequestChecks
from outrider.server.api.errors import ApiError
from outrider.server.options import ServerOptions

Pair = tuple[bytes, bytes]
JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def start(headers: list[tuple[bytes, bytes]], status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def piece(body: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Script:
    """Replicas that send scripted messages, or fail as scripted."""

    def __init__(
        self, *takes: Sequence[Message | BaseException | Callable[[], Coroutine[Any, Any, None]] | None]
    ) -> None:
        self.takes = list(takes)
        self.asked: list[ForwardedRequest] = []
        self.hints: list[RoutingHints] = []
        self.left: list[bool] = []  # for each stream, whether it was left before its end
        self.replies: list[Reply] = []

    @asynccontextmanager
    async def stream(
        self, request: ForwardedRequest, hints: RoutingHints
    ) -> AsyncIterator[AsyncIterator[list[Message]]]:
        self.asked.append(request)
        self.hints.append(hints)
        take = self.takes.pop(0)

        async def play() -> AsyncIterator[list[Message]]:
            for step in take:
                if isinstance(step, BaseException):
                    raise step
                if callable(step):
                    await step()
                elif step is None:
                    yield []
                else:
                    yield [step]

        early = True
        try:
            yield play()
            early = False
        finally:
            self.left.append(early)

    async def ask_all(self, request: ForwardedRequest) -> list[Reply]:
        self.asked.append(request)
        return self.replies


class Client:
    """An ASGI client: sends a request in pieces, and collects the response."""

    def __init__(self, *body: bytes) -> None:
        self.body = list(body) or [b""]
        self.sent: list[Message] = []
        self.leaving = asyncio.Event()

    async def receive(self) -> Message:
        if self.body:
            piece = self.body.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self.body)}
        await self.leaving.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def text(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


def scope(path: str = "/v1/completions", root: str = "", headers: Sequence[Pair] = ()) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": root + path,
        "root_path": root,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1"), *headers],
        "state": object(),
    }


def gateway(replicas: Script, **options: Any) -> AdmissionMiddleware:
    return AdmissionMiddleware(Gateway(replicas, 4), RequestChecks(ServerOptions(max_body_bytes=100, **options)))


def ask(
    replicas: Script, *body: bytes, path: str = "/v1/completions", root: str = "", headers: Sequence[Pair] = ()
) -> Client:
    async def run() -> Client:
        client = Client(*body)
        await asyncio.wait_for(gateway(replicas)(scope(path, root, headers), client.receive, client.send), 5)
        return client

    return asyncio.run(run())


def test_request_and_response_are_forwarded_unchanged() -> None:
    replicas = Script([start(JSON, 201), piece(b"{", True), piece(b"}", False)])
    client = ask(replicas, b'{"prompt": "abcd', b'efgh"}')
    assert client.sent == [start(JSON, 201), piece(b"{", True), piece(b"}", False)]
    assert replicas.asked[0].body == b'{"prompt": "abcdefgh"}' and len(replicas.hints[0].blocks) == 2
    assert "state" not in replicas.asked[0].scope
    assert replicas.left == [False]


def test_the_request_id_is_left_to_the_proxy() -> None:
    replicas = Script([start([*JSON, (b"X-Request-Id", b"abc")]), piece(b"{}", False)])
    replicas.replies = [Reply("one", 200, [(b"x-request-id", b"abc"), *JSON], b"{}")]
    assert ask(replicas, b"{}").sent[0] == start(JSON)
    assert ask(replicas, b"{}", path="/health").sent[0] == start(JSON)


def test_a_replica_lost_before_its_response_is_retried() -> None:
    replicas = Script([ReplicaLostError()], [ReplicaLostError()], [start(JSON), piece(b"ok", False)])
    client = ask(replicas, b"{}")
    assert client.status == 200 and client.text == b"ok" and len(replicas.asked) == 3


def test_a_request_that_a_replica_died_of_is_not_sent_to_another() -> None:
    replicas = Script([None, ReplicaLostError()], [start(JSON), piece(b"ok", False)])
    client = ask(replicas, b"{}", headers=[(b"x-request-id", b"abc")])
    assert client.status == 500 and len(replicas.asked) == 1
    error = json.loads(client.text)["error"]
    assert error["code"] == "replica_lost" and "the request `abc`, which is not retried" in error["message"]


def test_the_key_is_checked_before_the_body_is_read() -> None:
    async def run(key: bytes) -> Client:
        client, headers = Client(b"{}", b" "), [(b"authorization", b"Bearer " + key)]
        app = gateway(Script([start(JSON), piece(b"ok", False)]), api_keys=("right",))
        await asyncio.wait_for(app(scope("/v1/completions", "/at", headers), client.receive, client.send), 5)
        return client

    wrong = asyncio.run(run(b"wrong"))
    assert wrong.status == 401 and len(wrong.body) == 2
    assert asyncio.run(run(b"right")).status == 200


def test_a_body_that_never_ends_is_refused() -> None:
    async def run() -> Client:
        client = Client(b"{", b"}")
        client.body.append(b"")

        async def receive() -> Message:
            if len(client.body) < 2:
                await asyncio.sleep(60)
            return await client.receive()

        app = gateway(Script(), receive_seconds=0.05)
        await asyncio.wait_for(app(scope(), receive, client.send), 5)
        return client

    assert asyncio.run(run()).status == 408


def test_deeply_nested_json_is_forwarded() -> None:
    replicas = Script([start(JSON, 400), piece(b"no", False)])
    checks = RequestChecks(ServerOptions())
    body = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

    async def run() -> Client:
        client = Client(body)
        await AdmissionMiddleware(Gateway(replicas, 4), checks)(scope(), client.receive, client.send)
        return client

    assert asyncio.run(run()).status == 400 and replicas.hints[0].blocks == ()


def test_an_unavailable_replica_is_avoided() -> None:
    refusal = [start([(REPLICA_HEADER, b"sick")], 503), piece(b"no", False)]
    replicas = Script(refusal, [start(JSON), piece(b"ok", False)])
    client = ask(replicas, b'{"prompt": "abcd"}')
    assert client.text == b"ok" and replicas.left == [True, False]
    assert replicas.hints[1] == RoutingHints(replicas.hints[0].blocks, frozenset({"sick"}))


def test_if_all_replicas_are_unavailable_the_last_response_is_returned() -> None:
    refusal = [start([(REPLICA_HEADER, b"sick")], 503), piece(b"no", False)]
    client = ask(Script(*[refusal] * TRIES), b"{}")
    assert client.status == 503 and client.text == b"no"


def test_if_all_replicas_are_lost_503_is_returned() -> None:
    client = ask(Script(*[[ReplicaLostError()]] * TRIES), b"{}")
    assert client.status == 503 and b"failed before they accepted" in client.text
    assert (b"retry-after", b"1") in client.sent[0]["headers"]


def test_a_broken_stream_ends_with_an_error_and_without_done() -> None:
    replicas = Script([start(EVENTS), piece(b"data: {}\n\n", True), ReplicaLostError()])
    client = ask(replicas, b"{}")
    first, last = client.text.removesuffix(b"\n\n").split(b"\n\n")
    assert first == b"data: {}"
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "replica_lost"
    assert b"[DONE]" not in client.text and client.sent[-1]["more_body"] is False
    assert len(replicas.asked) == 1


def test_a_broken_response_does_not_look_complete() -> None:
    replicas = Script([start(JSON), piece(b"{", True), ReplicaLostError()])
    with pytest.raises(ConnectionError):
        ask(replicas, b"{}")


def test_a_replica_lost_after_its_response_is_ignored() -> None:
    client = ask(Script([start(EVENTS), piece(b"data: [DONE]\n\n", False), ReplicaLostError()]), b"{}")
    assert client.text == b"data: [DONE]\n\n"


def test_an_error_response_reaches_the_client() -> None:
    client = ask(Script([ApiError(429, "full", headers={"Retry-After": "1"})]), b"{}")
    assert client.status == 429 and json.loads(client.text)["error"]["message"] == "full"


def test_an_internal_failure_reveals_no_details() -> None:
    client = ask(Script([ValueError("secret")]), b"{}")
    assert client.status == 500 and b"secret" not in client.text
    client = ask(Script([start(EVENTS), piece(b"data: {}\n\n", True), ValueError("secret")]), b"{}")
    assert client.status == 200 and b"replica_lost" in client.text and b"secret" not in client.text


def test_a_disconnect_cancels_the_request() -> None:
    async def run() -> tuple[Script, Client]:
        client = Client(b"{}")

        async def wait() -> None:
            client.leaving.set()
            await asyncio.sleep(60)

        replicas = Script([start(EVENTS), wait, piece(b"never", False)])
        await asyncio.wait_for(gateway(replicas)(scope(), client.receive, client.send), 5)
        return replicas, client

    replicas, client = asyncio.run(run())
    assert replicas.left == [True] and client.text == b""


def test_a_body_above_the_limit_is_not_read_to_its_end() -> None:
    replicas = Script()
    client = ask(replicas, b"x" * 60, b"x" * 60, b"x" * 60)
    assert client.status == 413 and len(client.body) == 1 and not replicas.asked


def test_health_is_ok_while_one_replica_is() -> None:
    replicas = Script()
    replicas.replies = [Reply("a", 503, [], b"red"), Reply("b", 200, [], b"green")]
    assert ask(replicas, path="/health").text == b"green"
    replicas.replies.pop()
    assert ask(replicas, path="/health").status == 503
    replicas.replies.pop()
    assert ask(replicas, path="/health").status == 503


@pytest.mark.parametrize(("path", "root"), [("/pause", ""), ("/resume", "/mounted"), ("/reset_prefix_cache", "")])
def test_a_request_to_all_replicas_fails_if_one_fails(path: str, root: str) -> None:
    replicas = Script()
    replicas.replies = [Reply("a", 200, [], b"yes"), Reply("b", 500, [], b"no")]
    assert ask(replicas, path=path, root=root).status == 500


def test_metrics_have_the_replica_as_label() -> None:
    page = '# HELP q Queue.\n# TYPE q gauge\nq{{model="m"}} {0}\n# HELP n N.\n# TYPE n counter\nn_total {0}.0\n'
    kind = [(b"content-type", b"text/plain"), (b"content-length", b"9")]
    merged = merge_metrics(
        [Reply("a", 200, kind, page.format(1).encode()), Reply("b", 200, kind, page.format(2).encode())]
    )
    assert merged.headers == kind[:1]
    assert merged.body.decode().splitlines() == [
        "# HELP q Queue.",
        "# TYPE q gauge",
        'q{model="m",replica="a"} 1',
        'q{model="m",replica="b"} 2',
        "# HELP n N.",
        "# TYPE n counter",
        'n_total{replica="a"} 1.0',
        'n_total{replica="b"} 2.0',
    ]


def test_metrics_need_the_api_key_of_the_replicas() -> None:
    assert merge_metrics([Reply("a", 200, [], b""), Reply("b", 401, [], b"key")]).status == 401


class ReplicaApp:
    """An application as a replica runs it."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.app = Starlette(
            routes=[
                Route("/echo", self.echo, methods=["POST"]),
                Route("/endless", self.endless, methods=["POST"]),
                Route("/broken", self.broken, methods=["POST"]),
            ]
        )

    async def echo(self, request: Request) -> Response:
        return PlainTextResponse(await request.body())

    async def endless(self, request: Request) -> Response:
        async def count() -> AsyncIterator[str]:
            try:
                while True:
                    yield "tick"
                    await asyncio.sleep(0.001)
            finally:
                self.closed.set()

        return StreamingResponse(count())

    async def broken(self, request: Request) -> Response:
        raise ValueError("oops")


def test_an_app_answers_a_forwarded_request() -> None:
    reply = asyncio.run(collect_response(ReplicaApp().app, ForwardedRequest(scope("/echo"), b"hello"), "a"))
    assert (reply.replica, reply.status, reply.body) == ("a", 200, b"hello")


def test_an_app_that_fails_after_its_response_does_not_raise() -> None:
    assert asyncio.run(collect_response(ReplicaApp().app, ForwardedRequest(scope("/broken"), b""), "a")).status == 500


def test_an_app_that_fails_without_a_response_raises() -> None:
    async def silent(*_: object) -> None:
        raise ValueError("oops")

    with pytest.raises(ValueError, match="oops"):
        asyncio.run(collect_response(silent, ForwardedRequest(scope("/"), b""), "a"))


def test_closing_the_stream_ends_the_app() -> None:
    async def run() -> int:
        app_under_test, seen = ReplicaApp(), 0
        batches = stream_response(app_under_test.app, ForwardedRequest(scope("/endless"), b""))
        async for batch in batches:
            seen += len(batch)
            if seen > 3:
                break
        await batches.aclose()
        await asyncio.wait_for(app_under_test.closed.wait(), 5)
        return seen

    assert asyncio.run(run()) > 3
