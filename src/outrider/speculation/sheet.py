"""A draft in the making: what networks that draft position by position write their tokens on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..device import Device
from ..kernels import Choice
from . import Draft, Turn
from .draw import Drawer


class Maker(Protocol):
    """Who drafts."""

    drawer: Drawer
    device: Device
    vocabulary: int


class Part(Protocol):
    """What is drafted for one request."""

    @property
    def row(self) -> int: ...  # among the turns

    @property
    def turn(self) -> Turn: ...

    @property
    def width(self) -> int: ...


class Sheet:
    """A draft in the making."""

    def __init__(self, maker: Maker, turns: Sequence[Turn], runs: Sequence[Part]) -> None:
        self.drawer, self.device, self.turns = maker.drawer, maker.device, turns
        self._choices: tuple[list[int], Choice] | None = None  # rows, and how their tokens are drawn
        self.width = max((run.width for run in runs), default=0)
        self.lengths = [0] * len(turns)
        for run in runs:
            self.lengths[run.row] = run.width
        place, shape = maker.device.place, (len(turns), self.width)
        self.tokens = torch.full(shape, -1, dtype=torch.int32, device=place)  # [B, W]
        self.chances = torch.ones(shape, device=place)  # [B, W]: to be kept, if those before are
        # Made anew each time: a draft may be verified some steps later, beside newer ones.
        self.logits = torch.zeros(*shape, maker.vocabulary, device=place) if self.drawer.keeps else None  # [B, W, V]
        self.judged = not self.drawer.keeps  # whether `chances` may be told

    def put(self, runs: Sequence[Part], depth: int, logits: Tensor, chances: Tensor | None = None) -> Tensor:
        """Draw a token for each run from its row of logits [R, V]; return them [R]. `chances` [R]: that it is kept,
        where the network says so before a token is drawn.
        """
        choice, rows = self._choice([run.row for run in runs])
        if chances is None and self.logits is None:
            drawn, chances = self.drawer.guess(logits, choice, depth)
        else:
            drawn, self.judged = self.drawer.draw(logits, choice, depth), chances is not None
        if chances is not None:
            self.chances[rows, depth] = chances
        if self.logits is not None:
            self.logits[rows, depth] = logits
        self.tokens[rows, depth] = drawn
        return drawn

    def _choice(self, rows: list[int]) -> tuple[Choice, Tensor]:
        """How tokens of these rows are drawn, and the rows on the device: the same as long as nobody drops out."""
        if self._choices is None or self._choices[0] != rows:
            self._choices = rows, self.drawer.choice([self.turns[row] for row in rows])
            self._rows = self.device.upload(rows, torch.int64)
        return self._choices[1], self._rows

    def pays(self, runs: Sequence[Part], depth: int) -> list[bool]:
        """Whether all up to `depth` is likely enough to be kept; if not, the run's draft ends before it."""
        if self.logits is not None or not any(run.turn.floor for run in runs):
            return [True] * len(runs)
        rows = [run.row for run in runs]
        whole = self.chances[rows, : depth + 1].prod(1).tolist()
        found = [chance >= run.turn.floor for run, chance in zip(runs, whole, strict=True)]
        for run, enough in zip(runs, found, strict=True):
            if not enough:
                self.lengths[run.row] = min(self.lengths[run.row], depth)
        return found

    def draft(self) -> Draft:
        # Where verification is a matter of law, nobody may choose among tokens by how likely they are.
        if not self.judged:
            return Draft(self.tokens, self.lengths, logits=self.logits)
        chances = [row[:length] for row, length in zip(self.chances.tolist(), self.lengths, strict=True)]
        return Draft(self.tokens, self.lengths, logits=self.logits, confidence=chances)
