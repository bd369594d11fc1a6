"""HTTP requests as plain data that can be sent to another process, and the ASGI application that answers one there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

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
