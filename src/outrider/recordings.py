"""Recordings of kernel calls by shape (Kernels.record): functions of fixed tensors that are filled before a replay."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .cache.pages import Pages
from .device import Buffer
from .kernels import Kernels

MAX_RECORDINGS = 64  # shapes that are kept; one more drops all of them
MIN_PAGES = 64  # entries of a page table: texts with fewer pages share recordings


@dataclass
class Recorded:
    """A function of fixed tensors, and its recording."""

    run: Callable[[Any], None]
    inputs: Buffer
    hidden: Tensor | None = None  # [T, F]: aux hidden states that it reads or writes
    outputs: Any = None  # where it leaves its results
    replay: Any = None
    failed: bool = False  # it cannot be recorded

    def load(self, hidden: Tensor, first: int) -> None:
        """Fill `hidden` with rows from `first` on."""
        assert self.hidden is not None
        if self.replay is None:
            self.hidden.copy_(hidden[first : first + len(self.hidden)])
        else:
            self.replay.load(self.hidden, hidden, first)


class Recordings:
    """Recordings by shape. A shape is recorded when it is used for the second time, or at once if the caller asks."""

    def __init__(self, ops: Kernels, pages: Pages) -> None:
        self.ops, self.pages = ops, pages
        self._layers = pages.layers
        self.enabled = True  # False: for measurements, every call runs as its first one does
        self.num_made = 0  # recordings, those dropped since then included
        self._recorded: dict[Hashable, Recorded | None] = {}

    @property
    def num_recorded(self) -> int:
        """Return the number of shapes that are replayed."""
        return sum(found is not None and found.replay is not None for found in self._recorded.values())

    def find(self, key: Hashable, build: Callable[[], Recorded], at_once: bool = False) -> Recorded | None:
        """Return the function of this shape; None: at its first use, unless `at_once`, or if it cannot be recorded."""
        if not self.enabled:
            return None
        if self._layers is not self.pages.layers:  # the KV was allocated anew
            self._recorded.clear()
            self._layers = self.pages.layers
        if key not in self._recorded:
            if len(self._recorded) >= MAX_RECORDINGS:
                self._recorded.clear()
            self._recorded[key] = None
            if not at_once:
                return None
        found = self._recorded[key]
        if found is None:
            found = self._recorded[key] = build()
        return None if found.failed else found

    def run(self, recorded: Recorded, depths: int = 0, least: float = 0.0, shared_noise: bool = False) -> int:
        """Run a function whose inputs are filled; return the depths that it drafted, or -1 if it cannot be recorded.

        A recording is made by running all depths. A replay ends after `depths`, or where the next one does not pay.
        """
        if recorded.replay is None:
            recorded.replay = self.ops.record(recorded.run)
            self.num_made += 1
            if recorded.replay is None:
                recorded.failed = True
                return -1
            return depths
        reached: int = recorded.replay(depths, least, shared_noise)
        return reached


def table_width(pages: int) -> int:
    """Return the entries of the page table of a recording, for texts with this number of pages."""
    return max(1 << (pages - 1).bit_length(), MIN_PAGES)


def padded_table(pages: Sequence[int], width: int) -> list[int]:
    """Return a page table of `width` entries; -1: no page, so that nothing is stored beyond the last."""
    return [*pages, *([-1] * (width - len(pages)))]
