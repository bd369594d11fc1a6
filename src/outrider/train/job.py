"""The settings of a training run, the interfaces for its progress and result, and its reaction to signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, get_args

from ..errors import UserError
from .io.export import StorageFormat
from .loop import Limits
from .methods import HeadSpec

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LEAST = {"rows": 1, "length": 4, "answer_length": 1, "steps": 1, "max_requests": 1, "seed": 0}
DEFAULT_PASSES = 3.0  # over the data, if no limit is given


@dataclass(frozen=True)
class Job:
    """The settings of a run; fields are named as the flags of `outrider train`."""

    model: str
    out: Path
    methods: tuple[HeadSpec, ...] = ()
    prompts: tuple[Path, ...] = ()
    backend: str = "auto"
    seed: int = 0
    # answers
    tokens: int = 10_000_000
    max_new: int = 512
    self_prompts: float = 0.0
    greedy: float = 0.5  # fraction of the answers that are greedy
    skip_broken: bool = False
    max_requests: int | None = None  # None: the device's default
    answers: Path | None = None  # of another run; None: those of this run
    answers_only: bool = False
    # training
    init_from: str | None = None  # heads of the same names to start from: a state.pt, a folder or `shipped`
    begin: str | None = None  # deprecated alias of init_from
    rows: int = 32
    length: int = 1024
    answer_length: int | None = None  # train on this many tokens of an answer; None: all
    steps: int | None = None
    passes: float | None = None  # DEFAULT_PASSES if no other limit is given
    seconds: float | None = None
    storage: StorageFormat = "q8_0"  # of the matrices of exported heads

    def __post_init__(self) -> None:
        if self.begin is not None and self.init_from is None:
            object.__setattr__(self, "init_from", self.begin)
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"`{name}` is {value}: it must be {least} or more")
        if self.storage not in get_args(StorageFormat):
            raise UserError(f"`storage` is `{self.storage}`: it must be one of {', '.join(get_args(StorageFormat))}")
        for name in ("passes", "seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"`{name}` is {value}: it must be above 0")
        if self.answers is not None and self.answers_only:
            raise UserError("`answers` names existing answers and `answers_only` asks for new ones: pass one of them")
        if self.answers is not None and self.prompts:
            raise UserError("`answers` names existing answers, for which no `prompts` are read: pass one of them")
        if self.answers is None and not self.prompts and not self.self_prompts:
            raise UserError("there are no prompts: pass files with `--prompts`, or answers with `--answers`")
        if not self.methods and not self.answers_only:
            raise UserError("no method is named: pass one to train, such as `eagle3`, or `--answers-only`")

    def limits(self, steps_per_pass: int) -> Limits:
        passes = self.passes
        if passes is None and self.steps is None and self.seconds is None:
            passes = DEFAULT_PASSES
        counts = [self.steps] if self.steps is not None else []
        counts += [max(round(passes * steps_per_pass), 1)] if passes is not None else []
        return Limits(min(counts) if counts else None, self.seconds)


@dataclass(frozen=True)
class RunResult:
    finished: bool
    said: str  # a sentence for the user
    card: dict[str, Any]


class Interrupts:
    """A context in which Ctrl-C and SIGTERM raise KeyboardInterrupt, or, inside `deferred`, only set `asked`.

    A second signal always raises.
    """

    def __init__(self) -> None:
        self.asked = False
        self._deferring = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
            self._handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the first signal set `asked` in place of raising."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def _handle(self, _: int, __: FrameType | None) -> None:
        if self.asked or not self._deferring:
            raise KeyboardInterrupt
        self.asked = True
