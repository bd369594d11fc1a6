"""Receive time-out: a request that arrives too slowly gets status 408, and its connection is closed."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import h11
import msgspec
from starlette.types import Message, Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

from .api.errors import ApiError


def timeout_error(seconds: float, part: str) -> ApiError:
    message = f"{part} of the request took longer than {seconds:g} s to arrive: send it in one go"
    return ApiError(408, message, code="request_timeout", headers={"Connection": "close"})


class TimedReceive:
    """An ASGI `receive` that raises 408 if the body is not complete in time; later messages have no limit."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self.receive, self.seconds = receive, seconds
        self._deadline: float | None = asyncio.get_running_loop().time() + seconds  # None: the body is complete

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self.receive()
        except TimeoutError:
            raise timeout_error(self.seconds, "the body") from None
        if not message.get("more_body", False):
            self._deadline = None
        return message


def timed_protocol(seconds: float, idle_seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with time limits that uvicorn lacks.

    seconds: for the head of a request, and for the rest of a body whose request was answered already.
    idle_seconds: for a new connection to send its first byte.
    """

    class Protocol(H11Protocol):
        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
            super().connection_made(transport)
            self.timer = self.loop.call_later(idle_seconds, transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            begins = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
            super().data_received(data)
            if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
                self._stop_timer()
            elif begins:
                self._stop_timer()
                self.timer = self.loop.call_later(seconds, self._timed_out)

        def _stop_timer(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

        def _timed_out(self) -> None:
            if self.conn.their_state is h11.IDLE:
                self.transport.write(encode_error(timeout_error(seconds, "the head")))
                self.transport.close()
            elif self.cycle.response_complete:
                self.transport.close()
            else:  # TimedReceive limits the body of a request that is being handled
                self.timer = self.loop.call_later(seconds, self._timed_out)

    return Protocol


def encode_error(error: ApiError) -> bytes:
    """Encode an error as a whole HTTP response, for a request that never reached the application."""
    body = msgspec.json.encode(error.body())
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
