"""Server-sent events: the first one decides the status, and a client that hangs up ends the work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import as_api_error, error_event

Result = TypeVar("Result")


class HungUpError(Exception):
    """The client is gone: nobody is there to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do it, unless the client hangs up before it is done: then it ends where it stands."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(hang_up(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUpError
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
