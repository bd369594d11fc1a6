"""Limits of connections: time-outs for slow clients, and their number.

A request that arrives too slowly (receive time-out) gets status 408, and its connection is closed. So is that of a
client that does not read its response (send time-out). Connections beyond the limit get status 503.
"""

from __future__ import annotations

import asyncio
import resource
from http import HTTPStatus

import h11
import msgspec
from starlette.types import Message, Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

from .api.errors import ApiError

MAX_FILES = 65_536  # open files that are asked for at most
ACCEPTED_AT_ONCE = 32  # connections that the event loop accepts before it closes those that are too many
# Open files that are no connections: about 25 of the process itself, and connections that are being refused.
RESERVED_FILES = 128


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


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with time limits that uvicorn lacks; `timed_protocol` sets them.

    receive_seconds: for the head of a request, and for the rest of a body whose request was answered already.
    idle_seconds: for a new connection to send its first byte.
    send_seconds: without progress while a response is being sent, because the client does not read it.
    max_connections: open connections, from which on new ones are refused.
    """

    receive_seconds: float
    idle_seconds: float
    send_seconds: float
    max_connections: int
    timer: asyncio.TimerHandle | None = None
    send_timer: asyncio.TimerHandle | None = None
    unsent = 0  # bytes that waited when the timer was started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.write(encode_error(too_many_connections(self.max_connections)))
            transport.close()
            return
        # Report every byte that the operating system does not take, and hold further events back.
        transport.set_write_buffer_limits(high=0)
        self.timer = self.loop.call_later(self.idle_seconds, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def _watch_sending(self) -> None:
        self.unsent = self.transport.get_write_buffer_size()
        self.send_timer = self.loop.call_later(self.send_seconds, self._check_sending)

    def _check_sending(self) -> None:
        if self.transport.get_write_buffer_size() < self.unsent:
            self._watch_sending()
        else:
            self.transport.abort()  # to close it would wait for the client

    def _stop_send_timer(self) -> None:
        if self.send_timer is not None:
            self.send_timer.cancel()
            self.send_timer = None

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        begins = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_timer()
        elif begins:
            self._stop_timer()
            self.timer = self.loop.call_later(self.receive_seconds, self._timed_out)

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _timed_out(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self.transport.write(encode_error(timeout_error(self.receive_seconds, "the head")))
            self.transport.close()
        elif self.cycle.response_complete:
            self.transport.close()
        else:  # TimedReceive limits the body of a request that is being handled
            self.timer = self.loop.call_later(self.receive_seconds, self._timed_out)


def timed_protocol(receive_seconds: float, idle_seconds: float, send_seconds: float) -> type[asyncio.Protocol]:
    """Return the protocol with these limits. uvicorn takes a class."""
    limits: dict[str, object] = {"max_connections": connection_limit()}
    limits |= {"receive_seconds": receive_seconds, "idle_seconds": idle_seconds, "send_seconds": send_seconds}
    return type("Protocol", (TimedProtocol,), limits)


def connection_limit() -> int:
    """Return how many connections the limit of open files allows, after raising it as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    else:
        allowed = MAX_FILES if soft == resource.RLIM_INFINITY else soft
    return max(allowed - RESERVED_FILES, 1)


def too_many_connections(limit: int) -> ApiError:
    message = f"{limit} connections are open already: retry later"
    return ApiError(503, message, kind="server_error", headers={"Retry-After": "1"})


def encode_error(error: ApiError) -> bytes:
    """Encode an error as a whole HTTP response, for a request that never reached the application."""
    body = msgspec.json.encode(error.body())
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
