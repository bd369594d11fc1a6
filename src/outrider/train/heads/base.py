"""What passes between a target that teaches and the heads that learn.

Letters: B rows of L tokens, V the target's vocabulary, E its width, U tokens that a student can draft, S places of a
draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError
from ..losses import Scores
from ..target import Lesson, Subject


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


@dataclass(frozen=True)
class Aims:
    """What the target says where a student guesses."""

    wanted: Tensor  # [B * L, U] f32: logits of the tokens that can be drafted, of a whole lesson
    places: Tensor  # [R]: the rows of it that are meant
    whole: Tensor | None  # [R] f32: logsumexp over all; None: all can be drafted
    best: Tensor  # [R] int64, in the target's ids


class Words:
    """The tokens that a student can draft: all, or so many of those that the target writes most often."""

    ids: Tensor | None  # [U] int64, rising

    def __init__(self, subject: Subject, count: int) -> None:
        vocabulary = subject.config.vocabulary
        if not 0 <= count <= vocabulary:
            raise UserError(
                f"`draft_vocabulary` is {count}, but the target has {vocabulary} tokens: "
                "pass as many or fewer, or 0 for all"
            )
        ids = frequent(subject.counts, count, subject.config.end_tokens)
        self.ids = None if ids is None else ids.to(subject.torch_device)
        self.count = vocabulary if ids is None else len(ids)  # U

    def rows(self, matrix: Tensor) -> Tensor:
        """Of a matrix with a row for each of the target's tokens: [V, H] to [U, H]."""
        return matrix if self.ids is None else matrix[self.ids]

    def aims(self, lesson: Lesson, at: Tensor) -> Aims:
        """What the target says at some of the B * L places of a lesson [R]."""
        told = lesson.about(self.ids)
        return Aims(told.wanted, at, None if told.whole is None else told.whole[at], told.best[at])

    def report(self, loss: Tensor, scores: Scores, aims: Aims, counted: Tensor) -> Report:
        """counted [R / S, S] bool: the guesses that are to be learnt from."""
        best = scores.best if self.ids is None else self.ids[scores.best]
        correct = (best == aims.best).view_as(counted) & counted
        overlap = scores.overlap.view_as(counted) * counted
        return Report(loss, counted.sum(0).float(), correct.sum(0).float(), overlap.sum(0))


def frequent(counts: Tensor, size: int, always: tuple[int, ...]) -> Tensor | None:
    """The `size` tokens that are counted most, and those of `always`, rising: [U]; None: all of them.

    Of tokens with one count the lowest ids come first.
    """
    vocabulary = len(counts)
    if not 0 < size < vocabulary:
        return None
    kept = [token for token in always if 0 <= token < vocabulary]
    if len(kept) > size:
        raise UserError(f"`draft_vocabulary` is {size}, but the target has {len(kept)} end tokens: pass more")
    ranked = counts.detach().to("cpu", torch.int64, copy=True)
    ranked[kept] = torch.iinfo(torch.int64).max
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def check_at_least(least: float, **options: float) -> None:
    for name, value in options.items():
        if value < least:
            raise UserError(f"`{name}` is {value}: pass {least} or more")


def check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise UserError(f"`share` is {share}: it is a share of the places of a lesson, pass a number up to 1")


def check_decay(decay: float) -> None:
    if not 0 < decay <= 1:
        raise UserError(f"`decay` is {decay}: pass a number above 0, at most 1")
