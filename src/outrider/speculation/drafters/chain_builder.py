"""A draft in the making: what networks that draft position by position write their tokens on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...device import Device
from ...kernels import SamplingMetadata
from ..interface import DraftBatch, DraftContext
from .draft_sampler import DraftSampler


class Maker(Protocol):
    """Who drafts."""

    drawer: DraftSampler
    device: Device
    vocabulary: int


class Part(Protocol):
    """What is drafted for one request."""

    @property
    def row(self) -> int: ...  # among the contexts

    @property
    def context(self) -> DraftContext: ...

    @property
    def width(self) -> int: ...


class Sheet:
    """A draft in the making. What is drawn stays on the device until someone has to know it."""

    def __init__(self, maker: Maker, contexts: Sequence[DraftContext], runs: Sequence[Part]) -> None:
        self.drawer, self.device, self.contexts = maker.drawer, maker.device, contexts
        self._choices: tuple[list[int], SamplingMetadata] | None = None  # rows, and how their tokens are drawn
        self.width = max((run.width for run in runs), default=0)
        self.lengths = [0] * len(contexts)
        for run in runs:
            self.lengths[run.row] = run.width
        # Where only the likeliest are wanted, what cannot be drafted need not be looked at.
        self.likeliest = self.drawer.likeliest([contexts[run.row] for run in runs])
        self._drawn: list[tuple[list[int], Tensor, Tensor | None]] = []  # by depth: rows, tokens [R], chances [R]
        self._told: list[list[float]] = []  # by depth: those chances, as far as somebody asked
        self._whole = [1.0] * len(contexts)  # the chance of all that was told
        # Made anew each time: a draft may be verified some steps later, beside newer ones.
        shape = len(contexts), self.width, maker.vocabulary
        self.logits = torch.zeros(*shape, device=maker.device.torch_device) if self.drawer.keeps else None  # [B, W, V]
        self.judged = not self.drawer.keeps  # whether chances may be told

    def put(
        self, runs: Sequence[Part], depth: int, logits: Tensor, chances: Tensor | None = None, ids: Tensor | None = None
    ) -> Tensor:
        """Draw a token for each run from its row of logits [R, V]; return them [R]. `chances` [R]: that it is kept,
        where the network says so before a token is drawn. ids [U]: the logits [R, U] are of these tokens.
        """
        rows = [run.row for run in runs]
        choice = self._choice(rows)
        if chances is None and self.logits is None:
            drawn, chances = self.drawer.draft(logits, choice, depth)
        else:
            drawn, self.judged = self.drawer.draw(logits, choice, depth), chances is not None
        if ids is not None:
            drawn = ids.index_select(0, drawn).to(torch.int32)
        if self.logits is not None:
            self.logits[self.device.upload(rows, torch.int64), depth] = logits
        self._drawn.append((rows, drawn, chances))
        return drawn

    def _choice(self, rows: list[int]) -> SamplingMetadata:
        """How tokens of these rows are drawn: the same as long as nobody drops out."""
        if self._choices is None or self._choices[0] != rows:
            self._choices = rows, self.drawer.choice([self.contexts[row] for row in rows])
        return self._choices[1]

    def pays(self, runs: Sequence[Part], depth: int, at_once: bool = False) -> list[bool]:
        """Whether each run's draft is worth going on with. What is not likely enough to be kept ends the run's draft
        before it. at_once: the next tokens have been paid for.
        """
        if self.logits is not None or not any(run.context.min_acceptance for run in runs):
            return [True] * len(runs)
        found = []
        for run, chance in zip(runs, self._tell(depth), strict=True):
            row, floor = run.row, run.context.min_acceptance
            whole = self._whole[row] = self._whole[row] * chance
            if whole < floor:
                self.lengths[row] = min(self.lengths[row], depth)
            found.append(whole >= (floor if at_once else max(floor, run.context.min_continuation)))
        return found

    def _tell(self, depth: int) -> list[float]:
        """The chances of a depth, and of all before it, on the host."""
        for rows, _, chances in self._drawn[len(self._told) : depth + 1]:
            self._told.append([1.0] * len(rows) if chances is None else chances.tolist())
        return self._told[depth]

    def draft(self) -> DraftBatch:
        tokens: list[list[int]] = [[] for _ in self.contexts]
        chances: list[list[float]] = [[] for _ in self.contexts]
        if self._drawn:
            listed = iter(torch.cat([drawn for _, drawn, _ in self._drawn]).tolist())
            self._tell(len(self._drawn) - 1)
            for (rows, _, _), told in zip(self._drawn, self._told, strict=True):
                for row, chance in zip(rows, told, strict=True):
                    tokens[row].append(next(listed))
                    chances[row].append(chance)
        for row, own in enumerate(tokens):
            self.lengths[row] = min(self.lengths[row], len(own))
        # Where verification is a matter of law, nobody may choose among tokens by how likely they are.
        sure = [row[:length] for row, length in zip(chances, self.lengths, strict=True)] if self.judged else None
        return DraftBatch(tokens, self.lengths, logits=self.logits, confidence=sure, reached=len(self._drawn))
