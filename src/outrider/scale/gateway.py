"""The gateway in front of the replicas: reads a request, and forwards it to the best replica or to all of them.

A request is forwarded as plain data (`ForwardedRequest`). In the process of the replica, `stream_response` and
`collect_response` run the ASGI application that answers it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..server.api.errors import ApiError, error_event, error_response
from ..server.api.sse import DisconnectedError, while_connected
from .router import RoutingHints, prefix_blocks

# The keys of an ASGI scope that describe the request; the other keys belong to the process that received it.
SCOPE_KEYS = (
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
    "server",
)
REPLICA_HEADER = b"x-outrider-replica"  # response header with the id of the replica
REQUEST_ID_HEADER = b"x-request-id"
TRIES = 3  # replicas that a request is sent to, as long as none of them has begun to process it
UNAVAILABLE = 503  # status of a replica whose engine has stopped, until Ray replaces it
ALL_REPLICAS = frozenset({"/pause", "/resume", "/reset_prefix_cache"})  # requests that must succeed on every replica
HEALTH, METRICS = "/health", "/metrics"
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.+)")  # a line of Prometheus' text format
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ForwardedRequest:
    """One HTTP request with its whole body."""

    scope: dict[str, Any]
    body: bytes = b""

    @property
    def path(self) -> str:
        """The path below the prefix that the application is mounted at."""
        path: str = self.scope["path"]
        return path.removeprefix(self.scope.get("root_path") or "") or "/"


@dataclass(frozen=True)
class Reply:
    """A whole response of one replica."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


