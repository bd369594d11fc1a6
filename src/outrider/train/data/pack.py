"""Documents packed into rows of one length, so that little of a step is padding.

Which documents share a row is settled once. A pass over all of them takes the rows in an order of its own, so that all
passes have equally many steps, and any step can be made without those before it. Neighbours in a row do not see each
other: it does not matter that they stay the same.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError

Array = np.ndarray[Any, Any]
AHEAD = 2  # packs that are made before they are asked for


@dataclass(frozen=True)
class Pack:
    """Documents (a prompt and its answer each) one after the other in rows of one length."""

    tokens: Tensor  # [B, L] int64
    positions: Tensor  # [B, L] int64: places in the document, from 0
    documents: Tensor  # [B, L] int64: rising numbers within a row; -1: padding, always at the end
    answered: Tensor  # [B, L] bool: tokens that the target wrote

    def to(self, place: torch.device) -> Pack:
        def move(values: Tensor) -> Tensor:
            return values.to(place, non_blocking=True)

        return Pack(move(self.tokens), move(self.positions), move(self.documents), move(self.answered))


class Listed(Protocol):
    """Of each document [N]: tokens of its prompt, of prompt and answer together, and whether it is held out."""

    @property
    def prompt_lengths(self) -> Array: ...

    @property
    def lengths(self) -> Array: ...

    @property
    def held_out(self) -> Array: ...


class Source(Protocol):
    """What a packer needs of a store."""

    def documents(self) -> Listed: ...

    def tokens(self, index: int) -> Array: ...


class Packer:
    """Packs of `rows` rows of `length` tokens, each a function of the seed and the number of its step alone.

    held_out: of the documents that are held out instead, always in the same order. Documents are cut at `length`; those
    without a token of their answer before that are left out.
    """

    def __init__(
        self, source: Source, rows: int, length: int, seed: int = 0, held_out: bool = False, answer: int | None = None
    ) -> None:
        """answer: tokens of one that are learnt from, its first ones; None: all."""
        if rows < 1 or length < 2:
            raise UserError(f"packs of {rows} rows of {length} tokens hold nothing: ask for 1 row of 2 tokens, or more")
        self.source, self.rows, self.length = source, rows, length
        listed = source.documents()
        prompts, lengths = listed.prompt_lengths, np.minimum(listed.lengths, length)  # [N]
        if answer is not None:
            lengths = np.minimum(lengths, prompts + answer)
        chosen = np.flatnonzero((lengths > prompts) & (listed.held_out == held_out))
        if not len(chosen) and not held_out:
            raise UserError(
                f"there is no document with a prompt of fewer than {length} tokens and an answer to learn from: "
                "pass more prompts, or longer rows"
            )
        self._seed, self._held_out = seed % 2**64, held_out
        chosen = np.random.default_rng((self._seed, 0)).permutation(chosen)
        chosen = chosen[np.argsort(-lengths[chosen], kind="stable")]  # the longest first: short ones fill the gaps
        row, count = best_fit(lengths[chosen].tolist(), length)
        order = np.argsort(row, kind="stable")
        self._documents = chosen[order]  # [documents], row after row
        self._prompts, self._lengths = prompts[self._documents], lengths[self._documents]
        self._begins = np.searchsorted(row[order], np.arange(count + 1))  # [rows of a pass + 1], among the documents
        before = np.cumsum(self._lengths) - self._lengths
        self._offsets = before - before[self._begins[row[order]]]  # [documents], in their rows
        self._order = lru_cache(maxsize=2)(self._shuffled)
        self.steps_per_pass = -(-count // rows)

    @property
    def padding(self) -> float:
        """The share of all places in a pass that no document takes."""
        places = self.steps_per_pass * self.rows * self.length
        return 1 - float(self._lengths.sum()) / places if places else 0.0

    @property
    def tokens_per_pass(self) -> int:
        return int(self._lengths.sum())

    def pack(self, step: int) -> Pack:
        turn, place = divmod(step, self.steps_per_pass)
        rows = self._order(turn)[place * self.rows : (place + 1) * self.rows]  # fewer at the end of a pass
        counts = self._begins[rows + 1] - self._begins[rows]  # documents of each row
        numbers = _counted(counts)  # [documents], from 0 in each row
        held = np.repeat(self._begins[rows], counts) + numbers  # [documents]
        lengths = self._lengths[held]
        offsets = self._offsets[held] + np.repeat(np.arange(len(rows)) * self.length, counts)  # [documents]
        positions = _counted(lengths)  # [T]
        places = np.repeat(offsets, lengths) + positions  # [T]
        texts = zip(self._documents[held].tolist(), lengths.tolist(), strict=True)
        tokens = np.concatenate([self.source.tokens(index)[:size] for index, size in texts])  # [T]
        return Pack(
            tokens=self._spread(tokens, places),
            positions=self._spread(positions, places),
            documents=self._spread(np.repeat(numbers, lengths), places, empty=-1),
            answered=self._spread(positions >= np.repeat(self._prompts[held], lengths), places).bool(),
        )

    def _spread(self, values: Array, places: Array, empty: int = 0) -> Tensor:
        """Values [T] at their places, `empty` elsewhere: [rows, length] int64."""
        spread = np.full(self.rows * self.length, empty, np.int64)
        spread[places] = values
        return torch.from_numpy(spread).view(self.rows, self.length)

    def _shuffled(self, turn: int) -> Array:
        """The rows of a pass [rows of a pass], in its order."""
        same = 0 if self._held_out else turn
        return np.random.default_rng((self._seed, 1, same)).permutation(len(self._begins) - 1)


def best_fit(lengths: Sequence[int], room: int) -> tuple[Array, int]:
    """Each length into the row that it fills best, a new one where it fits nowhere: the row of each, and their count.

    lengths: 1 to `room`.
    """
    row_of = np.empty(len(lengths), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(room + 1)]  # by the room that is left
    open_rooms = 0  # bit r: some row has r left
    count = 0
    for index, length in enumerate(lengths):
        fitting = open_rooms >> length
        if fitting:
            found = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[found].pop()
            if not open_rows[found]:
                open_rooms ^= 1 << found
        else:
            found, row, count = room, count, count + 1
        row_of[index] = row
        if found > length:
            open_rows[found - length].append(row)
            open_rooms |= 1 << (found - length)
    return row_of, count


def ahead(packer: Packer, first_step: int, place: torch.device) -> Iterator[Pack]:
    """The packs from a step on without end, on the host, each made by a thread while those before it are used.

    place: where they will go; for a GPU they lie in memory that it copies from by itself.
    """

    def make(step: int) -> Pack:
        pack = packer.pack(step)
        return _pinned(pack) if place.type == "cuda" else pack

    with ThreadPoolExecutor(1, "pack") as maker:
        waiting = deque(maker.submit(make, first_step + index) for index in range(AHEAD))
        try:
            for step in itertools.count(first_step + AHEAD):
                yield waiting.popleft().result()
                waiting.append(maker.submit(make, step))
        finally:
            for future in waiting:
                future.cancel()


def _pinned(pack: Pack) -> Pack:
    return Pack(*(each.pin_memory() for each in (pack.tokens, pack.positions, pack.documents, pack.answered)))


def _counted(counts: Array) -> Any:
    """0, 1, ... for each count, one after the other: [sum of counts]."""
    ends = np.cumsum(counts)
    return np.arange(counts.sum()) - np.repeat(ends - counts, counts)
