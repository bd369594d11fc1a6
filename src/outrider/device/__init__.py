"""Where tensors live: the only room besides the kernels that knows hardware."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError

NUMPY: dict[torch.dtype, type[Any]] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.float32: np.float32,
}
EXHAUSTED = ("out of memory", "can't allocate memory", "not enough memory")  # as CUDA, Triton and torch put it
Values = Sequence[int] | Sequence[float] | np.ndarray[Any, Any]
Result = TypeVar("Result")


class Fence(Protocol):
    """A place in the device's work."""

    def wait(self) -> None:
        """Return when all work that was started before the fence is done."""
        ...

    def since(self, earlier: Any) -> float:
        """Seconds that the device took from an earlier fence to this one. Both must have been passed."""
        ...


class Buffer(Protocol):
    """Memory on the device that one owner fills anew at every step, so that what reads it need not change."""

    tensor: Tensor  # [count]

    def fill(self, values: Values) -> None:
        """All of it: no value of an earlier step is left."""
        ...


@dataclass(frozen=True)
class DeviceDefaults:
    """What suits a device where the user does not say."""

    cache_share: float  # of the free memory, for keys and values
    step_tokens: int
    decode_steps: int  # passes of the target without the host between them


class Device(Protocol):
    torch_device: torch.device
    defaults: DeviceDefaults

    def upload(self, values: Values, dtype: torch.dtype) -> Tensor:
        """The values on this device, in the shape that they come in. An array is given away: it may be shared."""
        ...

    def buffer(self, count: int, dtype: torch.dtype) -> Buffer: ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Storage that may be large: it takes memory only once it is written, where the device can do that."""
        ...

    def fence(self) -> Fence: ...

    def free_bytes(self) -> int:
        """Memory that this process may still take."""
        ...

    def spent_by(self, run: Callable[[], object]) -> int:
        """Bytes that `run` takes at most while it runs, beside what there is; 0 where storage makes room by itself."""
        ...

    def tidy(self) -> None:
        """Give back what is held and not used, so that others, or larger pieces, find room."""
        ...

    @property
    def records(self) -> bool:
        """Whether replaying what was captured costs less than running it."""
        ...

    def capture(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """`run`, recorded for replay where the device can do that. It gives the same tensors each time, filled anew."""
        ...


class Done:
    """The fence of a device that works while it is called."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def wait(self) -> None:
        return

    def since(self, earlier: Done) -> float:
        return self.at - earlier.at


class CpuBuffer:
    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.array: np.ndarray[Any, Any] = np.zeros(count, NUMPY[dtype])
        self.tensor = torch.from_numpy(self.array)

    def fill(self, values: Values) -> None:
        self.array[:] = values


class Cpu:
    torch_device = torch.device("cpu")
    defaults = DeviceDefaults(cache_share=0.4, step_tokens=512, decode_steps=1)
    records = False

    def upload(self, values: Values, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.asarray(values, NUMPY[dtype]))  # a third of what torch.tensor takes

    def buffer(self, count: int, dtype: torch.dtype) -> Buffer:
        return CpuBuffer(count, dtype)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        whole = np.int32 if dtype.itemsize == 4 else np.int16  # as wide: an empty array can be seen as no other
        return torch.from_numpy(np.zeros(math.prod(shape), dtype=whole)).view(dtype).view(*shape)

    def fence(self) -> Fence:
        return Done()

    def free_bytes(self) -> int:
        return min([_available_memory(), *_group_allowances()])

    def spent_by(self, run: Callable[[], object]) -> int:
        return 0

    def tidy(self) -> None:
        return

    def capture(self, run: Callable[[], Result]) -> Callable[[], Result]:
        return run


HOST = Cpu()


def open_device(backend: str) -> Device:
    """The device that the kernels called `backend` run on."""
    if backend in ("cpu", "reference"):
        return HOST
    if backend == "cuda":
        if os.environ.get("TRITON_INTERPRET") == "1":  # then Triton itself runs on the host
            return HOST
        from .cuda import Cuda, missing

        if (reason := missing()) is not None:
            raise UserError(f"`backend` is `cuda`, but {reason}: use `backend=cpu`, which works without")
        return Cuda()
    raise ValueError(f"no device for the kernels `{backend}`: expected `cpu`, `cuda` or `reference`")


@contextmanager
def torch_alone(backend: str) -> Iterator[None]:
    """Native kernels have threads of their own. Those of torch spin on after each of its operations, and take the cores
    from them: meanwhile torch keeps to the calling thread.
    """
    before = torch.get_num_threads()
    if backend != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_backend(asked: str) -> str:
    """`auto` is the GPU where there is one that serves."""
    if asked != "auto":
        return asked
    from .cuda import missing

    return "cpu" if missing() is not None else "cuda"


@contextmanager
def within_memory() -> Iterator[None]:
    """Where memory does not suffice for what is built inside, the user is told what would make it less."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in EXHAUSTED):
            raise
        place, instead = ("the GPU", ", or use `backend=cpu`") if "CUDA" in str(error) else ("this machine", "")
        raise UserError(
            f"model, cache and the largest step take more memory than {place} has left: pass `quantize=int4`, lower "
            f"`cache_tokens`, `max_requests` or `max_step_tokens`{instead}"
        ) from error


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
