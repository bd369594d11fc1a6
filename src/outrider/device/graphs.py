"""Captured CUDA graphs, keyed by the kind of work and its padded shape.

At start-up all keys that the configuration can need are captured, then `freeze` ends capturing: a request never waits
for one. Work without a graph runs as it is. Before that, and on devices without a warm-up, the first run of a key warms
up (kernels are compiled, memory is allocated), the second is captured, and all later ones replay the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from itertools import takewhile
from typing import Any

from .interface import Device, Result

log = logging.getLogger(__name__)
PADDING = ((16, 8), (64, 16), (256, 32), (1024, 128))  # (largest size, distance between padded sizes up to it)
MAX_GRAPHS = 4096  # graphs kept; one more drops all of them, since shapes that came once rarely come again
MIN_PAGES = 32  # entries of a page table: decode steps up to 512 tokens have an attention kernel of their own
# Entries of wider ones: beyond MIN_PAGES attention is split by the length of a text, not by the width of its table.
# They take the host longer to fill, 0.4 instead of 0.2 ms for 64 texts, once in a run of many steps.
WIDE_PAGES = 8192
PAGES_FACTOR = 4  # between two sizes beyond WIDE_PAGES
MIN_TOKENS = 16  # tokens of a step: up to 16 a matmul takes the same time
# Tokens of the largest captured step with a prompt. A longer one takes the GPU longer than the host needs to launch it.
MAX_TOKENS = 256
ROWS_FACTOR = 4  # between two numbers of rows in steps with the host: rows that pad take little time


class Graphs:
    def __init__(self, device: Device, mode: str = "FULL") -> None:
        """Set up graphs for a `cudagraph_mode`: NONE, FULL_DECODE_ONLY or FULL."""
        self.device = device
        self.decoding = device.has_graphs and mode != "NONE"  # steps without a prompt are captured
        self.mixed = device.has_graphs and mode == "FULL"  # steps with prompts are captured too
        self.frozen = False  # nothing more is captured
        self.late_captures = 0  # captured since `freeze`
        self.late_eager_runs = 0  # runs since `freeze` of a key that has no graph
        self._warm: set[Hashable] = set()  # keys that have run once, and those of similar work
        self._refuses_loading = False  # a capture has failed in which kernels may have been loaded
        self._graphs: dict[Hashable, Callable[[], Any]] = {}

    def run(self, key: Hashable, run: Callable[[], Result]) -> Result:
        """Run `run`, by replay if it is captured: every tensor that it reads or writes must stay in place."""
        graph: Callable[[], Result] | None = self._graphs.get(key)
        if graph is not None:
            return graph()
        if self.frozen:
            self.late_eager_runs += 1
            return run()
        if key not in self._warm:
            self._warm.add(key)
            return run()
        return self._capture(key, run)()

    def capture(self, key: Hashable, run: Callable[[], Result], similar: Hashable = None) -> None:
        """Run `run` once to compile its kernels, then capture it, unless that was done before.

        similar: of work that has the same buffers and nearly the same kernels, only the first is run. Of the others few
        kernels are compiled and loaded while they are captured. If the driver refuses that, all are run.
        """
        if key in self._graphs:
            return
        self._warm.add(key)
        if similar in self._warm and not self._refuses_loading:
            try:
                self._capture(key, run)
                return
            except RuntimeError as error:
                log.info("a capture is repeated after a run of its kernels: %s", error)
                self._refuses_loading = True
        run()
        if similar is not None:
            self._warm.add(similar)
        self._capture(key, run)

    def freeze(self) -> None:
        """Capture nothing from now on, and count it if it happens."""
        self.frozen = True

    def is_usable(self, key: Hashable) -> bool:
        """Return whether work of this key is replayed, or may be captured."""
        return not self.frozen or key in self._graphs

    @property
    def captured(self) -> list[Hashable]:
        """Return the keys whose runs are replayed."""
        return list(self._graphs)

    def forget(self) -> None:
        """Drop all graphs, because tensors that they read are gone."""
        self._graphs.clear()
        self._warm.clear()

    def _capture(self, key: Hashable, run: Callable[[], Result]) -> Callable[[], Result]:
        if len(self._graphs) >= MAX_GRAPHS:
            self._graphs.clear()
        self.late_captures += self.frozen
        graph = self._graphs[key] = self.device.capture(run)
        return graph


def padded(count: int) -> int:
    """Round up to the rows of a captured run: a power of two up to 8, then a multiple from PADDING."""
    if count <= 8:
        return 1 << max(count - 1, 0).bit_length()
    for limit, step in PADDING:
        if count <= limit:
            return -(-count // step) * step
    return -(-count // 256) * 256


def padded_sizes(most: int) -> list[int]:
    """Return all values of `padded` for counts up to `most`."""
    return sorted({padded(count) for count in range(1, most + 1)})


def padded_pages(pages: int) -> int:
    """Round up to the width of a captured page table."""
    width = MIN_PAGES if pages <= MIN_PAGES else WIDE_PAGES
    while width < pages:
        width *= PAGES_FACTOR
    return width


def pages_sizes(most: int) -> list[int]:
    """Return all values of `padded_pages` for tables of up to `most` pages."""
    sizes = [MIN_PAGES]
    while sizes[-1] < most:
        sizes.append(padded_pages(sizes[-1] + 1))
    return sizes


def padded_rows(rows: int) -> int:
    """Round up to the rows of a captured step with the host."""
    size = 1
    while size < rows:
        size *= ROWS_FACTOR
    return size


def padded_tokens(tokens: int, rows: int) -> int:
    """Round up to the tokens of a captured step with the host. rows: padded; one token each is a size of its own."""
    return rows if tokens <= rows else max(1 << (tokens - 1).bit_length(), MIN_TOKENS)


def step_sizes(max_requests: int, max_drafted: int) -> list[tuple[int, int]]:
    """Return tokens and rows of all captured steps with the host, the largest first.

    max_drafted: tokens that a request drafts at most. Steps with more than MAX_TOKENS have no prompt.
    """
    last = padded_rows(max_requests)
    rows = list(takewhile(lambda size: size <= last, (ROWS_FACTOR**power for power in range(16))))
    sizes = {
        (padded_tokens(tokens, count), count)
        for count in rows
        for tokens in range(count, max(MAX_TOKENS, count * (1 + max_drafted)) + 1)
    }
    return sorted(sizes, reverse=True)
