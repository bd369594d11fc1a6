"""Server-sent events, and work that ends when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError, as_api_error, error_event

DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not buffer the stream

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class DisconnectedError(Exception):
    """The client closed the connection before the response was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`; if the client disconnects first, cancel it and raise DisconnectedError."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise DisconnectedError
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends each event at once. A failure before the first event becomes an ordinary error response."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        end: bytes = DONE,
        on_error: Callable[[ApiError], bytes] = error_event,
        media_type: str = "text/event-stream",
    ) -> None:
        """Set what is sent. end: sent after the last event; on_error: encodes a failure after the first event."""
        super().__init__(headers=HEADERS, media_type=media_type)
        del self.headers["content-length"]
        self.events, self.end, self.on_error = events, end, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_events(send))
        except DisconnectedError:
            return

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self.events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                api_error = as_api_error(error)
                if api_error is not error and api_error.status == 500:
                    log.exception("a stream failed")
                await send({"type": "http.response.body", "body": self.on_error(api_error), "more_body": True})
            await send({"type": "http.response.body", "body": self.end, "more_body": False})
