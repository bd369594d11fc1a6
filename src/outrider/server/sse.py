"""Server-sent events: the first one decides the status, and a client that hangs up ends the work."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .connection import HungUpError, while_connected
from .errors import as_api_error, error_event

DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies may not gather what should flow

log = logging.getLogger(__name__)


class EventStream(Response):
    """Sends each event as it comes. What fails before the first one is an ordinary error, with its own status."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._flow(send))
        except HungUpError:
            return

    async def _flow(self, send: Send) -> None:
        async with aclosing(self.events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                told = as_api_error(error)
                if told is not error and told.status == 500:
                    log.exception("a stream broke")
                await send({"type": "http.response.body", "body": error_event(told), "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
