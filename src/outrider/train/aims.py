"""What students aim at that guess several places at once.

Letters: R guesses, U tokens that can be drafted, V the target's vocabulary, S places of a draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from .lesson import Lesson, Report, Subject
from .losses import Scores


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
