"""AsyncLLM: the engine on a thread of its own, with outputs as async iterators."""

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
    """The engine's thread has ended: it was closed, or it failed."""


@dataclass(frozen=True)
class Load:
    """How busy the engine is."""

    running: int
    waiting: int
    blocked: int  # of the waiting: the last step could not admit them
    pages: int
    pages_used: int  # held by requests; pages that only the prefix cache holds count as free


class Mailbox:
    """The newest output of one request, for a client's event loop.

    Each output holds the whole text so far, so a slow reader gets fewer, larger ones.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._item: Item | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Replace the item and wake the reader. Runs on the client's event loop."""
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
    """A call for the engine's thread to run between two steps, and the future of its result."""

    def __init__(self, call: Callable[[], Any], future: Future[Any] | None = None) -> None:
        self.call, self.future = call, future

    def run(self) -> None:
        if self.future is None:
            self.call()
        elif self.future.set_running_or_notify_cancel():  # else the client has cancelled
            try:
                self.future.set_result(self.call())
            except BaseException as error:
                self.future.set_exception(error)

    def refuse(self, error: BaseException) -> None:
        if self.future is not None and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class AsyncLLM:
    """One engine for many clients. If a client disconnects, only its own request ends."""

    def __init__(self, model: str | LLM, **options: Any) -> None:
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._mailboxes: dict[str, Mailbox] = {}
        self._paused = False
        self._closing = False
        self._stopped: EngineStoppedError | None = None  # set once the engine takes no more requests
        self._failure: BaseException | None = None
        self._step_began: float | None = None
        # One thread, so that compiling grammars takes at most one core from the steps.
        self._compiling = ThreadPoolExecutor(1, "outrider-grammars")
        self._thread = threading.Thread(target=self._thread_main, name="outrider-engine", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Return the number of requests whose clients wait for output."""
        return len(self._mailboxes)

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    @property
    def alive(self) -> bool:
        """Return True while the engine's thread takes requests."""
        return self._stopped is None

    @property
    def failure(self) -> BaseException | None:
        """Return the error that ended the engine's thread; None while it runs, and after `close`."""
        return self._failure

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def stuck_seconds(self) -> float:
        """Return how long the current step has been running; 0 between steps. Thread-safe."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def load(self) -> Load:
        """Return the load. It is read without a lock: each count is right at some moment of the current step."""
        scheduler = self.engine.scheduler
        cache = scheduler.cache
        return Load(
            running=scheduler.running_count,
            waiting=scheduler.waiting_count,
            blocked=scheduler.blocked_count,
            pages=cache.pages,
            pages_used=max(cache.pages - cache.available, 0),
        )

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[Output]:
        """Yield the output as it grows; each item holds the whole text so far. Leaving the loop aborts the request."""
        mailbox = Mailbox()
        ids: list[str] = []  # the request's id, once the engine has it
        grammar = await self._compile(params)

        def add() -> None:
            ids.append(self.engine.add(prompt, params or SamplingParams(), request_id))
            self._mailboxes[ids[0]] = mailbox

        finished = False
        try:
            await self._call(add)
            del grammar  # holding it kept the compiler's entry alive until `add` had found it
            while not finished:
                item = await mailbox.get()
                if isinstance(item, BaseException):
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                # Commands run in order, so `add` has run by then, even if this task was cancelled meanwhile.
                self._send(Command(lambda: self._abort_all(ids)))

    async def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> AsyncIterator[Output]:
        async for output in self.generate(self.llm.chat_prompt(messages), params):
            yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator gets a last output with finish_reason `abort`."""
        await self._call(lambda: self._abort_all([request_id]))

    async def abort_all(self) -> None:
        await self._call(lambda: self._abort_all(list(self.engine.parents)))

    async def pause(self) -> None:
        """Stop between two steps. Requests keep their state and wait."""
        await self._call(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._call(lambda: self._set_paused(False))

    async def clear_cache(self) -> None:
        await self._call(self.engine.clear_cache)

    def close(self, timeout: float | None = None) -> None:
        """Stop after the current step; wait for it for at most `timeout` seconds."""
        self._closing = True
        self._send(Command(lambda: None))  # wakes the thread if it waits for commands
        self._thread.join(timeout)

    # ---- on the clients' threads ----

    async def _compile(self, params: SamplingParams | None) -> Grammar | None:
        """Compile the grammar of a request, off the engine's thread so that other requests do not wait for it."""
        if params is None or params.structured is None:
            return None
        compiler, loop = self.engine.compiler, asyncio.get_running_loop()
        grammar = compiler.find(params.structured)
        return grammar or await loop.run_in_executor(self._compiling, compiler.compile, params.structured)

    async def _call(self, call: Callable[[], Result]) -> Result:
        """Run `call` on the engine's thread, between two steps, and return its result."""
        future: Future[Result] = Future()
        self._send(Command(call, future))
        return await asyncio.wrap_future(future)

    def _send(self, command: Command) -> None:
        self._commands.put(command)
        # Checked after the put, as `_stop` empties the queue after setting `_stopped`: no command is left in between.
        if self._stopped is not None:
            self._refuse_commands(self._stopped)

    def _refuse_commands(self, error: EngineStoppedError) -> None:
        try:
            while True:
                self._commands.get_nowait().refuse(error)
        except queue.Empty:
            return

    # ---- on the engine's thread ----

    def _thread_main(self) -> None:
        try:
            self._run()
        except BaseException as error:
            log.critical("the engine's thread failed", exc_info=error)
            self._failure = error
        finally:
            self._step_began = None
            self._stop()

    def _stop(self) -> None:
        """Fail everything that waits for the engine."""
        reason = "the engine is closed" if self._failure is None else f"the engine died ({self._failure!r})"
        self._stopped = EngineStoppedError(f"{reason}: start a new one")
        self._refuse_commands(self._stopped)
        for mailbox in list(self._mailboxes.values()):
            self._post(mailbox.loop, [(mailbox, self._stopped)])
        self._mailboxes.clear()
        if self._failure is None:  # the LLM stays usable without this AsyncLLM
            for request_id in list(self.engine.parents):
                self.engine.abort(request_id)

    def _run(self) -> None:
        while not self._closing:
            self._run_commands()
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
                completions = (completion for output in outputs for completion in output.completions)
                if any(completion.finish_reason == FinishReason.ERROR for completion in completions):
                    self._probe()
            self._step_began = None

    def _probe(self) -> None:
        """Check the device after a failed step.

        If it is lost, as after an illegal address, this raises and ends the thread. Otherwise every later request would
        fail while the engine reports itself as alive.
        """
        self.engine.device.fence().wait()

    def _run_commands(self) -> None:
        """Run the queued commands; if there is nothing else to do, wait for the next one."""
        waiting = self._paused or self.engine.is_idle
        try:
            while True:
                self._commands.get(block=waiting).run()
                waiting = False
        except queue.Empty:
            return

    def _deliver(self, outputs: Sequence[Output]) -> None:
        """Post the outputs of a step, with one wake-up per event loop."""
        posts: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Item]]] = {}
        for output in outputs:
            request_id = output.request_id
            mailbox = self._mailboxes.pop(request_id, None) if output.finished else self._mailboxes.get(request_id)
            if mailbox is not None:
                posts.setdefault(mailbox.loop, []).append((mailbox, output))
        for loop, items in posts.items():
            if not self._post(loop, items):
                self._abort_clients_of(loop)

    @staticmethod
    def _post(loop: asyncio.AbstractEventLoop, items: list[tuple[Mailbox, Item]]) -> bool:
        def put_all() -> None:
            for mailbox, item in items:
                mailbox.put(item)

        try:
            loop.call_soon_threadsafe(put_all)
        except RuntimeError:  # the clients' event loop is closed
            return False
        return True

    def _abort_clients_of(self, loop: asyncio.AbstractEventLoop) -> None:
        for request_id in [each for each, mailbox in self._mailboxes.items() if mailbox.loop is loop]:
            del self._mailboxes[request_id]
            self.engine.abort(request_id)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _abort_all(self, ids: list[str]) -> None:
        outputs = [self.engine.abort(request_id) for request_id in ids]
        self._deliver([output for output in outputs if output is not None])

    def _fail(self, error: Exception) -> None:
        """End every request with the error of a failed step. The engine continues without them."""
        log.error("a step failed: all requests end", exc_info=error)
        for request_id in list(self.engine.parents):
            self.engine.abort(request_id)
            mailbox = self._mailboxes.pop(request_id, None)
            if mailbox is not None:
                self._post(mailbox.loop, [(mailbox, error)])
