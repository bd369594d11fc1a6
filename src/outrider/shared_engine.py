"""One engine for many threads: one thread at a time runs its steps, and each caller gets the outputs of its requests.

No thread belongs to the engine. A caller that waits for output runs the steps itself, for all requests; while another
caller does so, it waits. Calls that must not run during a step (`add`, `abort`, ...) are queued as commands, which the
thread that runs the steps executes between two of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from .adapters import LoRARequest
from .engine import Engine
from .input_processor import Prompt, PromptInput
from .types import FinishReason, Output, SamplingParams

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class EngineStoppedError(RuntimeError):
    """The engine takes no requests, or lost this one: it was closed, it failed, or a step was interrupted."""


class Receiver(Protocol):
    """Takes the outputs of some requests. Its methods run on the thread that runs the steps and must not block."""

    partial: bool  # takes unfinished outputs too

    def deliver(self, outputs: list[Output]) -> None: ...

    def fail(self, request_ids: list[str], error: BaseException) -> None:
        """Learn that these requests ended without an output."""


class Command:
    """A call to run between two steps, and the future of its result."""

    def __init__(self, call: Callable[[], Any], future: Future[Any]) -> None:
        self.call, self.future = call, future

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():  # the caller has cancelled
            return
        try:
            result = self.call()
        except BaseException as error:
            self.future.set_exception(error)
            if isinstance(error, KeyboardInterrupt):  # belongs to this thread, whichever asked for the call
                raise
        else:
            self.future.set_result(result)


class SharedEngine:
    """Lets threads use an engine one after the other. Thread-safe, except for methods that only commands may call."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.step_began: float | None = None  # `monotonic` at the start of the current step; None between steps
        # Reentrant, because a stream that is collected as garbage calls `abort` at any point of its thread.
        self.lock = threading.RLock()
        self._leader: threading.Condition | None = None  # of the thread that uses the engine
        self._waiters: deque[threading.Condition] = deque()
        self._commands: deque[Command] = deque()
        self._receivers: dict[str, Receiver] = {}
        self._paused_by: set[object] = set()
        self._closed: EngineStoppedError | None = None

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Queue a call to run between two steps, and wake a thread that waits in `work`. Does not block."""
        future: Future[Result] = Future()
        self._commands.append(Command(call, future))
        with self.lock:
            self._wake_next()
        return future

    def call(self, call: Callable[[], Result]) -> Result:
        """Run a call between two steps and return its result."""
        wakeup = threading.Condition(self.lock)
        future = self.submit(call)
        future.add_done_callback(lambda _: notify(wakeup))
        self.work(wakeup, future.done)
        return future.result()

    def work(self, wakeup: threading.Condition, done: Callable[[], bool], probe: bool = False) -> None:
        """Run commands and steps until `done()` is true. While another thread runs them, wait on `wakeup`.

        Notify `wakeup`, a condition over `lock`, whenever `done` may have become true. With `probe`, check the device
        after a failure, and raise its error if it is lost.
        """
        try:
            while self._lead(wakeup, done):
                try:
                    self._run_commands()
                    with self.engine.single_threaded_torch:  # until the caller goes on
                        while not done() and self._can_step:
                            self._step(probe)
                            self._run_commands()
                finally:
                    self._hand_over()
        finally:
            if self._leader is wakeup:  # interrupted before the inner block
                self._hand_over()
            self.drain()

    def abort(self, request_ids: Collection[str]) -> None:
        """End requests without delivering an output: now, or after the current step if another thread is in one.

        `request_ids` is read only then, after the earlier commands: an interrupted call may still add a request.
        """
        self.submit(lambda: self.drop(request_ids))
        self.drain()

    def close(self) -> None:
        """End all requests after the current step, and refuse new ones."""
        stopped = EngineStoppedError("the engine is closed: start a new one")

        def close() -> None:
            self._closed = stopped
            self._fail_all(stopped)

        if self._closed is None:
            self.call(close)

    def drain(self) -> None:
        """Run queued commands, unless another thread uses the engine: it will run them."""
        wakeup = threading.Condition(self.lock)
        while self._commands:
            with self.lock:
                if self._leader is not None:
                    return
                self._leader = wakeup
            try:
                self._run_commands()
            finally:
                self._hand_over()

    # ---- only inside a command or a receiver ----

    def add(
        self,
        prompt: Prompt | PromptInput,
        params: SamplingParams,
        receiver: Receiver,
        request_id: str | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> str:
        """Queue a prompt and return the id of the request."""
        if self._closed is not None:
            raise self._closed
        request_id = self.engine.add(prompt, params, request_id, lora_request)
        self._receivers[request_id] = receiver
        return request_id

    def finish(self, request_ids: Iterable[str]) -> None:
        """End requests and deliver their last outputs."""
        outputs = [self.engine.abort(request_id) for request_id in request_ids]
        self._deliver([output for output in outputs if output is not None])

    def drop(self, request_ids: Iterable[str]) -> None:
        """End requests without delivering an output."""
        for request_id in request_ids:
            self._receivers.pop(request_id, None)
            self.engine.abort(request_id)

    def set_paused(self, by: object, paused: bool) -> None:
        """Stop or continue the steps: they continue once no caller pauses them."""
        if paused:
            self._paused_by.add(by)
        else:
            self._paused_by.discard(by)

    # ---- which thread uses the engine ----

    @property
    def _can_step(self) -> bool:
        return not self._paused_by and not self.engine.is_idle

    def _lead(self, wakeup: threading.Condition, done: Callable[[], bool]) -> bool:
        """Wait until there is work and no other thread does it; return False if `done` came first."""
        with self.lock:
            try:
                while not done():
                    if self._leader is None and (self._commands or self._can_step):
                        self._leader = wakeup
                        return True
                    self._waiters.append(wakeup)
                    try:
                        wakeup.wait()
                    finally:
                        self._waiters.remove(wakeup)
            except BaseException:
                self._wake_next()
                raise
            self._wake_next()  # a wake-up that this thread has no use for
            return False

    def _hand_over(self) -> None:
        with self.lock:
            self._leader = None
            self._wake_next()

    def _wake_next(self) -> None:
        if self._leader is None and self._waiters and (self._commands or self._can_step):
            self._waiters[0].notify()

    # ---- on the thread that uses the engine ----

    def _run_commands(self) -> None:
        while self._commands:  # other threads add commands, but only this one takes them
            self._commands.popleft().run()

    def _step(self, probe: bool) -> None:
        self.step_began = time.monotonic()
        try:
            outputs = self.engine.step(not any(receiver.partial for receiver in self._receivers.values()))
        except Exception as error:
            log.error("a step failed: all requests end", exc_info=error)
            self._fail_all(error)
            failed = True
        except BaseException as error:  # Ctrl-C, or the end of this thread
            self._fail_all(error)
            raise
        else:
            self._deliver(outputs)
            completions = (completion for output in outputs for completion in output.completions)
            failed = any(completion.finish_reason == FinishReason.ERROR for completion in completions)
        finally:
            self.step_began = None
        if failed and probe:
            self._probe()

    def _probe(self) -> None:
        """Check the device after a failure.

        If it is lost, as after an illegal address, this raises. Otherwise every later request would fail while the
        engine reports itself as alive.
        """
        self.step_began = time.monotonic()
        try:
            self.engine.device.fence().wait()
        finally:
            self.step_began = None

    def _deliver(self, outputs: Iterable[Output]) -> None:
        received: dict[Receiver, list[Output]] = {}
        for output in outputs:
            find = self._receivers.pop if output.finished else self._receivers.get
            receiver = find(output.request_id, None)
            if receiver is not None:
                received.setdefault(receiver, []).append(output)
        for receiver, own in received.items():
            receiver.deliver(own)

    def _fail_all(self, error: BaseException) -> None:
        """End every request with an error. The engine continues without them."""
        failed: dict[Receiver, list[str]] = {}
        for request_id, receiver in self._receivers.items():
            failed.setdefault(receiver, []).append(request_id)
        self.drop(list(self.engine.parents))
        self._receivers.clear()
        for receiver, request_ids in failed.items():
            receiver.fail(request_ids, error)


class Inbox:
    """The newest output of each request of one call, for a thread that waits for them.

    Each output holds the whole text so far, so a slow reader gets fewer, larger ones.
    """

    def __init__(self, shared: SharedEngine, partial: bool) -> None:
        self.partial = partial
        self._shared, self._wakeup = shared, threading.Condition(shared.lock)
        self._newest: dict[str, Output] = {}
        self._error: BaseException | None = None

    def deliver(self, outputs: list[Output]) -> None:
        with self._wakeup:
            self._newest |= {output.request_id: output for output in outputs if output.finished or self.partial}
            self._wakeup.notify()

    def fail(self, request_ids: list[str], error: BaseException) -> None:
        with self._wakeup:
            self._error = for_other_threads(error)
            self._wakeup.notify()

    def wait(self) -> list[Output]:
        """Wait for new outputs and return them; run the engine's steps meanwhile, if no other thread does."""
        self._shared.work(self._wakeup, lambda: bool(self._newest) or self._error is not None)
        if self._error is not None:
            raise self._error
        with self._wakeup:
            newest, self._newest = self._newest, {}
        return list(newest.values())


def for_other_threads(error: BaseException) -> Exception:
    """Return what requests raise that ended with this error: an interrupt concerns only the thread that it hit."""
    if isinstance(error, Exception):
        return error
    return EngineStoppedError(f"a step was interrupted ({error!r}): send the request again")


def notify(wakeup: threading.Condition) -> None:
    with wakeup:
        wakeup.notify()
