"""Count kernels that are compiled while the process runs, or loaded from the cache in which Triton stores them."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_NAMES = 100  # latest names that are kept


@dataclass
class Compilations:
    count: int = 0  # compiled or loaded
    loaded: int = 0  # of these, found on disk
    names: list[str] = field(default_factory=list)  # the latest kernels

    def add(self, name: str, is_loaded: bool) -> None:
        self.count += 1
        self.loaded += is_loaded
        self.names = [*self.names[1 - MAX_NAMES :], name]


COMPILATIONS = Compilations()
