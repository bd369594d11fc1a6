"""Medusa's students: heads that each guess one token from the target's last state, one further ahead than the other.

Head k, from 0, guesses the token k + 2 places after the state's position (models/medusa.py). Letters: N states of a
lesson, K heads, H the width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import UserError
from ..data.pack import Pack
from ..losses import Loss, depth_weights, score
from ..target import Lesson, Subject
from .base import Report, Student, Words, check_at_least, check_share


@dataclass(frozen=True)
class Options:
    heads: int = 4
    blocks: int = 1  # of each head: x + SiLU(W x + b)
    draft_vocabulary: int = 0  # tokens that can be drafted, those that the target writes most often; 0: all
    share: float = 0.25  # of the places of a lesson that are learnt from
    loss: Loss = "kl"
    decay: float = 0.8  # how much each head matters, next to the one before


class Blocks(nn.Module):
    """The blocks of one head, which begin as the identity."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class MedusaStudent(Student):
    method = "medusa"
    taps = ()
    prefix = "model."

    def __init__(self, subject: Subject, options: Options, positions: int) -> None:
        super().__init__()
        check(options)
        self.subject, self.options = subject, options
        self.words = Words(subject, options.draft_vocabulary)
        self.matrix = self.words.rows(subject.head).detach()  # [U, H]
        self.blocks = nn.ModuleList(Blocks(options.blocks, subject.config.width) for _ in range(options.heads))
        self.to(subject.torch_device)

    @property
    def drafted(self) -> Tensor | None:
        return self.words.ids

    def forward(self, lesson: Lesson) -> Report:
        at, counted = self.sample_positions(lesson.pack)
        ahead = torch.arange(1, 1 + self.options.heads, device=at.device)
        # What the target says one place before the token that a head guesses.
        there = (at[:, None] + ahead).clamp(max=lesson.pack.tokens.numel() - 1)  # [N, K]
        aims = self.words.aims(lesson, there.flatten())
        weights = counted * depth_weights(self.options.heads, self.options.decay, at.device)  # [N, K]
        states = self.states(lesson.last.flatten(0, 1)[at]).flatten(0, 1)  # [N * K, H]
        parts, loss = [(states, self.matrix)], self.options.loss
        scores = score(parts, aims.wanted, weights.flatten(), loss, aims.whole, places=aims.places)
        return self.words.report(scores.loss / weights.sum().clamp(min=1e-6), scores, aims, counted)

    def sample_positions(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Draw the states to learn from among all B * L [N], and which of their heads' guesses count [N, K] bool."""
        length = pack.tokens.shape[1]
        reach = 2 + self.options.heads
        documents = functional.pad(pack.documents, (0, reach), value=-1)  # [B, L + reach]
        answered = functional.pad(pack.answered, (0, reach))
        guessed = range(2, reach)
        counted = torch.stack(
            [answered[:, k : k + length] & (documents[:, k : k + length] == pack.documents) for k in guessed],
            -1,
        ).flatten(0, 1)  # [B * L, K]
        count = max(round(self.options.share * len(counted)), 1)
        order = torch.rand(len(counted), device=counted.device).masked_fill(~counted[:, 0], -1.0)
        at = order.topk(count).indices  # [N]
        return at, counted[at] & counted[at, :1]

    def states(self, last: Tensor) -> Tensor:
        """The target's last states, after its norm [N, H], as each head gives them to the target's matrix [N, K, H]."""
        x = last.expand(self.options.heads, -1, -1)  # [K, N, H]
        for alike in zip(*(head.layers for head in self.blocks), strict=True):  # of all heads at once
            weights = torch.stack([layer.weight for layer in alike])  # [K, H, H]
            biases = torch.stack([layer.bias for layer in alike])  # [K, H]
            x = x + functional.silu(torch.baddbmm(biases[:, None], x, weights.mT))
        return x.transpose(0, 1)

    def checkpoint_config(self) -> dict[str, Any]:
        target, options = self.subject.config, self.options
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.width,
            "num_heads": options.heads,
            "num_hidden_layers": options.blocks,
            "vocab_size": target.vocabulary,
            "truncated_vocab_size": self.words.count,
            "medusa_fc_bias": True,
            "original_lm_head": True,
        }


def check(options: Options) -> None:
    check_at_least(1, heads=options.heads, blocks=options.blocks)
    check_share(options.share)
    if options.decay <= 0:
        raise UserError(f"`decay` is {options.decay}: pass a number above 0")
