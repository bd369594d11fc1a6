"""Who may come in, with how much, and when it is full: keys, sizes, seats."""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..async_llm import AsyncLLM
from .api.errors import ApiError, error_response
from .options import ServerOptions
from .receive_timeout import Body

# What tells nothing and costs nothing: probes, and the page, which asks for a key itself.
OPEN_PATHS = frozenset({"/", "/health", "/version", "/favicon.ico"})
OPEN_FOLDERS = ("/page/",)
LONGEST_WAIT = 60  # seconds that Retry-After asks for at most
REMEMBERED = 32  # requests that ended last, from which the pace is taken


@dataclass(eq=False)
class Seat:
    """A place in the queue or in the engine, until it is given back."""

    guard: Guard
    count: int
    taken: bool = True

    def release(self) -> None:
        """Once or more often, with the same effect."""
        if self.taken:
            self.taken = False
            self.guard.leave(self.count)


class Guard:
    """Decides before the engine hears of a request. Lives on the event loop's thread."""

    def __init__(self, options: ServerOptions, llm: AsyncLLM) -> None:
        self.options, self.llm = options, llm
        self.draining = False
        self.seats = 0  # sequences that were let in and have not ended
        self.refused: Counter[str] = Counter()  # by reason
        self._digests = [digest(key) for key in options.api_keys]
        self._ends: deque[float] = deque(maxlen=REMEMBERED)
        self._turned_away = 0  # since a seat was last given back

    def check_key(self, headers: Mapping[str, str]) -> None:
        """Compare with every key, whichever fits, so that the time tells nothing."""
        if not self._digests:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = digest(key.strip())
        fits = False
        for known in self._digests:
            fits |= hmac.compare_digest(given, known)
        if not (fits and scheme.lower() == "bearer"):
            raise self._refusal(
                "key",
                ApiError(
                    401,
                    "the API key is missing or wrong: send `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                ),
            )

    def check_size(self, size: int) -> None:
        limit = self.options.max_body_bytes
        if size > limit:
            message = f"the request is larger than {limit} bytes: send less"
            raise self._refusal("body", ApiError(413, message, code="request_too_large"))

    def check_lengths(self, prompt_tokens: int, max_tokens: int | None, name: str = "max_tokens") -> None:
        """What the server's own limits say; what the context holds is the engine's to say. `name`: of the field."""
        limit = self.options.max_prompt_tokens
        if limit is not None and prompt_tokens > limit:
            message = f"the prompt has {prompt_tokens} tokens and this server takes {limit}: shorten it"
            raise self._refusal("prompt", ApiError(400, message, code="context_length_exceeded"))
        limit = self.options.max_tokens
        if limit is not None and max_tokens is not None and max_tokens > limit:
            message = f"`{name}` is {max_tokens}: this server gives {limit} at most"
            raise self._refusal("max_tokens", ApiError(400, message, param=name))

    @asynccontextmanager
    async def seat(self, count: int = 1) -> AsyncIterator[Seat]:
        """A place for `count` sequences while the block runs."""
        seat = self.take(count)
        try:
            yield seat
        finally:
            seat.release()

    def take(self, count: int = 1) -> Seat:
        """The same for those who give it back themselves, as a stream does when it ends."""
        if not self.llm.alive:
            message = "the engine has stopped: this server is about to be replaced"
            raise self._refusal("dead", ApiError(503, message, kind="server_error", headers=self._wait(1)))
        if self.draining:
            message = "the server is shutting down: try another one, or again later"
            headers = self._wait(self.options.drain_seconds)
            raise self._refusal("draining", ApiError(503, message, kind="server_error", headers=headers))
        if self.seats and self._queued + count > self.options.max_waiting:
            self._turned_away += 1
            message = f"{self._queued} requests are waiting already: try again later"
            headers = self._wait(self.pace * self._turned_away)
            error = ApiError(429, message, code="queue_full", kind="rate_limit_error", headers=headers)
            raise self._refusal("queue", error)
        self.seats += count
        return Seat(self, count)

    def leave(self, count: int) -> None:
        self.seats -= count
        self._turned_away = 0
        self._ends.append(time.monotonic())

    def drain(self) -> None:
        """From now on nobody comes in."""
        self.draining = True

    @property
    def pace(self) -> float:
        """Seconds from one request's end to the next, of late."""
        if not self._ends:
            return 1.0
        return (time.monotonic() - self._ends[0]) / len(self._ends)

    @property
    def _queued(self) -> int:
        """Those let in whom the engine does not run."""
        load = self.llm.load
        # While nobody waits in the engine, it will take whoever is on the way to it.
        room = load.running if load.waiting else self.llm.llm.resolved.max_requests
        return max(self.seats - room, 0)

    @staticmethod
    def _wait(seconds: float) -> dict[str, str]:
        return {"Retry-After": str(min(max(math.ceil(seconds), 1), LONGEST_WAIT))}

    def _refusal(self, reason: str, error: ApiError) -> ApiError:
        self.refused[reason] += 1
        return error


class Gate:
    """ASGI middleware: no key, no service; and no body is read beyond the limits of size and time."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self.app, self.guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if not is_open(scope["method"], scope["path"]):
                self.guard.check_key(headers)
            length = headers.get("content-length", "")
            self.guard.check_size(int(length) if length.isdecimal() else 0)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        size = 0
        arriving = Body(receive, self.guard.options.receive_seconds)

        async def limited() -> Message:
            """A body that did not tell its length is refused where it passes the limit."""
            nonlocal size
            message = await arriving()
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                self.guard.check_size(size)
            return message

        await self.app(scope, limited, send)


def is_open(method: str, path: str) -> bool:
    """Whether everybody may ask. A browser sends OPTIONS without the key, to learn whether it may send one."""
    return method == "OPTIONS" or path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


def digest(key: str) -> bytes:
    """All of one length, so that comparing tells not even that."""
    return hashlib.sha256(key.encode()).digest()
