"""An HTTP request as plain data that travels between processes, and an ASGI app that answers one in a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

# What a request is, in ASGI's words. The rest of a scope belongs to the process that made it.
SCOPE = (
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
class WebRequest:
    """One request, read to its end."""

    scope: dict[str, Any]
    body: bytes = b""

    @property
    def path(self) -> str:
        """Below the prefix that the application is mounted at."""
        path: str = self.scope["path"]
        return path.removeprefix(self.scope.get("root_path") or "") or "/"


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


async def respond(app: App, request: WebRequest) -> AsyncGenerator[list[Message], None]:
    """What `app` sends, as it comes, all that waits in one piece. Leaving the loop is the client hanging up."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    unread: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # for ever: a client that hangs up cancels the task
        raise AssertionError

    async def send(message: Message) -> None:
        messages.put_nowait(message)

    scope = {"type": "http", "asgi": {"version": "3.0"}, "extensions": {}, **request.scope}
    task = asyncio.ensure_future(app(scope, receive, send))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    whole = False
    try:
        while not task.done() or not messages.empty():
            waiting = [await messages.get()]
            while not messages.empty():
                waiting.append(messages.get_nowait())
            batch = [message for message in waiting if message is not None]
            whole = whole or any(ends(message) for message in batch)
            if batch:
                yield batch
        # An app may report its failure twice: as an answer, which the client has by now, and as an exception.
        if not whole:
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def answer(app: App, request: WebRequest, replica: str) -> Reply:
    """The answer as a whole, for what is asked of all replicas at once."""
    status, headers, body = 500, list[tuple[bytes, bytes]](), b""
    async with aclosing(respond(app, request)) as batches:
        async for batch in batches:
            for message in batch:
                if message["type"] == "http.response.start":
                    status, headers = message["status"], list(message.get("headers", ()))
                else:
                    body += message.get("body", b"")
    return Reply(replica, status, headers, body)


def ends(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)
