"""Captured CUDA graphs, keyed by the kind of work and its padded shape.

The first run of a key warms up (kernels are compiled, memory is allocated), the second is captured, and all later
ones replay the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from .interface import Device, Result

PADDING = ((16, 8), (64, 16), (256, 32), (1024, 128))  # (largest size, distance between padded sizes up to it)
MAX_GRAPHS = 512  # graphs kept; one more drops all of them, since shapes that came once rarely come again


class Graphs:
    def __init__(self, device: Device, mode: str = "FULL") -> None:
        """Set up graphs for a `cudagraph_mode`: NONE, FULL_DECODE_ONLY or FULL."""
        self.device = device
        self.decoding = device.has_graphs and mode != "NONE"  # steps without a prompt are captured
        self.mixed = device.has_graphs and mode == "FULL"  # steps with prompts are captured too
        self._warm: set[Hashable] = set()  # keys that have run once
        self._graphs: dict[Hashable, Callable[[], Any]] = {}

    def run(self, key: Hashable, run: Callable[[], Result]) -> Result:
        """Run `run`, by replay from the third time on: every tensor that it reads or writes must stay in place."""
        graph: Callable[[], Result] | None = self._graphs.get(key)
        if graph is not None:
            return graph()
        if key not in self._warm:
            self._warm.add(key)
            return run()
        if len(self._graphs) >= MAX_GRAPHS:
            self._graphs.clear()
        graph = self._graphs[key] = self.device.capture(run)
        return graph()

    @property
    def captured(self) -> list[Hashable]:
        """Return the keys whose runs are replayed."""
        return list(self._graphs)

    def forget(self) -> None:
        """Drop all graphs, because tensors that they read are gone."""
        self._graphs.clear()
        self._warm.clear()


def padded(count: int) -> int:
    """Round up to the size of a captured shape: a power of two up to 8, then a multiple from PADDING."""
    if count <= 8:
        return 1 << max(count - 1, 0).bit_length()
    for limit, step in PADDING:
        if count <= limit:
            return -(-count // step) * step
    return -(-count // 256) * 256
