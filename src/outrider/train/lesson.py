"""What passes between a target that teaches and the heads that learn.

Letters: B rows of L tokens, V the target's vocabulary, E its width, U tokens that a student can draft, S places of a
draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..models import ModelConfig


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


@dataclass(frozen=True)
class Lesson:
    """A pack, and what the target made of it."""

    pack: Pack
    states: Mapping[int, Tensor]  # by tap: [B, L, E] f32, the state entering layer `tap` (Model.forward)
    last: Tensor  # [B, L, E] f32, after the last norm
    logits: Tensor  # [B, L, V] f32: of the token after each
    _told: dict[int, Told] = field(default_factory=dict, init=False, repr=False, compare=False)  # by size of `ids`

    def about(self, ids: Tensor | None) -> Told:
        """Its logits of the words `ids` [U], None: of all. Students that draft as many draft the same, and share it."""
        size = 0 if ids is None else len(ids)
        if size not in self._told:
            self._told[size] = Told.of(self.logits.flatten(0, 1), ids)
        return self._told[size]


@dataclass(frozen=True)
class Told:
    """What the target says of U words at the B * L places of a lesson."""

    wanted: Tensor  # [B * L, U] f32: logits
    whole: Tensor | None  # [B * L] f32: logsumexp over all words; None: U are all
    best: Tensor  # [B * L] int64: the likeliest of all

    @staticmethod
    def of(logits: Tensor, ids: Tensor | None, rows: int = 4096) -> Told:
        """Of logits [B * L, V], `rows` at a time."""
        begins = range(0, len(logits), rows)
        best = torch.cat([logits[begin : begin + rows].argmax(-1) for begin in begins])
        if ids is None:
            return Told(logits, None, best)
        wanted, whole = logits.new_empty(len(logits), len(ids)), logits.new_empty(len(logits))
        for begin in begins:
            part = slice(begin, begin + rows)
            torch.index_select(logits[part], 1, ids, out=wanted[part])
            torch.logsumexp(logits[part], -1, out=whole[part])
        return Told(wanted, whole, best)


@dataclass(frozen=True)
class Subject:
    """What a student is told of the target before it begins."""

    model: str  # the name or path that the user gave
    config: ModelConfig
    embedding: Tensor  # [V, E] f32, as it enters the first layer
    head: Tensor  # [V, E] f32
    taps: tuple[int, ...]  # the model's default
    counts: Tensor  # [V] int64: how often the target wrote each token
    torch_device: torch.device
    weights: Callable[[str], Tensor]  # its layers' matrices and norms by their names, f32


@dataclass(frozen=True)
class Report:
    """What a step gave. Sums by place of the draft [S], to be divided by `counted`."""

    loss: Tensor  # [], the mean over what was guessed, with a gradient
    counted: Tensor  # [S] f32: guesses
    correct: Tensor  # [S] f32: of them, what the target likes best, too
    overlap: Tensor  # [S] f32: sums of min(p, q) over the target's whole vocabulary


@dataclass(frozen=True)
class Exported:
    """A student as a checkpoint in our own layout; export.py writes it in others, too."""

    config: dict[str, Any]  # config.json
    tensors: dict[str, Tensor]  # f32, on the host, under the names that speculation/checkpoint reads
    draft_ids: Tensor | None = None  # [U] int64, rising; None: all of the target's


class Student(nn.Module, ABC):
    """A head that learns: fp32 parameters, multiplied in bf16 where the device is fast at it (autocast)."""

    method: str  # the name of its method of speculation
    taps: tuple[int, ...]  # states of the target that it reads
    prefix = ""  # of its parameters' names in a checkpoint

    @property
    @abstractmethod
    def drafted(self) -> Tensor | None: ...  # [U] int64, rising: the tokens that it can draft; None: all

    @abstractmethod
    def forward(self, lesson: Lesson) -> Report: ...

    @abstractmethod
    def checkpoint_config(self) -> dict[str, Any]: ...

    def checkpoint_name(self, parameter: str) -> str:
        return f"{self.prefix}{parameter}"

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Its parameters, f32, on the host."""
        return {
            self.checkpoint_name(name): each.detach().to("cpu", torch.float32, copy=True)
            for name, each in self.named_parameters()
        }

    def taken(self) -> None:
        """Its parameters were just taken from a checkpoint, and mean what they mean there."""

    def exported(self) -> Exported:
        ids = self.drafted
        return Exported(self.checkpoint_config(), self.checkpoint_tensors(), None if ids is None else ids.cpu())
