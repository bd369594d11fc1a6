"""AsyncLLM: outputs as async iterators, and a thread that runs the engine's steps."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar, Unpack

from .adapters import LoRARequest
from .config import EngineOptions
from .engine import Engine
from .input_processor import Prompt
from .llm import LLM, Message, as_params, channel_splitter, either
from .shared_engine import EngineStoppedError as EngineStoppedError
from .shared_engine import for_other_threads, notify
from .structured_output.matcher import Grammar
from .types import Output, SamplingParams

Result = TypeVar("Result")
Item = Output | BaseException
CLOSED = "the engine is closed: start a new one"

log = logging.getLogger(__name__)


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

    def __init__(self, on_end: Callable[[], None] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._item: Item | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Replace the item and wake the reader. Runs on the client's event loop."""
        self._item = item
        if self._on_end is not None and (isinstance(item, BaseException) or item.finished):
            self._on_end()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Item:
        while self._item is None:
            self._reader = self.loop.create_future()
            await self._reader
        item, self._item = self._item, None
        return item


class AsyncLLM:
    """One engine for many clients. If a client disconnects, only its own request ends.

    Several may share an LLM, and threads may call the methods of that LLM meanwhile.
    """

    partial = True  # receives outputs as they grow

    def __init__(self, model: str | Path | LLM, **options: Unpack[EngineOptions]) -> None:
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._shared = self.llm.shared
        self._wakeup = threading.Condition(self._shared.lock)
        self._mailboxes: dict[str, Mailbox] = {}
        self._paused = False
        self._closing = False
        self._stopped: EngineStoppedError | None = None  # set once the engine takes no more requests
        self._failure: BaseException | None = None
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
        began = self._shared.step_began
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
            pages_used=round(cache.usage * cache.pages),
        )

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        on_end: Callable[[], None] | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Yield the output as it grows; each item holds the whole text so far. Leaving the loop aborts the request.

        on_end: called on the event loop when the engine has ended the request, even if its last output is not read yet.
        """
        (used,) = as_params(either(params, sampling_params), 1)
        mailbox = Mailbox(on_end)
        ids: list[str] = []  # the request's id, once the engine has it
        grammar = await self._compile(used)

        def add() -> None:
            ids.append(self._shared.add(prompt, used, self, request_id, lora_request))
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
                self._send(lambda: self._shared.finish(ids))

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Answer a conversation as `generate` answers a prompt, with texts split as those of `LLM.chat`."""
        (given,) = as_params(either(params, sampling_params), 1)
        used, splitter = channel_splitter(given, self.llm.tokenizer)
        async for output in self.generate(self.llm.chat_prompt(messages), used, lora_request=lora_request):
            yield output if splitter is None else splitter.push(output)

    async def add_lora(self, lora_request: LoRARequest, replace: bool = False) -> bool:
        """Load an adapter for later requests. It is read beside the engine's thread; steps go on meanwhile.

        replace: unload an adapter of the same name first.
        """
        manager, name, path = self.engine.adapters, lora_request.lora_name, lora_request.lora_path
        pairs = await asyncio.to_thread(manager.read, path)

        def add() -> None:
            if replace and name in manager.loaded:
                manager.remove(name)
            manager.add(name, path, pairs)

        await self._call(add)
        return True

    async def remove_lora(self, name: str) -> bool:
        """Unload an adapter. Its unfinished requests go on with it."""
        await self._call(lambda: self.engine.adapters.remove(name))
        return True

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator gets a last output with finish_reason `abort`."""
        await self._call(lambda: self._shared.finish([request_id]))

    async def abort_all(self) -> None:
        """End all requests of the engine, also those of the LLM."""
        await self._call(lambda: self._shared.finish(list(self.engine.parents)))

    async def pause(self) -> None:
        """Stop between two steps. All requests, also those of the LLM, keep their state and wait until `resume`."""
        await self._call(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._call(lambda: self._set_paused(False))

    async def clear_cache(self) -> None:
        await self._call(self.engine.clear_cache)

    def close(self, timeout: float | None = None) -> None:
        """Stop after the current step; wait for it for at most `timeout` seconds."""
        self._closing = True
        notify(self._wakeup)
        self._compiling.shutdown(wait=False)  # calls that wait there raise at once
        self._thread.join(timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # ---- on the clients' threads ----

    async def _compile(self, params: SamplingParams) -> Grammar | None:
        """Compile the grammar of a request, off the engine's thread so that other requests do not wait for it."""
        if params.structured is None:
            return None
        compiler, structured = self.engine.compiler, params.structured
        grammar = compiler.find(structured)
        if grammar is not None:
            return grammar
        # If the client goes, cancelling this future ends the work of the process that checks grammars.
        size = await asyncio.wrap_future(compiler.check(structured))

        def compile_checked() -> Grammar:
            if self._closing:
                raise EngineStoppedError(CLOSED)
            return compiler.compile_checked(structured, size)

        try:
            compiling = self._compiling.submit(compile_checked)
        except RuntimeError:  # `close` has shut it down
            raise EngineStoppedError(CLOSED) from None
        return await asyncio.wrap_future(compiling)

    async def _call(self, call: Callable[[], Result]) -> Result:
        """Run `call` on the engine's thread, between two steps, and return its result."""
        return await asyncio.wrap_future(self._send(call))

    def _send(self, call: Callable[[], Result]) -> Future[Result]:
        """Queue a call for the thread that runs the steps."""

        def run() -> Result:
            if self._stopped is not None:
                raise self._stopped
            return call()

        future = self._shared.submit(run)
        # Checked after `submit`, as `_stop` runs the queued calls after setting `_stopped`: none is left in between.
        if self._stopped is not None:
            self._shared.drain()
        return future

    # ---- on the engine's thread ----

    def _thread_main(self) -> None:
        try:
            self._shared.work(self._wakeup, lambda: self._closing, probe=True)
        except BaseException as error:
            log.critical("the engine's thread failed", exc_info=error)
            self._failure = error
        finally:
            self._stop()

    def _stop(self) -> None:
        """Fail everything that waits for the engine."""
        reason = CLOSED if self._failure is None else f"the engine died ({self._failure!r}): start a new one"
        self._stopped = stopped = EngineStoppedError(reason)
        self._shared.call(lambda: self._release(stopped))

    def _release(self, stopped: EngineStoppedError) -> None:
        """End the requests of this object. The LLM stays usable without it."""
        request_ids = list(self._mailboxes)
        self._shared.set_paused(self, False)
        self.fail(request_ids, stopped)
        if self._failure is None:  # else the engine may be unable to end requests
            self._shared.drop(request_ids)

    # ---- on the thread that runs the steps ----

    def deliver(self, outputs: list[Output]) -> None:
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

    def fail(self, request_ids: list[str], error: BaseException) -> None:
        """Post an error to the clients of these requests."""
        if not isinstance(error, Exception) and threading.current_thread() is self._thread:
            return  # the thread ends, and `_stop` tells the clients
        for request_id in request_ids:
            mailbox = self._mailboxes.pop(request_id, None)
            if mailbox is not None:
                self._post(mailbox.loop, [(mailbox, for_other_threads(error))])

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
        request_ids = [each for each, mailbox in self._mailboxes.items() if mailbox.loop is loop]
        for request_id in request_ids:
            del self._mailboxes[request_id]
        self._shared.drop(request_ids)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused
        self._shared.set_paused(self, paused)
