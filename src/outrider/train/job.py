"""What a run of training is asked to do, whom it tells, and how it is asked to stop."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, get_args

from ..errors import UserError
from .io.export import Storage
from .loop import Limits, Moment
from .methods import Asked

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Job:
    model: str
    out: Path
    methods: tuple[Asked, ...] = ()
    prompts: tuple[Path, ...] = ()
    backend: str = "auto"
    seed: int = 0
    # the answers
    tokens: int = 10_000_000
    max_new: int = 512
    self_prompts: float = 0.0
    greedy: float = 0.5  # share of the answers that are greedy
    skip_broken: bool = False
    max_requests: int | None = None  # None: what suits the device
    answers: Path | None = None  # made elsewhere; None: those of this run
    answers_only: bool = False
    # the training
    begin: str | None = None  # heads begin with those of the same names there: a state, a folder or `shipped`
    rows: int = 32
    length: int = 1024
    answer_length: int | None = None  # of an answer, learn from so many tokens; None: all
    steps: int | None = None
    passes: float | None = None  # 3 where nothing else says when to end
    seconds: float | None = None
    storage: Storage = "q8_0"  # of the matrices that are written

    def __post_init__(self) -> None:
        for name, least in (
            ("rows", 1),
            ("length", 4),
            ("answer_length", 1),
            ("steps", 1),
            ("max_requests", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"`{name}` is {value}: it must be {least} or more")
        if self.storage not in get_args(Storage):
            raise UserError(f"`storage` is `{self.storage}`: it must be one of {', '.join(get_args(Storage))}")
        for name in ("passes", "seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"`{name}` is {value}: it must be above 0")
        if self.answers is not None and self.answers_only:
            raise UserError("`answers` are there already and `answers_only` asks for them: leave one out")
        if self.answers is None and not self.prompts and not self.self_prompts:
            raise UserError("there are no prompts: pass files with `--prompts`, or answers with `--answers`")
        if not self.methods and not self.answers_only:
            raise UserError("no method is named: say what to train, such as `eagle3`, or `--answers-only`")

    def limits(self, steps_per_pass: int) -> Limits:
        passes = self.passes
        if passes is None and self.steps is None and self.seconds is None:
            passes = 3
        counts = [self.steps] if self.steps is not None else []
        counts += [max(round(passes * steps_per_pass), 1)] if passes is not None else []
        return Limits(min(counts) if counts else None, self.seconds)


class Watcher(Protocol):
    """Who is told how it goes."""

    def stage(self, text: str) -> None:
        """Something long begins."""
        ...

    def answers(self, documents: int, tokens: int, wanted: int) -> None: ...

    def moment(self, moment: Moment) -> None: ...

    def note(self, text: str) -> None:
        """A sentence that the user should see."""
        ...


@dataclass(frozen=True)
class Result:
    finished: bool
    said: str  # a sentence for the user
    card: dict[str, Any]


class Interrupts:
    """Ctrl-C and SIGTERM while it is entered: a wish to stop while someone is patient, else KeyboardInterrupt.

    The second one is never a wish.
    """

    def __init__(self) -> None:
        self.asked = self.patient = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # the only one that may listen
            self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, _: int, __: FrameType | None) -> None:
        if self.asked or not self.patient:
            raise KeyboardInterrupt
        self.asked = True
