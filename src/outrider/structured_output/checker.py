"""Compile grammars in a worker process first, which survives what the backend does not.

A thread talks to the worker, so that `check` never blocks: not while the worker starts, nor while it compiles.
"""

from __future__ import annotations

import json
import os
import pickle
import selectors
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from .worker import LENGTH

Vocabulary = tuple[list[bytes], list[int], list[int]]  # spellings, special tokens, end tokens
EXIT_SECONDS = 2.0  # that the worker may take to end, before it is killed


class RefusedError(ValueError):
    """The grammar cannot be compiled, or not within the limits of the worker."""


class Checker:
    """Checks grammars for one vocabulary. Thread-safe."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._link = _Link(vocabulary)
        weakref.finalize(self, self._link.close)  # runs at the exit of the interpreter too

    def check(self, kind: str, text: str) -> Future[int]:
        """Return the future of the bytes that a grammar takes, or of RefusedError.

        If the future is cancelled, the child process is killed.
        """
        return self._link.check(kind, text)


class _Link:
    """The state that the checker shares with its thread. It does not know the checker, or none would ever end."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._commands: deque[tuple[int, str, str] | int] = deque()
        self._checks: dict[int, Future[int]] = {}
        self._count = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""

    def check(self, kind: str, text: str) -> Future[int]:
        future: Future[int] = Future()
        with self._lock:
            if self._thread is None:
                self._wake_reader, self._wake_writer = os.pipe()
                self._thread = threading.Thread(target=self._run, name="outrider-grammar-check", daemon=True)
                self._thread.start()
            self._count += 1
            number = self._count
            self._checks[number] = future
            self._commands.append((number, kind, text))
            self._wake()
        future.add_done_callback(lambda done: self._cancel(number) if done.cancelled() else None)
        return future

    def _cancel(self, number: int) -> None:
        with self._lock:
            if self._checks.pop(number, None) is not None and not self._closed:
                self._commands.append(number)
                self._wake()

    def _wake(self) -> None:
        os.write(self._wake_writer, b".")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            thread = self._thread
            if thread is not None:
                self._wake()
        if thread is not None:
            thread.join(2 * EXIT_SECONDS)

    # ---- on the thread ----

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in selector.select():
                    if key.fd != self._wake_reader:
                        self._receive(selector)
                        continue
                    os.read(self._wake_reader, 2**12)
                    try:
                        self._send_all(selector)
                    except Exception as error:  # no process can be started, or it ended
                        self._fail(selector, error)
        self._stop()
        with self._lock:
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def _send_all(self, selector: selectors.BaseSelector) -> None:
        while self._commands and not self._closed:
            if self._process is None:
                self._process = start_worker()
                assert self._process.stdout is not None
                selector.register(self._process.stdout, selectors.EVENT_READ)
                self._send(self._vocabulary())
            self._send(self._commands.popleft())

    def _send(self, value: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        data = pickle.dumps(value)
        self._process.stdin.write(LENGTH.pack(len(data)) + data)
        self._process.stdin.flush()

    def _receive(self, selector: selectors.BaseSelector) -> None:
        assert self._process is not None and self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), 2**16)
        if not data:
            self._fail(selector, RuntimeError("the process that checks grammars ended"))
            return
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            with self._lock:
                future = self._checks.pop(answer["number"], None)
            if future is None or not future.set_running_or_notify_cancel():
                continue
            if "bytes" in answer:
                future.set_result(int(answer["bytes"]))
            else:
                future.set_exception(RefusedError(answer["refused"]))

    def _fail(self, selector: selectors.BaseSelector, error: Exception) -> None:
        """Fail all checks. The next one starts another process."""
        if self._process is not None and self._process.stdout is not None:
            selector.unregister(self._process.stdout)
        self._stop()
        with self._lock:
            failed = list(self._checks.values())
            self._checks.clear()
            self._commands.clear()
        for future in failed:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _stop(self) -> None:
        process, self._process, self._received = self._process, None, b""
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):
            process.stdin.close()  # the worker ends, with its children
        try:
            process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def start_worker() -> subprocess.Popen[bytes]:
    """Start the worker, in a session of its own: a signal for the terminal's processes is not for it."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "outrider.structured_output.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
