"""What passes between a target that teaches and the heads that learn.

Letters: B rows of L tokens, V the target's vocabulary, E its width, U tokens that a student can draft, S places of a
draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Subject:
    """What a student is told of the target before it begins."""

    model: str  # the name or path that the user gave
    config: ModelConfig
    embedding: Tensor  # [V, E] f32, as it enters the first layer
    head: Tensor  # [V, E] f32
    taps: tuple[int, ...]  # the model's default
    counts: Tensor  # [V] int64: how often the target wrote each token
    place: torch.device


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
    tensors: dict[str, Tensor]  # f32, on the host, under the names that speculation/checkpoint.py reads
    draft_ids: Tensor | None = None  # [U] int64, rising; None: all of the target's


class Student(nn.Module, ABC):
    """A head that learns: fp32 parameters, multiplied in bf16 where the device is fast at it (autocast)."""

    method: str  # the name of its method of speculation
    taps: tuple[int, ...]  # states of the target that it reads

    @abstractmethod
    def forward(self, lesson: Lesson) -> Report: ...

    @abstractmethod
    def exported(self) -> Exported: ...
