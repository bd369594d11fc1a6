"""The device interface: where tensors live, and how work on them is started, timed and captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

NUMPY: dict[torch.dtype, type[Any]] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
Values = Sequence[int] | Sequence[float] | np.ndarray[Any, Any]
Result = TypeVar("Result")


class Fence(Protocol):
    """A point in the device's queue of work."""

    def wait(self) -> None:
        """Block until all work that was started before the fence is done."""
        ...

    def since(self, earlier: Any) -> float:
        """Return the seconds between an earlier fence and this one. Both must have been passed."""
        ...


class Buffer(Protocol):
    """Device memory at a fixed address that one owner refills at every step, as CUDA graphs require."""

    tensor: Tensor  # [count]

    def fill(self, values: Values) -> None:
        """Overwrite the whole buffer."""
        ...

    def read(self, count: int) -> list[Any]:
        """Return the first `count` values, on the host."""
        ...


@dataclass(frozen=True)
class DeviceDefaults:
    """Values of options that the user left open."""

    cache_share: float  # share of the free memory that the key/value cache takes
    step_tokens: int  # tokens of the largest step
    decode_steps: int  # decode steps that run without the host
    warms_up: bool = False  # everything is compiled and captured before the first request


class Device(Protocol):
    torch_device: torch.device
    defaults: DeviceDefaults
    # Integers: tensors that share a buffer begin at multiples of it, so that kernels are not compiled for each address.
    alignment: int

    def upload(self, values: Values, dtype: torch.dtype) -> Tensor:
        """Copy values to the device, keeping their shape. An array may share its memory with the result."""
        ...

    def buffer(self, count: int, dtype: torch.dtype) -> Buffer: ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate zeroed storage, lazily if the device can: untouched parts then take no memory."""
        ...

    def host_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate zeroed host memory that `copy_(..., non_blocking=True)` fills without waiting for the device."""
        ...

    def fence(self) -> Fence: ...

    def free_bytes(self) -> int:
        """Return the memory that this process may still allocate."""
        ...

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Return the peak memory that `run` allocates beyond what is in use; 0 on devices with lazy storage."""
        ...

    def empty_cache(self) -> None:
        """Return memory to the system that the allocator holds and does not use."""
        ...

    @property
    def has_graphs(self) -> bool:
        """Return True if replaying a captured graph is cheaper than running the work again."""
        ...

    def capture(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """Capture `run` for replay if the device can. Each replay refills and returns the same tensors."""
        ...
