"""Wait for conditions instead of times: a slow machine makes a test slow, and never fails it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

TIMEOUT = 60.0  # seconds; only a test that hangs reaches it, because the operations take milliseconds


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


@contextmanager
def counted_steps(llm: Any, count: int) -> Iterator[threading.Semaphore]:
    """Let the engine take `count` steps with an output; each permit that the test releases allows another one.

    So requests cannot end before the test has looked at them, however late its thread runs.
    """
    step, permits = llm.engine.step, threading.Semaphore(count)

    def counted(*arguments: Any) -> Any:
        # Longer than `wait_until`: a failed step ends the requests, as an abort would.
        assert permits.acquire(timeout=2 * TIMEOUT), "the test released no permit"
        outputs = step(*arguments)
        if not outputs:
            permits.release()
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "step", counted)
        try:
            yield permits
        finally:
            permits.release(10**6)


def wait_until_idle(llm: Any, permits: threading.Semaphore) -> None:
    """Wait until the engine has no request; allow a step whenever a command, such as an abort, waits for its end."""

    def idle() -> bool:
        if llm._shared._commands:
            permits.release()
        return bool(llm.engine.is_idle)

    wait_until(idle)
