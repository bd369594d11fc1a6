"""The host as a device: tensors in main memory, work that is done when a call returns."""

from __future__ import annotations

import math
import os
import resource
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cgroups import memory_allowances
from .interface import NUMPY, Buffer, DeviceDefaults, Fence, Result, Values


class CpuFence:
    """A fence that has been passed when it is made."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def wait(self) -> None:
        return

    def since(self, earlier: CpuFence) -> float:
        return self.time - earlier.time


class CpuBuffer:
    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.array: np.ndarray[Any, Any] = np.zeros(count, NUMPY[dtype])
        self.tensor = torch.from_numpy(self.array)
        self._memory = memoryview(self.array)  # type: ignore[arg-type]

    def fill(self, values: Values) -> None:
        if isinstance(values, list):  # NumPy and torch are not in the caches after a pass of a model: 60 us each
            self._memory[:] = array(self._memory.format, values)
        elif isinstance(values, array) and values.typecode == self._memory.format:
            self._memory[:] = values
        else:
            self.array[:] = values

    def read(self, count: int) -> list[Any]:
        return self._memory[:count].tolist()


class Cpu:
    torch_device = torch.device("cpu")
    defaults = DeviceDefaults(cache_share=0.4, step_tokens=512, decode_steps=1)
    alignment = 1
    has_graphs = False

    def upload(self, values: Values, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.asarray(values, NUMPY[dtype]))  # a third of the time of torch.tensor

    def buffer(self, count: int, dtype: torch.dtype) -> Buffer:
        return CpuBuffer(count, dtype)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # NumPy has no bfloat16 and no e4m3: allocate integers of the same width and view them.
        integer = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[dtype.itemsize]
        return torch.from_numpy(np.zeros(math.prod(shape), dtype=integer)).view(dtype).view(*shape)

    def host_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.zeros(shape, dtype)

    def fence(self) -> Fence:
        return CpuFence()

    def free_bytes(self) -> int:
        return min([_available_memory(), *memory_allowances(), *_address_space()])

    def peak_bytes(self, run: Callable[[], object]) -> int:
        return 0

    def empty_cache(self) -> None:
        return

    def capture(self, run: Callable[[], Result]) -> Callable[[], Result]:
        return run


HOST = Cpu()


class SingleThreadedTorch:
    """Restricts torch to the calling thread while native CPU kernels run. Reentrant, but not thread-safe.

    The kernels have a thread pool of their own. Torch's threads spin after each operation and would take its cores.
    Switching takes 40 us after a pass of a model, so a caller that runs many steps holds it over all of them.
    """

    def __init__(self, backend: str) -> None:
        self._is_cpu, self._before, self._depth = backend == "cpu", 1, 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._before = torch.get_num_threads() if self._is_cpu else 1
        if self._before > 1:
            torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth and self._before > 1:
            torch.set_num_threads(self._before)


def _address_space() -> list[int]:
    """Return the bytes that a limit on the address space (`ulimit -v`) leaves to this process, if it has one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    size = Path("/proc/self/statm")
    pages = int(size.read_text().split()[0]) if size.exists() else 0
    return [max(limit - pages * resource.getpagesize(), 0)]


def _available_memory() -> int:
    """Return the bytes that the operating system can give without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Other systems report only the total. Half of it is a conservative estimate.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
