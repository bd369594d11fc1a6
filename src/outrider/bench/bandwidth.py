"""How fast this machine's memory is: the ceiling of plain decoding.

On the host, a read with the engine's own threads; a model is compared with a read of as many bytes as its weights:
where these fit into the last cache, so do those. On other devices, a copy, which counts what is read and what is
written.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from ..device import Device
from ..kernels import cpu

BUFFER_BYTES = 512 * 2**20  # beyond the caches of most CPUs
COPY_BYTES = 2 * 2**30  # beyond the caches of any GPU
COPIES = 8  # in a pass, so that the launch of the first and the wait for the last do not count


@dataclass(frozen=True)
class Bandwidth:
    bytes_per_second: float  # the best pass: everything slower was disturbed
    passes: tuple[float, ...]  # each pass, in bytes per second


class Meter(Protocol):
    def read(self, passes: int = 3) -> Bandwidth: ...


class Reader:
    """A buffer, and the time that a pass over it takes."""

    def __init__(self, size: int = BUFFER_BYTES) -> None:
        self.buffer = torch.ones(size, dtype=torch.uint8)  # written, so that every page is really there

    def read(self, passes: int = 3) -> Bandwidth:
        found = []
        for _ in range(passes):
            begin = time.perf_counter()
            cpu.stream_read(self.buffer)
            found.append(self.buffer.numel() / (time.perf_counter() - begin))
        return Bandwidth(max(found), tuple(found))


class Copier:
    """Two buffers on a device, and the time that copying one to the other takes."""

    def __init__(self, device: Device, size: int = COPY_BYTES) -> None:
        self.device = device
        self.source = torch.ones(size, dtype=torch.uint8, device=device.torch_device)
        self.target = torch.zeros_like(self.source)

    def read(self, passes: int = 3) -> Bandwidth:
        found = []
        for _ in range(passes):
            self.device.fence().wait()
            begin = time.perf_counter()
            for _ in range(COPIES):
                self.target.copy_(self.source)
            self.device.fence().wait()
            found.append(2 * COPIES * self.source.numel() / (time.perf_counter() - begin))
        return Bandwidth(max(found), tuple(found))


def meter(device: Device, size: int, copied: int = COPY_BYTES) -> Meter:
    """What measures the memory that a model of `size` bytes lies in. copied: bytes, where that is done by copying.

    On the host, what no cache holds need not be as large as the model: that would take its memory once more.
    """
    return Reader(min(size, BUFFER_BYTES)) if device.torch_device.type == "cpu" else Copier(device, copied)


def measure(size: int = BUFFER_BYTES, passes: int = 5) -> Bandwidth:
    """One measurement of the host, with the buffer made and thrown away."""
    return Reader(size).read(passes)
