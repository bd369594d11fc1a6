"""Work that is recorded once and replayed: what was recorded, and in which shapes.

A record is known by what it is and by its padded shape. The first run of a shape is for warming up (kernels are
compiled, memory is found), the second is recorded, all others replay it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from . import Device, Result

STEPS = ((16, 8), (64, 16), (256, 32), (1024, 128))  # up to so many of anything: the distance between padded sizes
MOST = 512  # records that are kept; beyond, the shapes that came so far are forgotten


class Graphs:
    def __init__(self, device: Device, mode: str = "FULL") -> None:
        """mode: NONE, FULL_DECODE_ONLY or FULL."""
        self.device = device
        self.decoding = device.records and mode != "NONE"  # steps in which no prompt is read
        self.mixed = device.records and mode == "FULL"
        self._seen: set[Hashable] = set()
        self._records: dict[Hashable, Callable[[], Any]] = {}

    def run(self, key: Hashable, run: Callable[[], Result]) -> Result:
        """What `run` gives; from the third time on by replay, so all that it reads and changes must stay in place."""
        record: Callable[[], Result] | None = self._records.get(key)
        if record is not None:
            return record()
        if key not in self._seen:
            self._seen.add(key)
            return run()
        if len(self._records) >= MOST:
            self._records.clear()
        record = self._records[key] = self.device.capture(run)
        return record()

    def forget(self) -> None:
        """The tensors that records read are no more."""
        self._records.clear()
        self._seen.clear()


def padded(count: int) -> int:
    """The least size of a record that holds `count`: powers of two, then steps."""
    if count <= 8:
        return 1 << max(count - 1, 0).bit_length()
    for most, step in STEPS:
        if count <= most:
            return -(-count // step) * step
    return -(-count // 256) * 256
