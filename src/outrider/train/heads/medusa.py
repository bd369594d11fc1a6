"""Medusa: heads that each predict one token from the target's last hidden state, each one position further ahead.

Head k, from 0, predicts the token k + 2 positions after that of the state (models/heads.py). Shapes: N sampled
positions of a pack, K heads, H the hidden size, U tokens that can be drafted.
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
from ..target import TargetInfo, TargetOutputs
from .base import DraftHead, DraftVocabulary, StepResult, check_at_least, check_share


@dataclass(frozen=True)
class Options:
    heads: int = 4
    blocks: int = 1  # residual blocks of each head: x + SiLU(W x + b)
    draft_vocabulary: int = 0  # tokens that can be drafted: the ones that the target writes most often; 0: all
    share: float = 0.25  # fraction of the positions of a pack that a step trains on
    loss: Loss = "kl"
    decay: float = 0.8  # weight of the loss of each head, relative to the head before it


class ResidualBlocks(nn.Module):
    """The blocks of one head, initialised as the identity."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class MedusaDraftHead(DraftHead):
    method = "medusa"
    aux_layers = ()
    prefix = "model."

    def __init__(self, target_info: TargetInfo, options: Options, positions: int) -> None:
        super().__init__()
        check(options)
        self.target_info, self.options = target_info, options
        self.vocab = DraftVocabulary(target_info, options.draft_vocabulary)
        self.matrix = self.vocab.select(target_info.lm_head).detach()  # [U, H]
        width = target_info.config.width
        self.blocks = nn.ModuleList(ResidualBlocks(options.blocks, width) for _ in range(options.heads))
        self.to(target_info.torch_device)

    @property
    def draft_ids(self) -> Tensor | None:
        return self.vocab.ids

    def forward(self, target_outputs: TargetOutputs) -> StepResult:
        index, counted = self.sample_positions(target_outputs.pack)
        ahead = torch.arange(1, 1 + self.options.heads, device=index.device)
        # The target predicts a token at the position before it.
        rows = (index[:, None] + ahead).clamp(max=target_outputs.pack.tokens.numel() - 1)  # [N, K]
        targets = self.vocab.targets(target_outputs, rows.flatten())
        weights = counted * depth_weights(self.options.heads, self.options.decay, index.device)  # [N, K]
        states = self.states(target_outputs.last_state.flatten(0, 1)[index]).flatten(0, 1)  # [N * K, H]
        factors, loss = [(states, self.matrix)], self.options.loss
        scores = score(factors, targets.logits, weights.flatten(), loss, targets.logsumexp, target_rows=targets.rows)
        return self.vocab.result(scores.loss / weights.sum().clamp(min=1e-6), scores, targets, counted)

    def sample_positions(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Sample positions to train on among all B * L [N], and which heads' tokens count there [N, K] bool."""
        length = pack.tokens.shape[1]
        reach = 2 + self.options.heads
        documents = functional.pad(pack.documents, (0, reach), value=-1)  # [B, L + reach]
        answered = functional.pad(pack.answered, (0, reach))
        counted = torch.stack(
            [answered[:, k : k + length] & (documents[:, k : k + length] == pack.documents) for k in range(2, reach)],
            -1,
        ).flatten(0, 1)  # [B * L, K]
        count = max(round(self.options.share * len(counted)), 1)
        order = torch.rand(len(counted), device=counted.device).masked_fill(~counted[:, 0], -1.0)
        index = order.topk(count).indices  # [N]
        return index, counted[index] & counted[index, :1]

    def states(self, last_state: Tensor) -> Tensor:
        """Map the target's last states, after its norm [N, H], to the state of each head before lm_head [N, K, H]."""
        x = last_state.expand(self.options.heads, -1, -1)  # [K, N, H]
        for alike in zip(*(head.layers for head in self.blocks), strict=True):  # the same block of all heads
            weights = torch.stack([layer.weight for layer in alike])  # [K, H, H]
            biases = torch.stack([layer.bias for layer in alike])  # [K, H]
            x = x + functional.silu(torch.baddbmm(biases[:, None], x, weights.mT))
        return x.transpose(0, 1)

    def checkpoint_config(self) -> dict[str, Any]:
        target, options = self.target_info.config, self.options
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.width,
            "num_heads": options.heads,
            "num_hidden_layers": options.blocks,
            "vocab_size": target.vocabulary,
            "truncated_vocab_size": self.vocab.size,
            "medusa_fc_bias": True,
            "original_lm_head": True,
        }


def check(options: Options) -> None:
    check_at_least(1, heads=options.heads, blocks=options.blocks)
    check_share(options.share)
    if options.decay <= 0:
        raise UserError(f"`decay` is {options.decay}: pass a number above 0")
