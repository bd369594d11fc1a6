"""The batch of a step: the tokens of all rows side by side, padded to a shape that many steps have."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .cache.pages import slots_of
from .device import Buffer, Device
from .device.graphs import padded
from .kernels import Batch
from .request import Row

Shape = tuple[int, int, int, bool]  # tokens, rows, pages in a table, whether some row is a tree


@dataclass
class Parts:
    """What a batch holds, as lists: one for each of its tensors."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    tables: list[list[int]] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # of each token, counted in the step; empty: no row is a tree

    @property
    def shape(self) -> Shape:
        return len(self.tokens), len(self.tables), max(map(len, self.tables)), bool(self.parents)


def collect(rows: list[Row], page_size: int) -> Parts:
    """Drafted tokens take the slots after the row's own in the order of the draft; in a tree, several of them stand at
    one position.
    """
    branching = any(row.draft is not None and row.draft.parents is not None for row in rows)
    parts = Parts()
    for row in rows:
        own = row.start + len(row.tokens)
        if branching:
            parts.parents += ancestry(row, len(parts.tokens))
        parts.tokens += row.tokens
        parts.positions += range(row.start, own)
        if row.draft is not None:
            parts.tokens += row.draft.tokens
            parts.positions += [own + depth for depth in row.draft.depths()]
        parts.slots += slots_of(row.request.pages, range(row.start, row.start + row.size), page_size)
        parts.starts.append(len(parts.tokens))
        parts.tables.append(row.request.pages)
    return parts


def ancestry(row: Row, begin: int) -> list[int]:
    """For each token of the row the one before it, counted in the step, where the row begins at `begin`."""
    last = begin + len(row.tokens) - 1
    own = [-1, *range(begin, last)]
    if row.draft is None:
        return own
    return [*own, *(last + 1 + parent for parent in row.draft.parent_indices())]


def widened(shape: Shape) -> Shape:
    """The shape of the record that serves it."""
    tokens, rows, width, branching = shape
    return padded(tokens), padded(rows), 1 << (width - 1).bit_length(), branching


def pad(shape: Shape, parts: Parts) -> list[int]:
    """All parts of a batch in one list, each filled up to its shape: tokens and positions with 0, slots with nowhere,
    starts with the last end, so that rows without tokens come last.
    """
    count, rows, width, branching = shape
    tokens, starts = parts.tokens, parts.starts
    spare, unused = [0] * (count - len(tokens)), [-1] * (count - len(tokens))
    listed = tokens + spare + parts.positions + spare + parts.slots + unused
    listed += starts + [starts[-1]] * (rows + 1 - len(starts))
    for table in parts.tables:
        listed += table
        listed += [0] * (width - len(table))
    listed += [0] * (width * (rows - len(parts.tables)))
    return listed + parts.parents + unused if branching else listed


def make_batch(device: Device, tokens: int, rows: int, width: int, branching: bool) -> tuple[Buffer, Batch]:
    """A batch of that shape whose parts lie side by side in one buffer: one upload fills it."""
    sizes = [tokens, tokens, tokens, rows + 1, rows * width, tokens if branching else 0]
    inputs = device.buffer(sum(sizes), torch.int32)
    ids, positions, slots, starts, tables, parents = torch.split(inputs.tensor, sizes)
    return inputs, Batch(ids, positions, slots, starts, tables.view(rows, width), parents if branching else None)
