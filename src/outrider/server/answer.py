"""One request from its seat to its last byte: what both kinds of completion do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ..types import Completion, Output
from .connection import HungUpError, while_connected
from .context import Context
from .protocol import Sampling
from .replies import Framer, Header, Metrics, PromptLogprobs, Trace, Usage, speculation, trace_step, usage
from .sse import EventStream
from .translate import Job
from .work import outputs

CLIENT_GONE = 499  # for the log: nobody reads it


class Body(Struct):
    """What a chunk, or a whole reply, says after its header."""

    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET
    speculation: Trace | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


@dataclass
class Sent:
    """How much of one choice a stream has sent."""

    text: int = 0
    tokens: int = 0
    steps: int = 0
    characters: int = 0  # of the tokens whose logprobs were sent
    begun: bool = False
    ended: bool = False

    def note(self, completion: Completion) -> None:
        """All of it was sent."""
        self.text, self.tokens = len(completion.text), len(completion.token_ids)
        self.steps = len(completion.steps or ())
        self.begun, self.ended = True, completion.finish_reason is not None


class Answer(ABC):
    """Makes replies of outputs. Subclasses know the shapes."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, asked: Sampling, context: Context, model: str) -> None:
        self.asked, self.context = asked, context
        self.header = Header.new(self.prefix, self.chunk_kind if asked.stream else self.kind, model)
        self.frame = Framer(self.header)
        self.texts = context.texts
        self.jobs: list[Job] = []
        self.latest: dict[int, Output] = {}  # by job
        self.sent: defaultdict[int, Sent] = defaultdict(Sent)  # by choice
        options = asked.stream_options
        self.tells_usage = bool(options and options.include_usage)
        self.keeps_telling = bool(options and options.continuous_usage_stats)

    @property
    @abstractmethod
    def places(self) -> int:
        """Sequences that it asks of the engine."""

    @abstractmethod
    async def prepare(self) -> list[Job]: ...

    @abstractmethod
    def choice(self, index: int, job: int, completion: Completion) -> Struct:
        """A finished choice of a whole reply."""

    @abstractmethod
    def chunks(self, index: int, job: int, completion: Completion) -> Iterable[Body]:
        """What a stream says of the news about one choice; nothing where none shows."""

    def whole_body(self, body: Body) -> Body:
        return body

    def shown(self, completion: Completion) -> Completion:
        """The part of a completion that the reply has."""
        return completion

    # ---- the two ways to answer ----

    async def outputs(self) -> AsyncGenerator[tuple[int, Output], None]:
        async with self.context.guard.seat(self.places):
            self.jobs = await self.prepare()
            async with aclosing(outputs(self.context, self.jobs)) as stream:
                async for job, output in stream:
                    self.latest[job] = output
                    yield job, output

    async def whole(self) -> bytes:
        async with aclosing(self.outputs()) as stream:
            async for _ in stream:
                pass
        found = range(len(self.jobs))
        choices = [self.choice(index, job, one) for index, job, one in self.choices(found)]
        return self.header.whole(self.whole_body(Body(choices, self.usage(), speculation(self.latest.values()))))

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.outputs()) as stream:
            async for job, _ in stream:
                if news := b"".join(self.events_of(job)):
                    yield news
        if self.tells_usage:
            yield self.frame(Body([], self.usage(), speculation(self.latest.values())))

    def events_of(self, job: int) -> Iterator[bytes]:
        for index, _, completion in self.choices([job]):
            for body in self.chunks(index, job, completion):
                if self.keeps_telling or self.tells_usage:
                    body.usage = self.usage() if self.keeps_telling else None
                yield self.frame(body)

    # ---- parts of both ----

    def choices(self, jobs: Iterable[int]) -> Iterator[tuple[int, int, Completion]]:
        """Index in the reply, job, completion."""
        for job in jobs:
            completions = self.latest[job].completions
            for completion in completions:
                yield job * len(completions) + completion.index, job, self.shown(completion)

    def usage(self) -> Usage:
        generated = sum(len(one.token_ids) for _, _, one in self.choices(self.latest))
        return usage(list(self.latest.values()), generated, self.asked.prediction is not None)

    def has_news(self, sent: Sent, completion: Completion) -> bool:
        """Whether there is something to tell of new tokens, even where no text of them shows yet."""
        return len(completion.token_ids) > sent.tokens and bool(completion.logprobs or completion.steps)

    def token_ids(self, completion: Completion, known: int = 0) -> list[int] | UnsetType:
        return completion.token_ids[known:] if self.asked.return_token_ids else UNSET

    def trace(self, completion: Completion, known: int = 0) -> Trace | UnsetType:
        if completion.steps is None:
            return UNSET
        return Trace([trace_step(step, self.texts) for step in completion.steps[known:]])


async def respond(request: Request, answer: Answer) -> Response:
    if answer.asked.stream:
        return EventStream(answer.events())
    try:
        body = await while_connected(request.receive, answer.whole())
    except HungUpError:
        return Response(status_code=CLIENT_GONE)
    return Response(body, media_type="application/json")