async def stream_response(app: ASGIApp, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
    """Yield the messages that `app` sends, in batches as they arrive. Closing the generator acts as a disconnect."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    unread: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # forever: a disconnect cancels the task instead
        raise AssertionError

    async def send(message: Message) -> None:
        messages.put_nowait(message)

    scope = {"type": "http", "asgi": {"version": "3.0"}, "extensions": {}, **request.scope}
    task = asyncio.ensure_future(app(scope, receive, send))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    complete = False
    try:
        while not task.done() or not messages.empty():
            waiting = [await messages.get()]
            while not messages.empty():
                waiting.append(messages.get_nowait())
            batch = [message for message in waiting if message is not None]
            complete = complete or any(is_last(message) for message in batch)
            if batch:
                yield batch
        # An application may report a failure twice: as a response, which was sent already, and as an exception.
        if not complete:
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def collect_response(app: ASGIApp, request: ForwardedRequest, replica: str) -> Reply:
    """Return the whole response, for requests that go to all replicas."""
    status, headers, body = 500, list[tuple[bytes, bytes]](), b""
    async with aclosing(stream_response(app, request)) as batches:
        async for batch in batches:
            for message in batch:
                if message["type"] == "http.response.start":
                    status, headers = message["status"], list(message.get("headers", ()))
                else:
                    body += message.get("body", b"")
    return Reply(replica, status, headers, body)


def is_last(message: Message) -> bool:
    """Return whether a message completes the response."""
    return message["type"] == "http.response.body" and not message.get("more_body", False)


class ReplicaLostError(Exception):
    """The replica died before its response was complete."""


class ReplicaUnavailableError(Exception):
    """The replica runs, but it answered 503. The message is its id."""


class Replicas(Protocol):
    """The replicas, wherever they run. A request that they cannot accept raises ApiError."""

    def stream(
        self, request: ForwardedRequest, hints: RoutingHints
    ) -> AbstractAsyncContextManager[AsyncIterator[list[Message]]]:
        """Stream the response of the best replica, whose first batch is empty: it has accepted the request.

        Leaving the block early cancels the request there.
        """
        ...

    async def ask_all(self, request: ForwardedRequest) -> list[Reply]:
        """Return the responses of all replicas that are alive."""
        ...


class Gateway:
    """An ASGI application. It holds no model; its only state is the router's table of prefixes."""

    def __init__(self, replicas: Replicas, block: int) -> None:
        self.replicas, self.block = replicas, block

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await run_lifespan(receive, send)
            return
        if scope["type"] != "http":
            return  # websockets are not supported: the server closes them

        async def send_without_id(message: Message) -> None:
            """Leave the request id to the proxy of Ray, which adds the same one to every response."""
            if message["type"] == "http.response.start":
                headers = [pair for pair in message.get("headers", ()) if pair[0].lower() != REQUEST_ID_HEADER]
                message = {**message, "headers": headers}
            await send(message)

        await self._respond(scope, receive, send_without_id)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            fields = {name: scope[name] for name in SCOPE_KEYS if name in scope}
            request = ForwardedRequest(fields, await read_body(receive))
            if request.path in ALL_REPLICAS:
                await send_reply(send, worst(await self._ask_all(request)))
            elif request.path == HEALTH:
                await send_reply(send, best(await self._ask_all(request)))
            elif request.path == METRICS:
                await send_reply(send, merge_metrics(await self._ask_all(request)))
            else:
                with suppress(DisconnectedError):
                    await while_connected(receive, self._forward(request, send))
        except ConnectionError:
            raise  # the response has begun: only closing the connection tells the client
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("the gateway failed on %a", scope["path"])
            await error_response(error, scope["path"])(scope, receive, send)

    async def _ask_all(self, request: ForwardedRequest) -> list[Reply]:
        replies = await self.replicas.ask_all(request)
        if not replies:
            raise ApiError(503, "no replica is ready: retry later", kind="server_error", headers={"Retry-After": "1"})
        return replies

    async def _forward(self, request: ForwardedRequest, send: Send) -> None:
        """Forward to one replica; try others as long as none has begun to process the request.

        A request that a replica had begun when it died may be the reason: another replica would die of it too.
        """
        hints = RoutingHints(tuple(prefix_blocks(request.body, self.block)) if request.body else ())
        for remaining in reversed(range(TRIES)):
            response, accepted = ForwardedResponse(send, may_retry=remaining > 0), False
            try:
                async with self.replicas.stream(request, hints) as batches:
                    async for batch in batches:
                        accepted = True  # the first batch is empty: the replica has the request
                        for message in batch:
                            await response.pass_on(message)
                return
            except ReplicaUnavailableError as error:
                hints = replace(hints, avoid=hints.avoid | {str(error)})
            except ReplicaLostError:
                if response.begun:
                    await response.abort()
                    return
                if accepted:
                    reason = f"the replica died while it processed the request{named(request)}, which is not retried"
                    raise ApiError(
                        500, f"{reason}: look for the cause in its log", code="replica_lost", kind="server_error"
                    ) from None
            except Exception:
                if not response.begun:
                    raise
                log.exception("the replica failed during its response")
                await response.abort()
                return
        reason = "the replicas failed before they accepted this request: retry later"
        raise ApiError(503, reason, kind="server_error", headers={"Retry-After": "1"})


class ForwardedResponse:
    """The response that is being forwarded; its state decides how a failure can be reported."""

    def __init__(self, send: Send, may_retry: bool) -> None:
        self.send, self.may_retry = send, may_retry
        self.begun = self.complete = self.is_event_stream = False

    async def pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            if message["status"] == UNAVAILABLE and self.may_retry:
                raise ReplicaUnavailableError(headers.get(REPLICA_HEADER, b"").decode())
            self.begun = True
            self.is_event_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self.complete = self.complete or is_last(message)
        await self.send(message)

    async def abort(self) -> None:
        """Report that the replica failed: as an event in a stream, else by closing the connection."""
        if self.complete:
            return
        if not self.is_event_stream:
            raise ConnectionError("the replica died during its response")
        message = "the replica died during its response: send the request again"
        error = ApiError(503, message, code="replica_lost", kind="server_error")
        await self.send({"type": "http.response.body", "body": error_event(error), "more_body": False})


def named(request: ForwardedRequest) -> str:
    """Return the id of a request in words; nothing if it has none."""
    ids = [value.decode("latin-1") for name, value in request.scope.get("headers", ()) if name == REQUEST_ID_HEADER]
    return f" `{ids[0]}`" if ids else ""


async def read_body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def worst(replies: Sequence[Reply]) -> Reply:
    return max(replies, key=lambda reply: reply.status)


def best(replies: Sequence[Reply]) -> Reply:
    return min(replies, key=lambda reply: reply.status)


def merge_metrics(replies: Sequence[Reply]) -> Reply:
    """Merge the metrics of all replicas, with the replica as a label.

    If one replica refuses, return its response: all replicas have the same API keys.
    """
    refused = [reply for reply in replies if reply.status != 200]
    if refused:
        return refused[0]
    metrics: dict[str, tuple[list[str], list[str]]] = {}  # name -> comments, samples
    for reply in replies:
        metric = ""
        for line in reply.body.decode().splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                metric = line.split(" ", 3)[2]
                comments, _ = metrics.setdefault(metric, ([], []))
                if line not in comments:
                    comments.append(line)
            elif match := SAMPLE.fullmatch(line):
                name, labels, value = match.groups()
                all_labels = ",".join(part for part in (labels, f'replica="{reply.replica}"') if part)
                metrics.setdefault(metric or name, ([], []))[1].append(f"{name}{{{all_labels}}} {value}")
    lines = [line for comments, samples in metrics.values() for line in (*comments, *samples)]
    headers = [(name, value) for name, value in replies[0].headers if name.lower() != b"content-length"]
    return Reply("", 200, headers, "\n".join([*lines, ""]).encode())


async def run_lifespan(receive: Receive, send: Send) -> None:
    """Follow ASGI's lifespan protocol: nothing to set up, nothing to clean up."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def send_reply(send: Send, reply: Reply) -> None:
    await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
    await send({"type": "http.response.body", "body": reply.body, "more_body": False})
