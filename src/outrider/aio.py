"""AsyncLLM: the same engine on a thread, its outputs as async iterators."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from .engine import LLM, Engine, Message, Prompt
from .types import Output, SamplingParams

Result = TypeVar("Result")
Listener = Callable[[Output | BaseException], None]


class AsyncLLM:
    """Many clients, one engine. A client that goes away takes only its own request with it."""

    def __init__(self, model: str | LLM, **options: Any) -> None:
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}
        self._paused = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[Output]:
        """The output as it grows; each item holds the whole text so far. Leaving the loop aborts the request."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Output | BaseException] = asyncio.Queue()

        def listen(item: Output | BaseException) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, item)

        names: list[str] = []  # of the request, once the engine has it

        def add() -> None:
            names.append(self.engine.add(prompt, params or SamplingParams(), request_id))
            self._listeners[names[0]] = listen

        finished = False
        try:
            await self._ask(add)
            while not finished:
                item = await arrived.get()
                if isinstance(item, BaseException):
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                # Commands are obeyed in order: by then `add` has run, even if nobody waited for it.
                self._tell(lambda: self._forget_all(names))

    async def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> AsyncIterator[Output]:
        async for output in self.generate(self.llm.chat_prompt(messages), params):
            yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator gets a last output with finish_reason `abort`."""
        await self._ask(lambda: self._forget(request_id))

    async def pause(self) -> None:
        """Stop between two steps. Requests wait, and nothing of them is lost."""
        await self._ask(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._ask(lambda: self._set_paused(False))

    async def clear_cache(self) -> None:
        await self._ask(self.engine.clear_cache)

    def close(self) -> None:
        self._closing = True
        self._tell(lambda: None)
        self._thread.join()

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _forget_all(self, names: list[str]) -> None:
        for name in names:
            self._forget(name)

    def _forget(self, name: str) -> None:
        output = self.engine.abort(name)
        if output is not None:
            self._deliver(name, output, last=True)

    def _deliver(self, name: str, item: Output | BaseException, last: bool) -> None:
        listener = self._listeners.pop(name, None) if last else self._listeners.get(name)
        if listener is None:
            return
        try:
            listener(item)
        except RuntimeError:  # the client's event loop is closed: nobody will ever read this
            self._listeners.pop(name, None)
            self.engine.abort(name)

    def _tell(self, command: Callable[[], None]) -> None:
        self._commands.put(command)

    async def _ask(self, call: Callable[[], Result]) -> Result:
        """Run `call` on the engine's thread, between two steps, and wait for its answer."""
        answer: Future[Result] = Future()

        def command() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # the client went away before its turn came
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        self._tell(command)
        return await asyncio.wrap_future(answer)

    def _run(self) -> None:
        while not self._closing:
            self._obey()
            if self._paused or self.engine.is_idle:
                continue
            try:
                outputs = self.engine.step()
            except Exception as error:
                self._fail(error)
                continue
            for output in outputs:
                self._deliver(output.request_id, output, output.finished)

    def _obey(self) -> None:
        """Carry out what clients asked for; with nothing else to do, wait for the next word."""
        waiting = self._paused or self.engine.is_idle
        try:
            while True:
                self._commands.get(block=waiting)()
                waiting = False
        except queue.Empty:
            return

    def _fail(self, error: Exception) -> None:
        """A step broke: every request in flight hears of it, and the engine lives on, empty."""
        for name in list(self._listeners):
            self.engine.abort(name)
            self._deliver(name, error, last=True)
