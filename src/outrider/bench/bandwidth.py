"""How fast this machine reads memory, with the engine's own threads: the ceiling of plain decoding.

A model is compared with a read of as many bytes as its weights: where these fit into the last cache, so do those.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ..kernels import cpu

BUFFER_BYTES = 512 * 2**20  # beyond the caches of most CPUs


@dataclass(frozen=True)
class Bandwidth:
    bytes_per_second: float  # the best pass: everything slower was disturbed
    passes: tuple[float, ...]  # each pass, in bytes per second


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


def measure(size: int = BUFFER_BYTES, passes: int = 5) -> Bandwidth:
    """One measurement, with the buffer made and thrown away."""
    return Reader(size).read(passes)
