"""The interface of a draft head in training, and what heads share: the draft vocabulary, targets, option checks.

Shapes: B rows of L tokens, V the target's vocabulary, E its hidden size, U tokens that a head can draft, S depths of a
draft, R drafted tokens of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError
from ..losses import Scores
from ..target import TargetInfo, TargetOutputs, vocab_key


@dataclass(frozen=True)
class StepResult:
    """The loss and the counts of one step. The counts are sums by depth of the draft [S]."""

    loss: Tensor  # []: the mean over drafted tokens, with a gradient
    counted: Tensor  # [S] f32: drafted tokens
    correct: Tensor  # [S] f32: of these, tokens that are the target's argmax
    overlap: Tensor  # [S] f32: sums of min(p, q) over the target's whole vocabulary


@dataclass(frozen=True)
class HeadExport:
    """A trained head as a checkpoint in Outrider's layout; io/export.py writes it, also in other layouts."""

    config: dict[str, Any]  # config.json
    tensors: dict[str, Tensor]  # f32, on the host, under the names that speculation/checkpoints reads
    draft_ids: Tensor | None = None  # [U] int64, rising; None: all of the target's


class DraftHead(nn.Module, ABC):
    """A head in training: fp32 parameters, bf16 matmuls under autocast where the device is fast at them."""

    method: str  # the name of its speculation method
    aux_layers: tuple[int, ...]  # hidden states of the target that it reads
    prefix = ""  # of its parameter names in a checkpoint

    @property
    @abstractmethod
    def draft_ids(self) -> Tensor | None: ...  # [U] int64, rising: the tokens that it can draft; None: all

    @abstractmethod
    def forward(self, target_outputs: TargetOutputs) -> StepResult: ...

    @abstractmethod
    def checkpoint_config(self) -> dict[str, Any]: ...

    def checkpoint_name(self, parameter: str) -> str:
        return f"{self.prefix}{parameter}"

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return its parameters, f32, on the host."""
        return {
            self.checkpoint_name(name): parameter.detach().to("cpu", torch.float32, copy=True)
            for name, parameter in self.named_parameters()
        }

    def on_loaded(self) -> None:
        """Adapt parameters that were just copied from an exported checkpoint to their form in training."""

    def export(self) -> HeadExport:
        ids = self.draft_ids
        return HeadExport(self.checkpoint_config(), self.checkpoint_tensors(), None if ids is None else ids.cpu())


@dataclass(frozen=True)
class Targets:
    """The target's outputs at the R positions where a head drafts."""

    logits: Tensor  # [B * L, U] f32: logits of the draft vocabulary at all positions of a pack
    rows: Tensor  # [R]: the rows of `logits` that belong to the drafted tokens
    logsumexp: Tensor | None  # [R] f32, over the whole vocabulary; None: all tokens can be drafted
    argmax: Tensor  # [R] int64, in the target's ids


class DraftVocabulary:
    """The tokens that a head can draft: all, or the ones that the target writes most often."""

    ids: Tensor | None  # [U] int64, rising

    def __init__(self, target_info: TargetInfo, size: int) -> None:
        vocabulary = target_info.config.vocabulary
        if not 0 <= size <= vocabulary:
            raise UserError(
                f"`draft_vocabulary` is {size}, but the target has {vocabulary} tokens: "
                "pass as many or fewer, or 0 for all"
            )
        ids = most_frequent(target_info.token_counts, size, target_info.config.end_tokens)
        self._key = vocab_key(ids)
        self.ids = None if ids is None else ids.to(target_info.torch_device)
        self.size = vocabulary if ids is None else len(ids)  # U

    def select(self, matrix: Tensor) -> Tensor:
        """Select the rows of the draft vocabulary: [V, H] to [U, H]."""
        return matrix if self.ids is None else matrix[self.ids]

    def targets(self, target_outputs: TargetOutputs, rows: Tensor) -> Targets:
        """Return the target's outputs at `rows` [R] of the B * L positions of a pack."""
        vocab = target_outputs.logits_for(self.ids, self._key)
        logsumexp = None if vocab.logsumexp is None else vocab.logsumexp[rows]
        return Targets(vocab.logits, rows, logsumexp, vocab.argmax[rows])

    def result(self, loss: Tensor, scores: Scores, targets: Targets, counted: Tensor) -> StepResult:
        """Sum the scores by depth. counted [R / S, S] bool: the drafted tokens that training uses."""
        argmax = scores.argmax if self.ids is None else self.ids[scores.argmax]
        correct = (argmax == targets.argmax).view_as(counted) & counted
        overlap = scores.overlap.view_as(counted) * counted
        return StepResult(loss, counted.sum(0).float(), correct.sum(0).float(), overlap.sum(0))


def most_frequent(token_counts: Tensor, size: int, always: tuple[int, ...]) -> Tensor | None:
    """Return the `size` most frequent tokens, those of `always` among them, rising: [U]; None: all tokens.

    Of tokens with equal counts the lowest ids come first.
    """
    vocabulary = len(token_counts)
    if not 0 < size < vocabulary:
        return None
    required = [token for token in always if 0 <= token < vocabulary]
    if len(required) > size:
        raise UserError(f"`draft_vocabulary` is {size}, but the target has {len(required)} end tokens: pass more")
    ranked = token_counts.detach().to("cpu", torch.int64, copy=True)
    ranked[required] = torch.iinfo(torch.int64).max
    return ranked.sort(descending=True, stable=True).indices[:size].sort().values


def check_at_least(least: float, **options: float) -> None:
    for name, value in options.items():
        if value < least:
            raise UserError(f"`{name}` is {value}: pass {least} or more")


def check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise UserError(f"`share` is {share}, but it is a fraction of the positions: pass a number above 0, at most 1")


def check_decay(decay: float) -> None:
    if not 0 < decay <= 1:
        raise UserError(f"`decay` is {decay}: pass a number above 0, at most 1")
