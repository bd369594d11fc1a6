"""A device on the host that records, as a GPU does: for tests of what is captured, padded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from outrider.device import Buffer, Cpu, CpuBuffer, DeviceDefaults, Fence, Result, Values
from outrider.device.cpu import CpuFence


class FakeBuffer(CpuBuffer):
    def __init__(self, count: int, dtype: torch.dtype, device: FakeDevice) -> None:
        super().__init__(count, dtype)
        self.device = device

    def fill(self, values: Values) -> None:
        self.device.refuse("a buffer was filled")
        super().fill(values)


class FakeFence(CpuFence):
    """A fence that is passed when the host has waited for it or for a later one: only then it tells a time."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device, self.number = device, device.fences
        device.fences += 1

    def wait(self) -> None:
        self.device.passed = max(self.device.passed, self.number)

    def since(self, earlier: CpuFence) -> float:
        assert self.number <= self.device.passed, "the time of a fence that may not have been passed"
        return super().since(earlier)


class FakeDevice(Cpu):
    """Nothing runs while it is captured. A replay runs it all again, and gives the tensors of the first replay.

    What comes from the host would be the same in every replay of a graph, so there it is refused.
    """

    defaults = DeviceDefaults(cache_share=0.4, step_tokens=512, decode_steps=4)
    has_graphs = True

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self.replaying = False
        self.fences, self.passed = 0, -1  # made so far, and the last that the host has waited for

    def fence(self) -> Fence:
        return FakeFence(self)

    def upload(self, values: Values, dtype: torch.dtype) -> Tensor:
        self.refuse("values were uploaded")
        return super().upload(values, dtype)

    def buffer(self, count: int, dtype: torch.dtype) -> Buffer:
        return FakeBuffer(count, dtype, self)

    def capture(self, run: Callable[[], Result]) -> Callable[[], Result]:
        self.captures += 1
        first: list[Result] = []

        def replay() -> Result:
            self.replays += 1
            with self._replaying():
                found = run()
            if first:
                refill(first[0], found)
            else:
                first.append(found)
            return first[0]

        return replay

    def refuse(self, what: str) -> None:
        assert not self.replaying, f"{what} in what was recorded: a replay would see the values of the recording"

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        assert not self.replaying, "a record within a record"
        self.replaying = True
        try:
            yield
        finally:
            self.replaying = False


def refill(kept: Any, found: Any) -> None:
    """Copy all tensors of `found` into those of `kept`, which has the same form."""
    if isinstance(kept, Tensor):
        assert kept.shape == found.shape and kept.dtype == found.dtype
        kept.copy_(found)
    elif isinstance(kept, list | tuple):
        for one, other in zip(kept, found, strict=True):
            refill(one, other)
    else:
        assert kept is found is None, f"a record gives {type(kept).__name__}: no graph can fill that anew"
