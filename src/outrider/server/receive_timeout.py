"""Clients that send a request byte by byte: each gets so many seconds, then 408, and the connection is closed."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import h11
import msgspec
from starlette.types import Message, Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

from .api.errors import ApiError


def too_slow(seconds: float, part: str) -> ApiError:
    message = f"{part} of the request took longer than {seconds:g} s to arrive: send it in one go"
    return ApiError(408, message, code="request_timeout", headers={"Connection": "close"})


class Body:
    """Receives for an application, whose body must be there in time. What comes after it may take for ever."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self.receive, self.seconds = receive, seconds
        self._deadline: float | None = asyncio.get_running_loop().time() + seconds  # None: the body is there

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self.receive()
        except TimeoutError:
            raise too_slow(self.seconds, "the body") from None
        if not message.get("more_body", False):
            self._deadline = None
        return message


def protocol(seconds: float, silence: float) -> type[asyncio.Protocol]:
    """For uvicorn, which waits without end for headers, and for what an answered request still sends.

    seconds: for a request that has begun. silence: for one that never does.
    """

    class Protocol(H11Protocol):
        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
            super().connection_made(transport)
            self.timer = self.loop.call_later(silence, transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            begins = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
            super().data_received(data)
            if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
                self._stop()
            elif begins:
                self._stop()
                self.timer = self.loop.call_later(seconds, self._out_of_time)

        def _stop(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

        def _out_of_time(self) -> None:
            if self.conn.their_state is h11.IDLE:
                self.transport.write(plain_answer(too_slow(seconds, "the head")))
                self.transport.close()
            elif self.cycle.response_complete:
                self.transport.close()
            else:  # whoever reads the body has a clock of its own
                self.timer = self.loop.call_later(seconds, self._out_of_time)

    return Protocol


def plain_answer(error: ApiError) -> bytes:
    """An error as it goes over the wire, for those whom no application serves."""
    body = msgspec.json.encode(error.body())
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
