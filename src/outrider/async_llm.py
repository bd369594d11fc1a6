"""AsyncLLM: the same engine on a thread, its outputs as async iterators."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from .engine import Engine
from .input_processor import Prompt
from .llm import LLM, Message
from .structured_output import Grammar
from .types import FinishReason, Output, SamplingParams

Result = TypeVar("Result")
Item = Output | BaseException

log = logging.getLogger(__name__)


class EngineStoppedError(RuntimeError):
    """The engine's thread is gone: it was closed, or something broke that it could not survive."""


@dataclass(frozen=True)
class Load:
    """How busy the engine is, as another thread sees it."""

    running: int
    waiting: int
    pages: int
    pages_used: int  # by requests; those that only the prefix cache keeps are free to take


class Mailbox:
    """The newest output of one request, on its way to the client's event loop.

    Each output holds the whole text so far, so a client that is slow to read gets fewer, larger ones.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._item: Item | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """On the client's loop."""
        self._item = item
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Item:
        while self._item is None:
            self._reader = self.loop.create_future()
            await self._reader
        item, self._item = self._item, None
        return item


class Command:
    """Something for the engine's thread to do between two steps, and the future that waits for its result."""

    def __init__(self, call: Callable[[], Any], answer: Future[Any] | None = None) -> None:
        self.call, self.answer = call, answer

    def run(self) -> None:
        if self.answer is None:
            self.call()
        elif self.answer.set_running_or_notify_cancel():  # else the client went away before its turn came
            try:
                self.answer.set_result(self.call())
            except BaseException as error:
                self.answer.set_exception(error)

    def refuse(self, error: BaseException) -> None:
        if self.answer is not None and self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)


