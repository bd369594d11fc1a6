"""EAGLE-1 in training: one layer that predicts the target's next state, which the target's own lm_head reads.

As in the original, one matrix joins a token's embedding with the target's last state, and neither the layer's input nor
its output has a norm. The loss is smooth L1 between the predicted and the target's state, plus that of the logits. The
original trains one step and adds noise to the states; here later steps read the head's own states (see
autoregressive.py), and `length=1` gives the original without noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..losses import Loss
from ..target import TargetInfo, TargetOutputs
from .autoregressive import AutoregressiveHead, CausalLayer, UnrollConfig
from .base import check_at_least, check_decay
from .layers import LayerShape, layer_keys, layer_shape, to_autocast


@dataclass(frozen=True)
class Options:
    length: int = 4  # tokens of a draft in training
    decay: float = 0.8  # weight of the loss of each drafted token, relative to the one before it
    loss: Loss = "kl"  # of the logits
    logit_weight: float = 0.1  # of that loss, relative to smooth L1 of the states: 0.1 in the original
    mlp_width: int = 0  # 0: the target's
    rows: int = 2_048  # rows of logits in memory at a time


class BareLayer(CausalLayer):
    """A layer whose attention reads its input without a norm."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        del self.input_layernorm


class Eagle1DraftHead(AutoregressiveHead):
    method = "eagle"
    aux_layers = ()
    head: Tensor  # [V, E]

    def __init__(self, target_info: TargetInfo, options: Options, positions: int) -> None:
        check_at_least(1, length=options.length, rows=options.rows)
        check_at_least(0, mlp_width=options.mlp_width, logit_weight=options.logit_weight)
        check_decay(options.decay)
        shape = layer_shape(target_info.config, options.mlp_width, head_norms=False)
        weights = tuple(options.decay**step for step in range(options.length))
        unroll = UnrollConfig(shape, 1, weights, options.loss, options.rows, options.logit_weight)
        super().__init__(target_info, unroll, BareLayer(shape), positions, None)
        self.norm = nn.Identity()
        self.fc = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.register_buffer("head", target_info.lm_head.detach(), persistent=False)
        self.to(target_info.torch_device)

    @property
    def token_norm(self) -> nn.Module:
        return nn.Identity()

    @property
    def matrix(self) -> Tensor:
        return self.head

    def states(self, target_outputs: TargetOutputs) -> Tensor:
        return target_outputs.last_state

    def enter(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        joined: Tensor = self.fc(torch.cat([tokens, to_autocast(states)], -1))
        return joined.float(), joined

    def state_loss(self, states: Tensor, target_states: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Return smooth L1, the mean over the width, summed by weights [R]."""
        errors = functional.smooth_l1_loss(states, target_states.index_select(0, rows), reduction="none")  # [R, E]
        return (errors.mean(-1) * weights).sum()

    def checkpoint_config(self) -> dict[str, Any]:
        return layer_keys(self.unroll.shape, 1, self.target) | {
            "architectures": ["LlamaForCausalLMEagle"],
            "num_target_layers": self.target.layers,
        }
