"""Where tensors live: the only room besides the kernels that knows hardware."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

NUMPY: dict[torch.dtype, type[Any]] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.float32: np.float32,
}
Values = Sequence[int] | Sequence[float] | np.ndarray[Any, Any]


class Fence(Protocol):
    def wait(self) -> None:
        """Return when all work that was started before the fence is done."""
        ...


class Buffer(Protocol):
    """Memory on the device that one owner fills anew at every step, so that what reads it need not change."""

    tensor: Tensor  # [count]

    def fill(self, values: Values) -> None:
        """All of it: no value of an earlier step is left."""
        ...


class Device(Protocol):
    place: torch.device

    def upload(self, values: Values, dtype: torch.dtype) -> Tensor:
        """The values on this device, in the shape that they come in. An array is given away: it may be shared."""
        ...

    def buffer(self, count: int, dtype: torch.dtype) -> Buffer: ...

    def fence(self) -> Fence: ...

    def free_bytes(self) -> int:
        """Memory that this process may still take."""
        ...

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`run`, recorded for cheap replay where the device can do that."""
        ...


class Done:
    """The fence of a device that works while it is called."""

    def wait(self) -> None:
        return


class CpuBuffer:
    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.array: np.ndarray[Any, Any] = np.zeros(count, NUMPY[dtype])
        self.tensor = torch.from_numpy(self.array)

    def fill(self, values: Values) -> None:
        self.array[:] = values


class Cpu:
    place = torch.device("cpu")

    def upload(self, values: Values, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.asarray(values, NUMPY[dtype]))  # a third of what torch.tensor takes

    def buffer(self, count: int, dtype: torch.dtype) -> Buffer:
        return CpuBuffer(count, dtype)

    def fence(self) -> Fence:
        return Done()

    def free_bytes(self) -> int:
        return min([_available_memory(), *_group_allowances()])

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return run


def open_device(backend: str) -> Device:
    """The device that the kernels called `backend` run on."""
    if backend in ("cpu", "reference"):
        return Cpu()
    raise ValueError(f"no device for the kernels `{backend}`: expected `cpu` or `reference`")


def _available_memory() -> int:
    """What the kernel of the system says can be had without swapping."""
    information = Path("/proc/meminfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Elsewhere only the total is known; half of it is a guess on the safe side.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _group_allowances(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Limit less use of each control group, ours and its ancestors, that limits memory (versions 2 and 1)."""
    allowances = []
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.strip("/")
        # Inside a container the path may be the host's: then only the root of the mount is there to read.
        for folder in [group, *[parent for parent in group.parents if parent.is_relative_to(base)]]:
            if (folder / limit).exists() and (text := (folder / limit).read_text().strip()) != "max":
                used = int((folder / usage).read_text()) - _reclaimable(folder / "memory.stat")
                allowances.append(max(int(text) - used, 0))
    return allowances


def _reclaimable(statistics: Path) -> int:
    """File pages that the system would drop rather than refuse memory; they count as used."""
    for line in statistics.read_text().splitlines() if statistics.exists() else []:
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0
