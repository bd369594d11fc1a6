"""How long each operation takes, at each instruction-set level, beside the reference in the same run.

On a device, its inputs lie there already, and the operation is a recorded one where the device can do that. The
reference is plain torch on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..device import Device, open_device
from ..kernels import _native, cpu, load, reference
from ..kernels.cases import CASES, Case, Run, difference

SEED = 1
SLICE = 2e-3  # seconds that one contender runs before the next one's turn, at least
ROUNDS = 3  # at least


@dataclass(frozen=True)
class KernelResult:
    op: str
    case: str
    level: str
    seconds: float  # one call, median over rounds
    reference_seconds: float
    bytes: int  # read by one call; 0: unknown
    error: float  # largest, relative to the size of the reference's result
    tolerance: float

    @property
    def gigabytes_per_second(self) -> float | None:
        return self.bytes / self.seconds / 1e9 if self.bytes else None

    @property
    def speedup(self) -> float:
        return self.reference_seconds / self.seconds


def rows(backend: str, seconds: float, cases: list[Case] | None = None) -> list[KernelResult]:
    """Time the cases that are large enough, on every level of `backend`, in about `seconds` altogether."""
    chosen = cases if cases is not None else [case for case in CASES if case.timed]
    return [result for case in chosen for result in _time(case, backend, seconds / len(chosen))]


def _time(case: Case, backend: str, seconds: float) -> list[KernelResult]:
    """Contenders take turns, so that what slows the machine for a while slows them all."""
    device, oracle = open_device(backend), case.build(reference, SEED)
    expected = oracle(None)
    run, call = _prepare(case, backend, device)
    levels = _levels(backend)
    errors = dict.fromkeys(levels, 0.0)
    for level in levels:
        with _at(backend, level):
            found = run(None)
        errors[level] = max(difference(result, meant) for result, meant in zip(found, expected, strict=True))
    samples: dict[str | None, list[float]] = {None: [], **{level: [] for level in levels}}
    end = time.perf_counter() + seconds
    while len(samples[None]) < ROUNDS or time.perf_counter() < end:
        samples[None].append(_slice(lambda: oracle(None), device))
        for level in levels:
            with _at(backend, level):
                samples[level].append(_slice(call, device))
    return [
        KernelResult(
            op=case.op,
            case=case.name,
            level=level,
            seconds=median(samples[level]),
            reference_seconds=median(samples[None]),
            bytes=case.bytes,
            error=errors[level],
            tolerance=case.loose if backend == "cuda" else case.at(level),
        )
        for level in levels
    ]


def _prepare(case: Case, backend: str, device: Device) -> tuple[Run, Callable[[], object]]:
    """The case for inputs and results of the host, and what of it is to be timed."""
    if device.torch_device.type == "cpu":
        run = case.build(load(backend), SEED)
        return run, lambda: run(None)
    recorder = Recorder(load(backend), device.torch_device)
    run = case.build(recorder, SEED)
    recorder.forget()
    run(None)  # which also compiles what is then recorded
    return run, device.capture(recorder.replay)


def _slice(call: Callable[[], object], device: Device) -> float:
    """Seconds of one call, averaged over as many as fit into a slice."""
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < SLICE or calls == 0:
        call()
        calls += 1
    device.fence().wait()
    return (time.perf_counter() - start) / calls


def _levels(backend: str) -> list[str]:
    return {"reference": ["torch"], "cuda": ["triton"]}.get(backend) or cpu.facts()["levels"]


@contextmanager
def _at(backend: str, level: str) -> Iterator[None]:
    if backend != "cpu":
        yield
        return
    before = cpu.facts()["level"]
    _native.choose_level(level)
    try:
        yield
    finally:
        _native.choose_level(before)


HOST = torch.device("cpu")


class Recorder:
    """A backend whose operations take their tensors to `place`, and bring back results and what changed in place.

    `replay` calls the operations since `forget` once more, on the tensors that were taken there. Handles stay there.
    """

    def __init__(self, ops: Any, place: torch.device) -> None:
        self._ops, self._place = ops, place
        self._calls: list[Callable[[], Any]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return partial(self._run, found) if callable(found) else found

    def forget(self) -> None:
        self._calls.clear()

    def replay(self) -> list[Any]:
        return [call() for call in self._calls]

    def _run(self, operation: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        taken: dict[int, Moved] = {}  # tensors that several arguments share are one tensor there, too
        call = partial(operation, *self._take(arguments, taken), **self._take(named, taken))
        self._calls.append(call)
        found = call()
        for tensor in taken.values():
            tensor.here.copy_(tensor.there)
        if isinstance(found, Tensor):  # `out` comes back as what was passed in
            return next((each.here for each in taken.values() if each.there is found), found.to(HOST))
        return self._bring(found)

    def _take(self, value: Any, taken: dict[int, Moved]) -> Any:
        if isinstance(value, Tensor) and value.device == HOST:
            return taken.setdefault(id(value), Moved(value, value.to(self._place, copy=True))).there
        return _through(value, lambda each: self._take(each, taken))

    def _bring(self, value: Any) -> Any:
        return value.to(HOST) if isinstance(value, Tensor) else _through(value, self._bring)


@dataclass(frozen=True)
class Moved:
    here: Tensor
    there: Tensor


def _through(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with `change` made to all that it holds; handles of a backend are left alone."""
    if isinstance(value, dict):
        return {key: change(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(change, value))
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__ == "outrider.kernels":
        return replace(value, **{part.name: change(getattr(value, part.name)) for part in fields(value)})
    return value