class AsyncLLM:
    """Many clients, one engine. A client that goes away takes only its own request with it."""

    def __init__(self, model: str | LLM, **options: Any) -> None:
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._mailboxes: dict[str, Mailbox] = {}
        self._paused = False
        self._closing = False
        self._stopped: EngineStoppedError | None = None  # why nothing more will come of this engine
        self._failure: BaseException | None = None
        self._step_began: float | None = None
        # One, so that shapes that are slow to compile take one core at most from the steps.
        self._compiling = ThreadPoolExecutor(1, "outrider-shapes")
        self._thread = threading.Thread(target=self._live, name="outrider-engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    @property
    def alive(self) -> bool:
        """Whether the engine's thread takes requests."""
        return self._stopped is None

    @property
    def failure(self) -> BaseException | None:
        """What the engine's thread died of; None while it lives, and where it was closed."""
        return self._failure

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def stuck_seconds(self) -> float:
        """For how long the present step has been running; 0 between steps. Any thread may ask."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def load(self) -> Load:
        """Read without a lock: single counts, each right at some moment of the step that runs."""
        scheduler = self.engine.scheduler
        cache = scheduler.cache
        return Load(
            running=scheduler.running_count,
            waiting=scheduler.waiting_count,
            pages=cache.pages,
            pages_used=max(cache.pages - cache.available, 0),
        )

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[Output]:
        """The output as it grows; each item holds the whole text so far. Leaving the loop aborts the request."""
        mailbox = Mailbox()
        names: list[str] = []  # of the request, once the engine has it
        grammar = await self._compile(params)

        def add() -> None:
            names.append(self.engine.add(prompt, params or SamplingParams(), request_id))
            self._mailboxes[names[0]] = mailbox

        finished = False
        try:
            await self._ask(add)
            del grammar  # till here it was sure to be found
            while not finished:
                item = await mailbox.get()
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
        await self._ask(lambda: self._forget_all([request_id]))

    async def abort_all(self) -> None:
        await self._ask(lambda: self._forget_all(list(self.engine.parents)))

    async def pause(self) -> None:
        """Stop between two steps. Requests wait, and nothing of them is lost."""
        await self._ask(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._ask(lambda: self._set_paused(False))

    async def clear_cache(self) -> None:
        await self._ask(self.engine.clear_cache)

    def close(self, timeout: float | None = None) -> None:
        """Stop after the present step, or stop waiting for it when so many seconds are over."""
        self._closing = True
        self._tell(lambda: None)
        self._thread.join(timeout)

    # ---- from the clients' threads ----

    async def _compile(self, params: SamplingParams | None) -> Grammar | None:
        """The shape of the answer. Not on the engine's thread, where everybody would wait for it."""
        if params is None or params.structured is None:
            return None
        compiler, loop = self.engine.compiler, asyncio.get_running_loop()
        found = compiler.find(params.structured)
        return found or await loop.run_in_executor(self._compiling, compiler.compile, params.structured)

    def _tell(self, call: Callable[[], None]) -> None:
        self._send(Command(call))

    async def _ask(self, call: Callable[[], Result]) -> Result:
        """Run `call` on the engine's thread, between two steps, and wait for its answer."""
        answer: Future[Result] = Future()
        self._send(Command(call, answer))
        return await asyncio.wrap_future(answer)

    def _send(self, command: Command) -> None:
        self._commands.put(command)
        # Looked at after the put: whoever stops the engine looks for commands after it has said so.
        if self._stopped is not None:
            self._refuse_commands(self._stopped)

    def _refuse_commands(self, error: EngineStoppedError) -> None:
        try:
            while True:
                self._commands.get_nowait().refuse(error)
        except queue.Empty:
            return

    # ---- on the engine's thread ----

    def _live(self) -> None:
        try:
            self._run()
        except BaseException as error:
            log.critical("the engine's thread died", exc_info=error)
            self._failure = error
        finally:
            self._step_began = None
            self._stop()

    def _stop(self) -> None:
        """Nobody may wait for an engine that is gone."""
        reason = "the engine is closed" if self._failure is None else f"the engine died ({self._failure!r})"
        self._stopped = EngineStoppedError(f"{reason}: start a new one")
        self._refuse_commands(self._stopped)
        for mailbox in list(self._mailboxes.values()):
            self._post(mailbox.loop, [(mailbox, self._stopped)])
        self._mailboxes.clear()
        if self._failure is None:  # the LLM may be used on, by another door or by itself
            for name in list(self.engine.parents):
                self.engine.abort(name)

    def _run(self) -> None:
        while not self._closing:
            self._obey()
            if self._paused or self.engine.is_idle:
                continue
            self._step_began = time.monotonic()
            try:
                outputs = self.engine.step()
            except Exception as error:
                self._fail(error)
                self._probe()
            else:
                self._deliver(outputs)
                if any(one.finish_reason == FinishReason.ERROR for each in outputs for one in each.completions):
                    self._probe()
            self._step_began = None

    def _probe(self) -> None:
        """After a failure: a device that is lost, as after an illegal address, takes the engine with it. Else every
        request to come would fail while the engine passes for well.
        """
        self.engine.device.fence().wait()

    def _obey(self) -> None:
        """Carry out what clients asked for; with nothing else to do, wait for the next word."""
        waiting = self._paused or self.engine.is_idle
        try:
            while True:
                self._commands.get(block=waiting).run()
                waiting = False
        except queue.Empty:
            return

    def _deliver(self, outputs: Sequence[Output]) -> None:
        """Hand the outputs of a step over: one wake-up for each event loop, however many of its clients wait."""
        posts: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Item]]] = {}
        for output in outputs:
            name = output.request_id
            mailbox = self._mailboxes.pop(name, None) if output.finished else self._mailboxes.get(name)
            if mailbox is not None:
                posts.setdefault(mailbox.loop, []).append((mailbox, output))
        for loop, items in posts.items():
            if not self._post(loop, items):
                self._forget_loop(loop)

    @staticmethod
    def _post(loop: asyncio.AbstractEventLoop, items: list[tuple[Mailbox, Item]]) -> bool:
        def arrive() -> None:
            for mailbox, item in items:
                mailbox.put(item)

        try:
            loop.call_soon_threadsafe(arrive)
        except RuntimeError:  # the clients' event loop is closed: nobody will ever read this
            return False
        return True

    def _forget_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        for name in [name for name, mailbox in self._mailboxes.items() if mailbox.loop is loop]:
            del self._mailboxes[name]
            self.engine.abort(name)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _forget_all(self, names: list[str]) -> None:
        outputs = [self.engine.abort(name) for name in names]
        self._deliver([output for output in outputs if output is not None])

    def _fail(self, error: Exception) -> None:
        """A step broke: every request in flight hears of it, and the engine lives on, empty."""
        log.error("a step failed: all requests in flight end", exc_info=error)
        for name in list(self.engine.parents):
            self.engine.abort(name)
            mailbox = self._mailboxes.pop(name, None)
            if mailbox is not None:
                self._post(mailbox.loop, [(mailbox, error)])
