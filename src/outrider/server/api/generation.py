"""Generation for one HTTP request of any API: from its admission to the engine's outputs."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response

from ...errors import PromptError, UserError
from ...scheduler import NO_TOKEN_ALLOWED
from ...types import Completion, FinishReason, Output
from ..context import Context
from .errors import CLIENT_DISCONNECTED, ApiError, as_api_error
from .requests import SamplingRequest, ignored_fields
from .sse import DisconnectedError, EventStream, while_connected
from .translate import EngineInput, rename_fields

IGNORED_HEADER = "x-outrider-ignored"  # lists the fields of the request that had no effect


class Generation(ABC):
    """One request while it is answered: its prompts and their newest outputs. Subclasses format the response."""

    media_type = "application/json"
    model: str  # as the client named it: the served model, or an adapter
    # Field names of `request` in error messages, as regular expressions, and those of the client's request.
    field_names: ClassVar[Sequence[tuple[str, str]]] = ()

    def __init__(self, request: SamplingRequest, context: Context) -> None:
        self.request, self.context = request, context
        self.inputs: list[EngineInput] = []
        self.latest: dict[int, Output] = {}  # by prompt
        self.ignored = ignored_fields(request)
        self.key_digest = b""  # of the client's API key; empty without keys

    @property
    @abstractmethod
    def num_sequences(self) -> int:
        """Sequences that the engine generates for this request."""

    @abstractmethod
    async def prepare(self) -> list[EngineInput]: ...

    @abstractmethod
    async def whole(self) -> bytes:
        """Return the body of a whole response."""

    @abstractmethod
    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the parts of a stream."""

    def stream(self) -> EventStream:
        """Return the response that sends `events`."""
        return EventStream(self.events())

    def visible(self, completion: Completion) -> Completion:
        """Return the part of a completion that belongs to the response."""
        return completion

    def choices(self, prompts: Iterable[int]) -> Iterator[tuple[int, int, Completion]]:
        """Yield the index in the response, the prompt and the completion of each choice of these prompts."""
        for prompt in prompts:
            completions = self.latest[prompt].completions
            for completion in completions:
                yield prompt * len(completions) + completion.index, prompt, self.visible(completion)

    @classmethod
    @contextmanager
    def renamed_errors(cls) -> Iterator[None]:
        """Raise errors of the block with the field names of the client's request."""
        try:
            yield
        except (ApiError, UserError) as error:
            if not cls.field_names:
                raise
            api_error = as_api_error(error)
            for pattern, name in cls.field_names:
                api_error.message = re.sub(pattern, name, api_error.message)
                api_error.param = api_error.param and re.sub(pattern, name, api_error.param)
            raise api_error from None

    async def outputs(self) -> AsyncGenerator[tuple[int, Output], None]:
        with self.renamed_errors():
            async with self.context.admission.slot(self.num_sequences) as slot:
                adapter = self.context.adapter_of(self.model)
                self.inputs = [replace(self._salted(one), adapter=adapter) for one in await self.prepare()]
                running = len(self.inputs)

                def on_end() -> None:
                    """Release the slot once the engine is done, though the client may never read the rest."""
                    nonlocal running
                    running -= 1
                    if not running:
                        slot.release()

                async with aclosing(generate_all(self.context, self.inputs, on_end)) as stream:
                    async for prompt, output in stream:
                        self.latest[prompt] = output
                        yield prompt, output

    def _salted(self, one: EngineInput) -> EngineInput:
        """Keep what the engine caches for other clients apart: timings, counts and drafts would reveal it."""
        salt = f"{self.key_digest.hex()} {self.request.cache_salt or ''}".strip()
        return replace(one, params=replace(one.params, cache_salt=salt))

    async def finish(self) -> None:
        """Generate until the end."""
        async with aclosing(self.outputs()) as stream:
            async for _ in stream:
                pass


async def respond(http_request: Request, generation: Generation) -> Response:
    """Return the response, as a stream if the request asks for one. Generation ends if the client disconnects."""
    response: Response
    generation.key_digest = generation.context.admission.key_digest(http_request.headers)
    if generation.request.stream:
        response = generation.stream()
    else:
        try:
            body = await while_connected(http_request.receive, generation.whole())
        except DisconnectedError:
            return Response(status_code=CLIENT_DISCONNECTED)
        response = Response(body, media_type=generation.media_type)
    if generation.ignored:
        response.headers[IGNORED_HEADER] = ", ".join(generation.ignored)
    return response


async def generate_all(
    context: Context, inputs: Sequence[EngineInput], on_end: Callable[[], None] | None = None
) -> AsyncGenerator[tuple[int, Output], None]:
    """Generate for all prompts of a request at once; yield the prompt's index and its output so far.

    on_end: called when the engine is done with a prompt.
    """
    if len(inputs) == 1:
        async with aclosing(generate(context, inputs[0], on_end)) as stream:
            async for output in stream:
                yield 0, output
        return
    # One item per prompt: a client that reads slowly then holds up generation after that many.
    queue: asyncio.Queue[tuple[int, Output | BaseException | None]] = asyncio.Queue(len(inputs))
    tasks = [asyncio.create_task(forward(context, one, index, queue, on_end)) for index, one in enumerate(inputs)]
    running = len(tasks)
    try:
        while running:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def forward(
    context: Context,
    engine_input: EngineInput,
    index: int,
    queue: asyncio.Queue[tuple[int, Output | BaseException | None]],
    on_end: Callable[[], None] | None,
) -> None:
    """Put the outputs of one prompt into the queue; then None, or the exception that ended it."""
    try:
        async with aclosing(generate(context, engine_input, on_end)) as stream:
            async for output in stream:
                await queue.put((index, output))
        await queue.put((index, None))
    except PromptError as error:
        await queue.put((index, type(error)(error.reason, f"prompt {index}")))
    except Exception as error:
        await queue.put((index, error))


async def generate(
    context: Context, engine_input: EngineInput, on_end: Callable[[], None] | None = None
) -> AsyncGenerator[Output, None]:
    """Generate for one prompt and count it in the metrics. Raise if the engine fails on it."""
    measured = context.metrics.request(len(engine_input.tokens), engine_input.params)
    known, last, reason = 0, None, None
    try:
        outputs = context.llm.generate(
            engine_input.tokens, engine_input.params, on_end=on_end, lora_request=engine_input.adapter
        )
        async with aclosing(outputs) as stream:
            async for output in stream:
                count = sum(len(completion.token_ids) for completion in output.completions)
                measured.tokens(count - known)
                known = count
                check_errors(output)
                if output.finished:
                    last = output
                yield output
    except PromptError:
        reason = "refused"
        raise
    except UserError as error:
        reason = "refused"
        raise rename_fields(error, engine_input.names) from None
    except Exception:
        reason = FinishReason.ERROR.value
        raise
    finally:
        measured.done(last, reason)


def check_errors(output: Output) -> None:
    """Raise if the engine ended a completion with an error: 400 if the request caused it, else 500."""
    failed = [one.stop_reason for one in output.completions if one.finish_reason == FinishReason.ERROR]
    if NO_TOKEN_ALLOWED in failed:
        raise UserError(f"`structured` is too complex, or it conflicts with other fields: {NO_TOKEN_ALLOWED}")
    if failed:
        raise ApiError(500, "the engine failed on this request: see its log for the reason", kind="server_error")
