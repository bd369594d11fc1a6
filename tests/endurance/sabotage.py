"""Things that fail when a test wants it: a trap counts what passes it, and lets something go wrong at a given count."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from outrider import LLM
from outrider.request import Request

# The long form tries every place and every method, the short one a few of each.
LONG = os.environ.get("OUTRIDER_ENDURANCE") == "1"
METHODS = ("none", "ngram", "eagle3", "draft_model", "medusa", "dspark") if LONG else ("none", "ngram", "eagle3")
RESERVING = frozenset({"upload", "zeros"})  # what of a device takes memory
CAUSE = "sabotage"
ERRORS: dict[str, Callable[[], Exception]] = {
    "a kernel fails": lambda: RuntimeError(f"{CAUSE} in a kernel"),
    "the host has no memory": MemoryError,  # as Python raises it: without a word
    "the device has no memory": lambda: torch.OutOfMemoryError(f"CUDA out of memory: {CAUSE}"),
}


class Trap:
    """Everything passes and is counted, but what comes as number `at`, and the `times` - 1 after it, fails."""

    def __init__(self) -> None:
        self.count = 0
        self.sprung = 0
        self._at: range = range(0)
        self._error: Callable[[], Exception] = ERRORS["a kernel fails"]

    def arm(self, at: int, error: Callable[[], Exception], times: int = 1) -> None:
        self.count, self.sprung = 0, 0
        self._at, self._error = range(at, at + times), error

    def rest(self) -> None:
        self.count, self.sprung, self._at = 0, 0, range(0)

    def step_on(self) -> None:
        here, self.count = self.count, self.count + 1
        if here in self._at:
            self.sprung += 1
            raise self._error()

    @contextmanager
    def counting(self) -> Iterator[Trap]:
        """`count` is then what passed inside the block."""
        self.rest()
        yield self


class Trapped:
    """An object, or a module, some of whose functions lead over a trap."""

    def __init__(self, inner: Any, trap: Trap, only: frozenset[str] | None = None) -> None:
        self._inner, self._trap, self._only = inner, trap, only

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found) or isinstance(found, type) or (self._only is not None and name not in self._only):
            return found

        def stepping(*arguments: Any, **named: Any) -> Any:
            self._trap.step_on()
            result = found(*arguments, **named)
            return TrappedReplay(result, self._trap) if name == "record" and result is not None else result

        return stepping


class TrappedReplay:
    """A recording of kernel calls whose replays lead over a trap."""

    def __init__(self, replay: Any, trap: Trap) -> None:
        self._replay, self._trap = replay, trap

    def __call__(self, *arguments: Any) -> Any:
        self._trap.step_on()
        return self._replay(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replay, name)


class Tight(Trapped):
    """A device without room to spare: whatever takes memory, or fills it, leads over the trap."""

    def __init__(self, device: Any, trap: Trap) -> None:
        super().__init__(device, trap, RESERVING)

    def buffer(self, count: int, dtype: torch.dtype) -> Any:
        self._trap.step_on()
        return Trapped(self._inner.buffer(count, dtype), self._trap, frozenset({"fill"}))


@dataclass
class Fragile:
    """An engine whose kernels and whose device lead over traps, at rest until a test arms them."""

    llm: LLM
    kernels: Trap
    memory: Trap


def check_nothing_left(llm: LLM) -> None:
    """No request, no page, nothing that a drafter or the choice of widths still keeps of one."""
    engine = llm.engine
    engine.scheduler.check()
    cache = engine.scheduler.cache
    assert engine.is_idle and not engine.parents
    assert cache.available == cache.pages, f"{cache.pages - cache.available} pages leaked"
    assert not engine.spec_manager.controller.num_requests, "the choice of widths remembers a request that is gone"
    for name, method in engine.spec_manager.methods.items():
        assert not remembered(method), f"`{name}` remembers a request that is gone"


def remembered(drafter: object, depth: int = 2) -> list[Request]:
    """Requests that a drafter, or a part of it, keeps something about."""
    found: list[Request] = []
    for part in vars(drafter).values():
        if isinstance(part, dict | set):
            found += [each for each in part if isinstance(each, Request)]
        elif depth and type(part).__module__.startswith("outrider.speculation") and hasattr(part, "__dict__"):
            found += remembered(part, depth - 1)
    return found
