"""What clients get, in OpenAI's shapes with vLLM's additions, and how an output becomes one."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from ...errors import UserError
from ...scheduler import BROKEN_OFF
from ...types import Completion, DecodeStep, FinishReason, Output, SpecStats, TokenLogprobs
from ..context import Context, Texts
from .errors import ApiError
from .requests import Sampling
from .sse import EventStream, HungUpError, while_connected
from .translate import Job, renamed

LOWEST = -9999.0  # JSON has no minus infinity

PromptLogprobs = list[dict[str, Any] | None]

encode = msgspec.json.Encoder().encode


class PromptDetails(Struct):
    cached_tokens: int = 0


class CompletionDetails(Struct):
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0
    audio_tokens: int = 0


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class Speculation(Struct):
    """As vLLM reports it: of the steps that verified a draft."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # [j]: steps that kept exactly j drafted tokens
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # the deepest draft
    method: str


class Metrics(Struct):
    speculative_decoding: Speculation


class TraceStep(Struct):
    """One pass of the target: what was drafted, and the tokens that the text went on with."""

    drafted: list[int]
    parents: list[int] | None
    drafted_text: list[str]
    tokens: list[int]
    text: list[str]
    accepted: int


class Trace(Struct):
    steps: list[TraceStep]


@dataclass(frozen=True)
class Header:
    """What all chunks of a reply begin with."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, kind: str, model: str) -> Header:
        return cls(prefix + uuid.uuid4().hex, kind, int(time.time()), model)

    def whole(self, body: Struct) -> bytes:
        """The fields of the header, then those of the body."""
        return encode(self)[:-1] + b"," + encode(body)[1:]


class Framer:
    """Chunks as events. The header is encoded once."""

    def __init__(self, header: Header) -> None:
        self.opening = b"data: " + encode(header)[:-1] + b","

    def __call__(self, body: Struct) -> bytes:
        return self.opening + encode(body)[1:] + b"\n\n"


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def usage(outputs: Sequence[Output], generated: int, predicted: bool) -> Usage:
    """Of all prompts of a request; details once they have ended."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    told = Usage(prompt, generated, prompt + generated)
    stats = [output.stats for output in outputs if output.stats is not None]
    if len(stats) == len(outputs):
        told.prompt_tokens_details = PromptDetails(sum(each.cached_tokens for each in stats))
        details = CompletionDetails()
        if predicted:
            for each in stats:
                drafted, accepted = from_prediction(each.method, each.speculation)
                details.accepted_prediction_tokens += accepted
                details.rejected_prediction_tokens += drafted - accepted
        told.completion_tokens_details = details
    return told


def from_prediction(method: str, spec_stats: SpecStats) -> tuple[int, int]:
    """Tokens that were drafted from the request's prediction, and of these kept."""
    if credit := spec_stats.drafters.get("prediction"):
        return credit.drafted, credit.accepted
    return (spec_stats.drafted, spec_stats.accepted) if method == "prediction" else (0, 0)


def speculation(outputs: Iterable[Output]) -> Metrics | UnsetType:
    """What drafting gave; nothing where nobody drafted."""
    spec_stats, methods = SpecStats(), []
    for output in outputs:
        if output.stats is not None and output.stats.method:
            spec_stats.add(output.stats.speculation)
            methods.append(output.stats.method)
    if not methods:
        return UNSET
    steps = spec_stats.steps - spec_stats.widths.get(0, 0)
    at_least = [steps, *spec_stats.accepted_per_depth, 0]
    return Metrics(
        Speculation(
            mean_acceptance_length=1 + spec_stats.accepted / steps if steps else 1.0,
            draft_acceptance_rate=spec_stats.accepted / spec_stats.drafted if spec_stats.drafted else 0.0,
            acceptance_histogram=[more - fewer for more, fewer in pairwise(at_least)],
            num_spec_steps=steps,
            num_accepted_draft_tokens=spec_stats.accepted,
            num_draft_tokens=spec_stats.drafted,
            num_spec_tokens=len(spec_stats.accepted_per_depth),
            method="+".join(dict.fromkeys(methods)),
        )
    )


def trace_step(step: DecodeStep, texts: Texts) -> TraceStep:
    drafted = step.draft.tokens if step.draft is not None else []
    return TraceStep(
        drafted=drafted,
        parents=step.draft.parents if step.draft is not None else None,
        drafted_text=texts.of(drafted),
        tokens=step.tokens,
        text=texts.of(step.tokens),
        accepted=len(step.draft.path(step.tokens)) if step.draft is not None else 0,
    )


def prompt_logprobs(output: Output, texts: Texts) -> PromptLogprobs | UnsetType:
    """vLLM's shape: for each token of the prompt but the first, the likeliest and the one that stands there."""
    if output.prompt_logprobs is None:
        return UNSET
    found: PromptLogprobs = [None]
    for entry in output.prompt_logprobs:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)]
        if all(token != entry.token for token, _, _ in ranked):
            ranked.append((entry.token, entry.logprob, entry.rank))
        found.append(
            {
                str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": texts.text(token)}
                for token, logprob, rank in ranked
            }
        )
    return found


def with_chosen(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """The likeliest tokens, and the chosen one if it is not among them."""
    among = any(token == entry.token for token, _ in entry.top)
    return list(entry.top) if among else [*entry.top, (entry.token, entry.logprob)]


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


async def outputs(context: Context, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Output], None]:
    """What comes of the jobs, as it grows: which of them, and its whole output so far."""
    if len(jobs) == 1:
        async with aclosing(one(context, jobs[0])) as stream:
            async for output in stream:
                yield 0, output
        return
    # Room for one each: a client that is slow to read holds up no more than that.
    arrived: asyncio.Queue[tuple[int, Output | BaseException | None]] = asyncio.Queue(len(jobs))
    tasks = [asyncio.create_task(pump(context, job, index, arrived)) for index, job in enumerate(jobs)]
    left = len(tasks)
    try:
        while left:
            index, item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def pump(
    context: Context, job: Job, index: int, arrived: asyncio.Queue[tuple[int, Output | BaseException | None]]
) -> None:
    try:
        async with aclosing(one(context, job)) as stream:
            async for output in stream:
                await arrived.put((index, output))
        await arrived.put((index, None))
    except Exception as error:
        await arrived.put((index, error))


def check_endings(output: Output) -> None:
    """Of a request that broke: the client hears whether that was its own doing."""
    broken = [each.stop_reason for each in output.completions if each.finish_reason == FinishReason.ERROR]
    if BROKEN_OFF in broken:
        raise UserError(f"`structured` is too hard to follow, or it and other fields exclude each other: {BROKEN_OFF}")
    if broken:
        raise ApiError(500, "the engine failed on this request: its log says how", kind="server_error")


async def one(context: Context, job: Job) -> AsyncGenerator[Output, None]:
    """One job, counted. A request that fails inside the engine fails here too."""
    watch = context.metrics.request()
    known, last, reason = 0, None, None
    try:
        async with aclosing(context.llm.generate(job.tokens, job.params)) as stream:  # type: ignore[type-var]
            async for output in stream:
                count = sum(len(each.token_ids) for each in output.completions)
                watch.tokens(count - known)
                known = count
                check_endings(output)
                if output.finished:
                    last = output
                yield output
    except UserError as error:
        reason = "refused"
        raise renamed(error, job.names) from None
    except Exception:
        reason = FinishReason.ERROR.value
        raise
    finally:
        watch.done(last, reason)
