"""A server with the playground's real routes and scripted responses instead of a model."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from outrider.server import playground
from outrider.speculation import Needs
from outrider.types import SpecStats, Suspension

KEY = "open sesame"
# Each step: drafted words, their parents, the words added to the text, and how many of them were accepted.
Script = list[tuple[list[str], list[int] | None, list[str], int]]
SCRIPT: Script = [
    ([], None, ["The"], 0),
    ([" sky", " is", " green"], None, [" sky", " is", " blue"], 2),
    ([" because", " the"], None, [" because", " the", " air"], 2),
    (
        [" is", " was", " scatters", " red", " blue", " light"],
        [-1, -1, -1, 2, 2, 4],
        [" scatters", " blue", " light", " m"],
        3,
    ),
    ([" uch", "any"], None, ["ore"], 0),
    ([" than"], None, [" than", " red"], 1),
    ([], None, ["."], 0),
]
ANSWER = "The sky is blue because the air scatters blue light more than red."
REPEATS = 4
SUSPENSION = Suspension(batch_size=1, rows=2, cost=2.1, drafting=0.0, tokens=1.57, acceptance_rate=0.57)
SPEC_STATS = SpecStats(steps=64, widths={0: 64}, suspended=60, suspension=SUSPENSION)


def number(word: str) -> int:
    """Return the token id of a word; equal words have equal ids."""
    return sum(ord(letter) * 31**index for index, letter in enumerate(word)) % 50_000


class ScriptedServer:
    def __init__(
        self,
        key: str | None = None,
        pause: float = 0.004,
        method: str = "ngram",
        answers: dict[str, str] | None = None,
        metrics: dict[str, Any] | None = None,
        thoughts: int = 0,
        max_tokens: int | None = None,
    ) -> None:
        """Script the responses.

        answers: by prompt; other prompts get ANSWER. metrics: the speculation stats at the end of an answer.
        thoughts: first steps of a stream that are reasoning. max_tokens: the server's limit.
        """
        self.thoughts = thoughts
        self.key, self.pause, self.metrics = key, pause, metrics
        self.answers = answers or {}
        self.requests: list[dict[str, Any]] = []
        self.hung_up = 0
        plan = SimpleNamespace(method=method, verification="exact", adaptive=True)
        methods = {method: SimpleNamespace(needs=Needs(width=8))}
        spec_manager = SimpleNamespace(plan=plan, methods=methods, method_stats={method: SPEC_STATS})
        engine = SimpleNamespace(spec_manager=spec_manager, resolved=SimpleNamespace(max_context=2048))
        llm = SimpleNamespace(engine=engine)
        routes = [*playground.routes(), Route("/v1/chat/completions", self.chat, methods=["POST"])]
        self.app = Starlette(routes=routes, exception_handlers={PermissionError: refuse})  # type: ignore[dict-item]
        options = SimpleNamespace(max_tokens=max_tokens)
        names = ("folder/tiny-model",)
        self.app.state.context = SimpleNamespace(admission=self, names=names, llm=llm, options=options)

    def check_key(self, headers: Any) -> None:
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            raise PermissionError

    async def chat(self, request: Request) -> Response:
        self.check_key(request.headers)
        body = await request.json()
        self.requests.append(body)
        text = body["messages"][-1]["content"]
        if text == "be full":
            return error(429, "3 requests are waiting already", {"retry-after": "7"})
        if text == "be strict":
            return error(400, "`temperature` is 9: it must be below 3")
        if text == "break":
            return StreamingResponse(self.broken(), media_type="text/event-stream")
        repeats = 400 if text == "be long" else REPEATS
        if not body.get("stream"):
            return JSONResponse(await self.whole(body, repeats))
        return StreamingResponse(self.stream(body, repeats), media_type="text/event-stream")

    async def whole(self, body: dict[str, Any], repeats: int) -> dict[str, Any]:
        """Return the whole answer; the times of its steps are `pause` apart."""
        parts = list(self.script(body, repeats))
        await asyncio.sleep(self.pause * len(parts))
        text = "".join(word for _, _, words, _ in parts for word in words)
        steps = [{**step(*part), "seconds": index * self.pause} for index, part in enumerate(parts)]
        choice = {"index": 0, "message": {"content": text}, "speculation": {"steps": steps}}
        return {"choices": [choice], **self.ending()}

    def ending(self) -> dict[str, Any]:
        return {"metrics": {"speculative_decoding": self.metrics}} if self.metrics else {}

    def script(self, body: dict[str, Any], repeats: int) -> Script:
        """Return the steps of an answer."""
        prompt = body["messages"][-1]["content"]
        if prompt in self.answers:
            return drafted_words(self.answers[prompt])
        return list(script(body, repeats))

    async def broken(self) -> AsyncIterator[str]:
        yield event(chunk({"content": "Half"}, [step(*SCRIPT[0])]))

    async def stream(self, body: dict[str, Any], repeats: int) -> AsyncIterator[str]:
        finished = False
        try:
            yield event(chunk({"role": "assistant", "content": ""}))
            for sent, part in enumerate(self.script(body, repeats)):
                await asyncio.sleep(self.pause)
                kind = "reasoning_content" if sent < self.thoughts else "content"
                yield event(chunk({kind: "".join(part[2])}, [step(*part)]))
            usage = {"prompt_tokens": 3, "completion_tokens": 17 * repeats}
            yield event({"choices": [], "usage": usage, **self.ending()})
            yield "data: [DONE]\n\n"
            finished = True
        finally:
            self.hung_up += not finished


def drafted_words(text: str) -> Script:
    """Return steps that write `text`: drafts of three words, of which the last is rejected."""
    words = re.findall(r"\s*\S+|\s+$", text)
    groups = [words[index : index + 3] for index in range(0, len(words), 3)]
    return [([*group[:2], " wrong"], None, group, len(group[:2])) for group in groups]


def script(body: dict[str, Any], repeats: int) -> Iterator[tuple[list[str], list[int] | None, list[str], int]]:
    """Yield the steps of an answer; plain decoding has one word in each."""
    plain = body.get("speculate") is False or body["messages"][-1]["content"] == "draft nothing"
    disagrees = plain and body["messages"][-1]["content"] == "disagree"
    for repeat in range(repeats):
        for drafted, parents, words, kept in SCRIPT:
            text_words = [" The"] if repeat and words == ["The"] else words
            text_words = [" was" if disagrees and word == " blue" else word for word in text_words]
            if plain:
                yield from (([], None, [word], 0) for word in text_words)
            else:
                yield drafted, parents, text_words, kept


def step(drafted: list[str], parents: list[int] | None, words: list[str], kept: int) -> dict[str, Any]:
    return {
        "drafted": [number(word) for word in drafted],
        "parents": parents,
        "drafted_text": drafted,
        "tokens": [number(word) for word in words],
        "text": words,
        "accepted": kept,
        "origins": [1 + index % 3 for index in range(len(drafted))],  # the first drafter, the second, both
    }


def chunk(delta: dict[str, str], steps: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}
    return body if steps is None else {**body, "speculation": {"steps": steps}}


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message}}, status, headers)


async def refuse(request: Request, exception: Exception) -> Response:
    return error(401, "the API key is missing or wrong")


@contextmanager
def serve(app: Any) -> Iterator[str]:
    """Serve the application on a real socket; yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive(), "the server did not start"
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
