"""Build batches: concatenate the tokens of all rows, pad them to a shape that many steps share, upload them at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .cache.pages import slots_of
from .device import Buffer, Device
from .device.graphs import padded_pages, padded_rows, padded_tokens
from .kernels import Batch
from .request import Request, Row

PARTS = 8  # tensors of a batch, those included that are empty


class Shape(NamedTuple):
    """The shape of a batch."""

    tokens: int
    rows: int
    pages: int  # in a page table
    is_tree: bool = False  # some row is a tree
    has_adapters: bool = False  # some row has an adapter
    has_states: bool = False  # the model has recurrent layers


class BatchBuilder:
    """The rows of a batch as lists, one list for each of its tensors."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.starts = [0]
        self.tables: list[list[int]] = []
        self.parents: list[int] = []  # index of each token's parent; empty: no row is a tree
        self.adapters: list[int] = []  # slot of each token's adapter, -1: none; empty: no row has one
        self.states: list[int] = []  # three numbers of each row; empty: the model has no recurrent layers

    def add(
        self,
        tokens: Sequence[int],
        positions: Iterable[int],
        slots: Iterable[int],
        pages: list[int],
        parents: Iterable[int] = (),
        adapters: Iterable[int] = (),
        states: Iterable[int] = (),
    ) -> None:
        """Append a row. parents: index in the batch of the token before each; -1: none in the batch."""
        self.tokens += tokens
        self.positions += positions
        self.slots += slots
        self.starts.append(len(self.tokens))
        self.tables.append(pages)
        self.parents += parents
        self.adapters += adapters
        self.states += states

    @property
    def shape(self) -> Shape:
        widest = max(map(len, self.tables))
        optional = bool(self.parents), bool(self.adapters), bool(self.states)
        return Shape(len(self.tokens), len(self.tables), widest, *optional)

    def pack(self, shape: Shape, alignment: int = 1) -> array[int]:
        """Return all tensors in one array, each padded to `shape` and to a multiple of `alignment`.

        Tokens, positions and states are padded with 0, slots and adapters with -1 (none), starts with the last end: so
        rows without tokens come last.
        """
        count, rows, width, is_tree, has_adapters, has_states = shape
        spare, unused = [0] * (count - len(self.tokens)), [-1] * (count - len(self.tokens))
        gap, row_gap = [0] * (-count % alignment), [0] * (-(rows + 1) % alignment)
        numbers = self.tokens + spare + gap + self.positions + spare + gap + self.slots + unused + gap
        numbers += self.starts + [self.starts[-1]] * (rows + 1 - len(self.starts)) + row_gap
        packed, zero = array("i", numbers), array("i", [0])
        for pages in self.tables:  # beside one long text, nearly all of the tables is padding: no objects for it
            packed.extend(array("i", pages))
            packed.extend(zero * (width - len(pages)))
        packed.extend(zero * (width * (rows - len(self.tables)) + -(rows * width) % alignment))
        if is_tree:
            packed.extend(self.parents + unused + gap)
        if has_adapters:
            packed.extend(self.adapters + unused + gap)
        if has_states:
            packed.extend(self.states + [0] * (3 * rows - len(self.states) + -(3 * rows) % alignment))
        return packed

    def upload(self, device: Device, *indices: list[int]) -> tuple[Batch, list[Tensor]]:
        """Upload the batch and lists of indices together: a second upload would cost more than its data."""
        shape, alignment = self.shape, device.alignment
        packed, lengths = self.pack(shape, alignment), sizes(shape, alignment)
        for values in indices:
            packed.extend(values)
            lengths.append(len(values))
            if alignment > 1:
                packed.extend([0] * (-len(values) % alignment))
                lengths[-1] += -len(values) % alignment
        tensors = torch.split(device.upload(packed, torch.int32), lengths)
        chosen = list(tensors[PARTS:])
        if alignment > 1:
            chosen = [tensor[: len(values)] for tensor, values in zip(chosen, indices, strict=True)]
        prefix = self.positions[0] if len(self.tables) == 1 and not self.parents else 0
        return replace(as_batch(shape, tensors[:PARTS], alignment), prefix=prefix), chosen


def sizes(shape: Shape, alignment: int = 1) -> list[int]:
    """Return the sizes of the tensors of a batch, in the order of `BatchBuilder.pack`."""
    tokens, rows, width, is_tree, has_adapters, has_states = shape
    optional = tokens if is_tree else 0, tokens if has_adapters else 0, 3 * rows if has_states else 0
    lengths = tokens, tokens, tokens, rows + 1, rows * width, *optional
    return [-(-length // alignment) * alignment for length in lengths]


def as_batch(shape: Shape, tensors: Sequence[Tensor], alignment: int = 1) -> Batch:
    """Return a batch of tensors in the order of `sizes`."""
    _, rows, width, is_tree, has_adapters, has_states = shape
    if alignment > 1:
        tensors = [tensor[:size] for tensor, size in zip(tensors, sizes(shape), strict=True)]
    tokens, positions, slots, starts, tables, parents, adapters, states = tensors
    tables = tables.view(rows, width)
    optional = (
        parents if is_tree else None,
        adapters if has_adapters else None,
        states.view(rows, 3) if has_states else None,
    )
    return Batch(tokens, positions, slots, starts, tables, *optional)


def make_batch(device: Device, shape: Shape, alignment: int = 1) -> tuple[Buffer, Batch]:
    """Allocate a batch whose tensors are parts of one buffer, so that one upload fills it."""
    lengths = sizes(shape, alignment)
    inputs = device.buffer(sum(lengths), torch.int32)
    return inputs, as_batch(shape, torch.split(inputs.tensor, lengths), alignment)


def padded_shape(shape: Shape) -> Shape:
    """Return the shape of the CUDA graph that serves batches of this shape."""
    rows = padded_rows(shape.rows)
    return shape._replace(tokens=padded_tokens(shape.tokens, rows), rows=rows, pages=padded_pages(shape.pages))


def collect(rows: list[Row], page_size: int, has_states: bool = False) -> BatchBuilder:
    """Collect the rows of a step, drafts included. has_states: the model has recurrent layers.

    Draft tokens take the slots after the row's text tokens, in the order of the draft. In a tree, several of them have
    the same position.
    """
    has_tree = any(row.draft is not None and row.draft.parents is not None for row in rows)
    has_adapters = any(row.request.adapter is not None for row in rows)
    builder = BatchBuilder()
    for row in rows:
        end = row.start + len(row.tokens)
        tokens, positions = row.tokens, list(range(row.start, end))
        if row.draft is not None:
            tokens = tokens + row.draft.tokens
            positions += [end + depth for depth in row.draft.depths()]
        slots = slots_of(row.request.pages, range(row.start, row.start + row.size), page_size)
        parents = parents_of(row, len(builder.tokens)) if has_tree else ()
        adapters = [slot_of(row.request)] * row.size if has_adapters else ()
        states = row.states if has_states else ()
        builder.add(tokens, positions, slots, row.request.pages, parents, adapters, states)
    return builder


def slot_of(request: Request) -> int:
    """Return the slot of the request's adapter; -1: it has none."""
    if request.adapter is None:
        return -1
    assert request.adapter.slot >= 0, f"the adapter `{request.adapter.name}` is in no slot"
    return request.adapter.slot


def parents_of(row: Row, begin: int) -> list[int]:
    """Return the index in the batch of each token's parent, for a row that begins at `begin`."""
    last = begin + len(row.tokens) - 1
    parents = [-1, *range(begin, last)]
    if row.draft is None:
        return parents
    return [*parents, *(last + 1 + parent for parent in row.draft.parent_indices())]
