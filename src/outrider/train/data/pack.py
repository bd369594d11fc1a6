"""Pack documents into rows of one length, with little padding.

The documents of a row are chosen once. Each pass over the data takes the rows in another order, so that all passes have
the same number of steps, and any step can be built without those before it. Documents of a row do not see each other,
so it does not matter that they stay together.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError

Array = np.ndarray[Any, Any]
AHEAD = 2  # packs that are built in advance


@dataclass(frozen=True)
class Pack:
    """Documents (each a prompt and its answer), concatenated in rows of one length: B rows of L tokens."""

    tokens: Tensor  # [B, L] int64
    positions: Tensor  # [B, L] int64: in the document, from 0
    documents: Tensor  # [B, L] int64: number of the document in its row, rising; -1: padding, at the end
    answered: Tensor  # [B, L] bool: tokens that the target wrote

    def to(self, device: torch.device) -> Pack:
        def move(values: Tensor) -> Tensor:
            return values.to(device, non_blocking=True)

        return Pack(move(self.tokens), move(self.positions), move(self.documents), move(self.answered))


class Listed(Protocol):
    """For each document [N]: tokens of its prompt, of prompt and answer, and whether it is held out."""

    @property
    def prompt_lengths(self) -> Array: ...

    @property
    def lengths(self) -> Array: ...

    @property
    def held_out(self) -> Array: ...


class Source(Protocol):
    """The part of a store that a packer needs."""

    def documents(self) -> Listed: ...

    def tokens(self, index: int) -> Array: ...


class Packer:
    """Builds packs of `rows` rows of `length` tokens, each a function of the seed and its step.

    held_out: pack the held-out documents instead, always in the same order. Documents are truncated at `length`; those
    without an answer token before that are skipped.
    """

    def __init__(
        self, source: Source, rows: int, length: int, seed: int = 0, held_out: bool = False, answer: int | None = None
    ) -> None:
        """Choose the documents of each row. answer: train on the first tokens of an answer, this many; None: all."""
        if rows < 1 or length < 2:
            raise UserError(f"packs of {rows} rows of {length} tokens are empty: pass at least 1 row of 2 tokens")
        self.source, self.rows, self.length = source, rows, length
        listed = source.documents()
        prompts, lengths = listed.prompt_lengths, np.minimum(listed.lengths, length)  # [N]
        if answer is not None:
            lengths = np.minimum(lengths, prompts + answer)
        chosen = np.flatnonzero((lengths > prompts) & (listed.held_out == held_out))
        if not len(chosen) and not held_out:
            raise UserError(
                f"there is no document with a prompt of fewer than {length} tokens and an answer to learn from: "
                "pass more prompts, or a larger `--length`"
            )
        self._seed, self._held_out = seed % 2**64, held_out
        chosen = np.random.default_rng((self._seed, 0)).permutation(chosen)
        chosen = chosen[np.argsort(-lengths[chosen], kind="stable")]  # longest first: short ones fill the gaps
        row, count = best_fit(lengths[chosen].tolist(), length)
        order = np.argsort(row, kind="stable")
        self._documents = chosen[order]  # [documents], row by row
        self._prompts, self._lengths = prompts[self._documents], lengths[self._documents]
        self._begins = np.searchsorted(
            row[order], np.arange(count + 1)
        )  # [rows of a pass + 1]: index of the first document of each row
        before = np.cumsum(self._lengths) - self._lengths
        self._offsets = before - before[self._begins[row[order]]]  # [documents]: in their rows
        self._order = lru_cache(maxsize=2)(self._shuffled)
        self.steps_per_pass = -(-count // rows)

    @property
    def padding(self) -> float:
        """Return the fraction of the positions of a pass that are padding."""
        positions = self.steps_per_pass * self.rows * self.length
        return 1 - float(self._lengths.sum()) / positions if positions else 0.0

    @property
    def tokens_per_pass(self) -> int:
        return int(self._lengths.sum())

    def pack(self, step: int) -> Pack:
        epoch, index = divmod(step, self.steps_per_pass)
        rows = self._order(epoch)[index * self.rows : (index + 1) * self.rows]  # fewer at the end of a pass
        counts = self._begins[rows + 1] - self._begins[rows]  # documents of each row
        numbers = _counted(counts)  # [documents], from 0 in each row
        held = np.repeat(self._begins[rows], counts) + numbers  # [documents]
        lengths = self._lengths[held]
        offsets = self._offsets[held] + np.repeat(np.arange(len(rows)) * self.length, counts)  # [documents]
        positions = _counted(lengths)  # [T]
        slots = np.repeat(offsets, lengths) + positions  # [T]: in the flattened pack
        texts = zip(self._documents[held].tolist(), lengths.tolist(), strict=True)
        tokens = np.concatenate([self.source.tokens(index)[:size] for index, size in texts])  # [T]
        return Pack(
            tokens=self._fill(tokens, slots),
            positions=self._fill(positions, slots),
            documents=self._fill(np.repeat(numbers, lengths), slots, empty=-1),
            answered=self._fill(positions >= np.repeat(self._prompts[held], lengths), slots).bool(),
        )

    def _fill(self, values: Array, slots: Array, empty: int = 0) -> Tensor:
        """Put values [T] into their slots, `empty` elsewhere: [rows, length] int64."""
        filled = np.full(self.rows * self.length, empty, np.int64)
        filled[slots] = values
        return torch.from_numpy(filled).view(self.rows, self.length)

    def _shuffled(self, epoch: int) -> Array:
        """Return the order of the rows in a pass [rows of a pass]."""
        epoch = 0 if self._held_out else epoch
        return np.random.default_rng((self._seed, 1, epoch)).permutation(len(self._begins) - 1)


def best_fit(lengths: Sequence[int], capacity: int) -> tuple[Array, int]:
    """Assign each length (1 to `capacity`) to the fullest row that it fits, else to a new row.

    Returns the row of each, and the number of rows.
    """
    row_of = np.empty(len(lengths), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the space left
    open_spaces = 0  # bit r: some row has r tokens left
    count = 0
    for index, length in enumerate(lengths):
        fitting = open_spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[space].pop()
            if not open_rows[space]:
                open_spaces ^= 1 << space
        else:
            space, row, count = capacity, count, count + 1
        row_of[index] = row
        if space > length:
            open_rows[space - length].append(row)
            open_spaces |= 1 << (space - length)
    return row_of, count


def ahead(packer: Packer, first_step: int, device: torch.device) -> Generator[Pack]:
    """Yield the packs from a step on, without end, on the host; a thread builds them in advance.

    device: where they will be copied; for a GPU they are in pinned memory.
    """

    def make(step: int) -> Pack:
        pack = packer.pack(step)
        return _pinned(pack) if device.type == "cuda" else pack

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
    """Return 0, 1, ... for each count, concatenated: [sum of counts]."""
    ends = np.cumsum(counts)
    return np.arange(counts.sum()) - np.repeat(ends - counts, counts)
