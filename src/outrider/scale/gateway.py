"""The door in front of the replicas: reads a request to its end, has it answered by one of them, or by all."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from typing import Any, Protocol

from ..server.api.errors import ApiError, error_event, error_response
from ..server.api.sse import HungUpError, while_connected
from .asgi_bridge import SCOPE, Message, Receive, Reply, Send, WebRequest, ends
from .router import Hints, prefix_blocks

REPLICA_HEADER = b"x-outrider-replica"  # of an answer: who gave it
TRIES = 3  # replicas that a request is given to, as long as none has begun to answer
UNAVAILABLE = 503  # what a replica says whose engine has stopped, until it is replaced
EVERYWHERE = frozenset({"/pause", "/resume"})  # what means all replicas, or nothing
HEALTH, METRICS = "/health", "/metrics"

log = logging.getLogger(__name__)


class ReplicaLostError(Exception):
    """The replica died while it answered."""


class ReplicaUnfitError(Exception):
    """The replica is there, but it does not answer any more."""


class Replicas(Protocol):
    """The engines, wherever they are. What they cannot take they refuse with an ApiError."""

    def stream(self, request: WebRequest, hints: Hints) -> AbstractAsyncContextManager[AsyncIterator[list[Message]]]:
        """The answer of the best replica, as it comes. Leaving the block early cancels the request there."""
        ...

    async def ask_all(self, request: WebRequest) -> list[Reply]:
        """The answers of those replicas that are alive."""
        ...


class Gateway:
    """An ASGI app. It holds no model and no state but what was sent where."""

    def __init__(self, replicas: Replicas, block: int, max_body_bytes: int) -> None:
        self.replicas, self.block, self.max_body_bytes = replicas, block, max_body_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets here: the server closes them
        await self._answer(scope, receive, send)

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            request = WebRequest({name: scope[name] for name in SCOPE if name in scope}, await self._body(receive))
            if request.path in EVERYWHERE:
                await send_reply(send, worst(await self._ask_all(request)))
            elif request.path == HEALTH:
                await send_reply(send, best(await self._ask_all(request)))
            elif request.path == METRICS:
                await send_reply(send, merge(await self._ask_all(request)))
            else:
                await self._forward(request, receive, send)
        except ConnectionError:
            raise  # in mid-answer: the connection is closed, nothing else can be said
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("the gateway failed on %s", scope["path"])
            await error_response(error)(scope, receive, send)

    async def _body(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            body += message.get("body", b"")
            if len(body) > self.max_body_bytes:
                limit = f"the request is larger than {self.max_body_bytes} bytes: send less"
                raise ApiError(413, limit, code="request_too_large")
            if not message.get("more_body", False):
                return bytes(body)

    async def _ask_all(self, request: WebRequest) -> list[Reply]:
        replies = await self.replicas.ask_all(request)
        if not replies:
            raise ApiError(
                503, "no replica is ready: try again later", kind="server_error", headers={"Retry-After": "1"}
            )
        return replies

    async def _forward(self, request: WebRequest, receive: Receive, send: Send) -> None:
        """Pass on what one replica says, until it ends or the client hangs up."""
        with suppress(HungUpError):
            await while_connected(receive, self._speak(request, send))

    async def _speak(self, request: WebRequest, send: Send) -> None:
        hints = Hints(tuple(prefix_blocks(request.body, self.block)) if request.body else ())
        for remaining in reversed(range(TRIES)):
            answer = Answer(send, patient=remaining > 0)
            try:
                async with self.replicas.stream(request, hints) as batches:
                    async for batch in batches:
                        for message in batch:
                            await answer.pass_on(message)
                return
            except ReplicaUnfitError as error:
                hints = replace(hints, avoid=hints.avoid | {str(error)})
            except ReplicaLostError:
                if answer.begun:
                    await answer.break_off()
                    return
            except Exception:
                if not answer.begun:
                    raise
                log.exception("the replica failed in mid-answer")
                await answer.break_off()
                return
        sentence = "the replicas died while they answered: try again later"
        raise ApiError(503, sentence, kind="server_error", headers={"Retry-After": "1"})


class Answer:
    """What the client has got so far, which decides how a failure can be told."""

    def __init__(self, send: Send, patient: bool) -> None:
        self.send, self.patient = send, patient
        self.begun = self.whole = self.events = False

    async def pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            if message["status"] == UNAVAILABLE and self.patient:
                raise ReplicaUnfitError(headers.get(REPLICA_HEADER, b"").decode())
            self.begun = True
            self.events = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self.whole = self.whole or ends(message)
        await self.send(message)

    async def break_off(self) -> None:
        """The replica is gone in mid-answer. A stream of events can say so; any other must not look complete."""
        if self.whole:
            return
        if not self.events:
            raise ConnectionError("the replica died while it answered")
        error = ApiError(503, "the replica died while it answered: ask again", code="replica_lost", kind="server_error")
        await self.send({"type": "http.response.body", "body": error_event(error), "more_body": False})


def worst(replies: Sequence[Reply]) -> Reply:
    return max(replies, key=lambda reply: reply.status)


def best(replies: Sequence[Reply]) -> Reply:
    return min(replies, key=lambda reply: reply.status)


async def live(receive: Receive, send: Send) -> None:
    """The lifespan protocol: nothing to set up, nothing to take down."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def send_reply(send: Send, reply: Reply) -> None:
    await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
    await send({"type": "http.response.body", "body": reply.body, "more_body": False})


SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.+)")


def merge(replies: Sequence[Reply]) -> Reply:
    """One page of Prometheus' text format from several. A refusal stands for all: they share their keys."""
    refused = [reply for reply in replies if reply.status != 200]
    if refused:
        return refused[0]
    families: dict[str, tuple[list[str], list[str]]] = {}  # name -> comments, samples
    for reply in replies:
        family = ""
        for line in reply.body.decode().splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                comments, _ = families.setdefault(family, ([], []))
                if line not in comments:
                    comments.append(line)
            elif found := SAMPLE.fullmatch(line):
                name, labels, value = found.groups()
                named = ",".join(part for part in (labels, f'replica="{reply.replica}"') if part)
                families.setdefault(family or name, ([], []))[1].append(f"{name}{{{named}}} {value}")
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    headers = [(name, value) for name, value in replies[0].headers if name.lower() != b"content-length"]
    return Reply("", 200, headers, "\n".join([*lines, ""]).encode())
