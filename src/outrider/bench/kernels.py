"""`outrider bench kernels`: time each operation at each instruction-set level against the reference in the same run.

On a GPU the inputs are on the device already and the operation is replayed as a CUDA graph. The reference is plain
torch on the host.
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
from ..kernels import cpu, load, reference
from ..kernels.cases import CASES, Case, Run, difference
from ..kernels.cpu import _native

SEED = 1
SLICE = 2e-3  # seconds that one implementation runs before the next, at least
ROUNDS = 3  # slices of each implementation, at least


@dataclass(frozen=True)
class KernelResult:
    op: str
    case: str
    level: str
    seconds: float  # of one call, median over the slices
    reference_seconds: float
    bytes: int  # read by one call; 0: unknown
    error: float  # the largest, relative to the magnitude of the reference's result
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
    """Time all implementations of a case in alternating slices, so that a disturbance affects them alike."""
    device, oracle = open_device(backend), case.build(reference, SEED)
    expected = oracle(None)
    run, call = _prepare(case, backend, device)
    levels = _levels(backend)
    errors = dict.fromkeys(levels, 0.0)
    for level in levels:
        with _at(backend, level):
            results = run(None)
        errors[level] = max(difference(result, wanted) for result, wanted in zip(results, expected, strict=True))
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
    """Return the case for host tensors, and the call to time."""
    if device.torch_device.type == "cpu":
        run = case.build(load(backend), SEED)
        return run, lambda: run(None)
    recorder = Recorder(load(backend), device.torch_device)
    run = case.build(recorder, SEED)
    recorder.forget()
    run(None)  # compiles the kernels before the capture
    return run, device.capture(recorder.replay)


def _slice(call: Callable[[], object], device: Device) -> float:
    """Return the seconds of one call, averaged over the calls of one slice."""
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
    """Use an instruction-set level of the CPU backend within the context."""
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
    """A backend whose operations copy host tensors to `device`, and copy results and in-place changes back.

    `replay` repeats the operations since `forget` on the tensors on the device. Handles of packed weights stay there.
    """

    def __init__(self, ops: Any, device: torch.device) -> None:
        self._ops, self._device = ops, device
        self._calls: list[Callable[[], Any]] = []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._ops, name)
        return partial(self._run, attribute) if callable(attribute) else attribute

    def forget(self) -> None:
        self._calls.clear()

    def replay(self) -> list[Any]:
        return [call() for call in self._calls]

    def _run(self, operation: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        copies: dict[int, Copy] = {}  # by id: a tensor that several arguments share is copied once
        call = partial(operation, *self._upload(arguments, copies), **self._upload(named, copies))
        self._calls.append(call)
        result = call()
        for copy in copies.values():
            copy.host.copy_(copy.device)
        if isinstance(result, Tensor):  # return the caller's own tensor for `out`
            return next((copy.host for copy in copies.values() if copy.device is result), result.to(HOST))
        return self._download(result)

    def _upload(self, value: Any, copies: dict[int, Copy]) -> Any:
        if isinstance(value, Tensor) and value.device == HOST:
            return copies.setdefault(id(value), Copy(value, value.to(self._device, copy=True))).device
        return _map(value, lambda part: self._upload(part, copies))

    def _download(self, value: Any) -> Any:
        return value.to(HOST) if isinstance(value, Tensor) else _map(value, self._download)


@dataclass(frozen=True)
class Copy:
    host: Tensor
    device: Tensor


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the members of containers and of the protocol's dataclasses; leave backend handles alone."""
    if isinstance(value, dict):
        return {key: change(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(change, value))
    if is_dataclass(value) and not isinstance(value, type) and _of_the_protocol(type(value).__module__):
        return replace(value, **{part.name: change(getattr(value, part.name)) for part in fields(value)})
    return value


def _of_the_protocol(module: str) -> bool:
    """Say whether a module of `outrider.kernels` is shared by all backends."""
    package, _, name = module.partition("outrider.kernels")
    return not package and not name.lstrip(".").startswith(("cpu", "cuda", "reference"))
