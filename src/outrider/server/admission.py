"""Admission control: API keys, request sizes, and the number of requests that may wait."""

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
from .origins import check_source
from .timeouts import TimedReceive

# Open without an API key: probes, and the playground page, which asks for the key itself.
OPEN_PATHS = frozenset({"/", "/health", "/version", "/favicon.ico"})
OPEN_FOLDERS = ("/page/",)
MAX_RETRY_SECONDS = 60  # upper limit of the Retry-After header
RECENT_ENDS = 32  # finished requests from which the time between two ends is estimated


@dataclass(eq=False)
class AdmissionSlot:
    """Admission of `count` sequences, until `release` is called."""

    admission: Admission
    count: int
    held: bool = True

    def release(self) -> None:
        """Give the slot back; further calls do nothing."""
        if self.held:
            self.held = False
            self.admission.release(self.count)


class RequestChecks:
    """Checks of one request that need no engine: its source, its API key and its size."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.refused: Counter[str] = Counter()  # by reason
        self._digests = [digest(key.encode(errors="surrogateescape")) for key in options.api_keys]

    def check_source(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raise 403 or 415 if a web page of another site may have sent this request."""
        try:
            check_source(scope, headers, self.options.allow_origins, bool(self._digests))
        except ApiError as error:
            raise self._refusal("source", error) from None

    def check_key(self, headers: Mapping[str, str]) -> None:
        """Raise 401 unless the `Authorization` header carries an accepted key; the time taken reveals nothing."""
        if not self._digests:
            return
        scheme, received = received_key(headers)
        valid = False
        for accepted in self._digests:  # always compare with every key: constant time
            valid |= hmac.compare_digest(received, accepted)
        if not (valid and scheme.lower() == "bearer"):
            raise self._refusal(
                "key",
                ApiError(
                    401,
                    "the API key is missing or wrong: send `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                ),
            )

    def key_digest(self, headers: Mapping[str, str]) -> bytes:
        """Return a digest of the accepted key of a request, which tells clients apart; empty without keys."""
        if not self._digests:
            return b""
        return received_key(headers)[1]

    def check_size(self, size: int) -> None:
        """Raise 413 if a body of `size` bytes is above the limit."""
        limit = self.options.max_body_bytes
        if size > limit:
            message = f"the request body is larger than {limit} bytes: send a smaller one"
            raise self._refusal("body", ApiError(413, message, code="request_too_large"))

    def check_lengths(self, prompt_tokens: int, max_tokens: int | None, name: str = "max_tokens") -> None:
        """Raise 400 if the request exceeds the server's token limits. The engine checks the context length.

        name: the field of the request that `max_tokens` comes from.
        """
        limit = self.options.max_prompt_tokens
        if limit is not None and prompt_tokens > limit:
            message = f"the prompt has {prompt_tokens} tokens and this server accepts {limit}: shorten it"
            raise self._refusal("prompt", ApiError(400, message, code="context_length_exceeded"))
        limit = self.options.max_tokens
        if limit is not None and max_tokens is not None and max_tokens > limit:
            message = f"`{name}` is {max_tokens}: this server generates at most {limit}"
            raise self._refusal("max_tokens", ApiError(400, message, param=name))

    def _refusal(self, reason: str, error: ApiError) -> ApiError:
        self.refused[reason] += 1
        return error


class Admission(RequestChecks):
    """Accepts or rejects requests before they reach the engine. Used on the event loop's thread only."""

    def __init__(self, options: ServerOptions, llm: AsyncLLM) -> None:
        super().__init__(options)
        self.llm = llm
        self.draining = False
        self.active = 0  # sequences that were admitted and have not ended
        self._ends: deque[float] = deque(maxlen=RECENT_ENDS)
        self._rejected = 0  # requests rejected since a slot was last released

    @asynccontextmanager
    async def slot(self, count: int = 1) -> AsyncIterator[AdmissionSlot]:
        """Hold a slot for `count` sequences while the block runs."""
        slot = self.acquire(count)
        try:
            yield slot
        finally:
            slot.release()

    def acquire(self, count: int = 1) -> AdmissionSlot:
        """Return a slot that the caller releases; raise 429 or 503 if `count` sequences cannot be admitted."""
        if not self.llm.alive:
            message = "the engine has stopped: retry, this server is being replaced"
            raise self._refusal("dead", ApiError(503, message, kind="server_error", headers=retry_after(1)))
        if self.draining:
            message = "the server is shutting down: retry later or on another server"
            headers = retry_after(self.options.drain_seconds)
            raise self._refusal("draining", ApiError(503, message, kind="server_error", headers=headers))
        if self.active and self._queued + count > self.options.max_waiting:
            self._rejected += 1
            message = f"{self._queued} requests are waiting already: retry later"
            headers = retry_after(self.seconds_per_request * self._rejected)
            error = ApiError(429, message, code="queue_full", kind="rate_limit_error", headers=headers)
            raise self._refusal("queue", error)
        self.active += count
        return AdmissionSlot(self, count)

    def release(self, count: int) -> None:
        """Count `count` sequences as ended."""
        self.active -= count
        self._rejected = 0
        self._ends.append(time.monotonic())

    def drain(self) -> None:
        """Admit no further request."""
        self.draining = True

    @property
    def seconds_per_request(self) -> float:
        """Mean time between the ends of two recent requests; 1 if none has ended."""
        if not self._ends:
            return 1.0
        return (time.monotonic() - self._ends[0]) / len(self._ends)

    @property
    def _queued(self) -> int:
        """Admitted sequences that the engine does not run."""
        load = self.llm.load
        # A step that leaves requests waiting runs as many as fit. Before it, all rows of the engine may be used.
        capacity = load.running if load.blocked else self.llm.llm.resolved.max_requests
        return max(self.active - capacity, 0)


class AdmissionMiddleware:
    """ASGI middleware that checks the API key, and limits the size and the arrival time of the body."""

    def __init__(self, app: ASGIApp, admission: RequestChecks) -> None:
        self.app, self.admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        options = self.admission.options
        try:
            self.admission.check_source(scope, headers)
            if not is_open(scope["method"], scope["path"].removeprefix(scope.get("root_path") or "")):
                self.admission.check_key(headers)
            length = headers.get("content-length", "")
            self.admission.check_size(int(length) if length.isdecimal() else 0)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        size = 0
        timed_receive = TimedReceive(receive, options.receive_seconds)

        async def limited() -> Message:
            """Count the bytes of a body that has no Content-Length, and reject it at the limit."""
            nonlocal size
            message = await timed_receive()
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                self.admission.check_size(size)
            return message

        await self.app(scope, limited, send)


def is_open(method: str, path: str) -> bool:
    """Return whether a request needs no API key. Browsers send OPTIONS (CORS preflight) without one."""
    return method == "OPTIONS" or path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


def retry_after(seconds: float) -> dict[str, str]:
    """Return a Retry-After header between 1 and MAX_RETRY_SECONDS seconds."""
    return {"Retry-After": str(min(max(math.ceil(seconds), 1), MAX_RETRY_SECONDS))}


def received_key(headers: Mapping[str, str]) -> tuple[str, bytes]:
    """Return the scheme of the `Authorization` header, and the digest of its key."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    # Headers are decoded as Latin-1, whatever the client meant: compare the bytes that it sent, which are UTF-8.
    return scheme, digest(key.strip().encode("latin-1", "replace"))


def digest(key: bytes) -> bytes:
    """Hash a key, so that the comparison does not reveal its length either."""
    return hashlib.sha256(key).digest()
