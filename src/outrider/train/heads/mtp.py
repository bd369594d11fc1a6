"""Multi-token prediction: one module over the target's last hidden state that drafts every token (FastMTP).

It shares the target's embedding and lm_head. Its tensors are named as in Qwen3-Next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..losses import Loss
from ..target import TargetInfo, TargetOutputs
from .autoregressive import AutoregressiveHead, CausalLayer, UnrollConfig
from .base import check_at_least, check_decay
from .layers import Norm, layer_keys, layer_shape, to_autocast


@dataclass(frozen=True)
class Options:
    length: int = 4  # tokens of a draft in training
    decay: float = 0.6  # weight of the loss of each drafted token, relative to the one before it
    loss: Loss = "kl"
    mlp_width: int = 0  # 0: the target's
    head_norms: bool = False  # norms on queries and keys, as in Qwen3
    rows: int = 2_048  # rows of logits in memory at a time


class MtpDraftHead(AutoregressiveHead):
    method = "mtp"
    aux_layers = ()
    prefix = "mtp."
    head: Tensor  # [V, E]

    def __init__(self, target_info: TargetInfo, options: Options, positions: int) -> None:
        check_at_least(1, length=options.length, rows=options.rows)
        check_at_least(0, mlp_width=options.mlp_width)
        check_decay(options.decay)
        shape = layer_shape(target_info.config, options.mlp_width, options.head_norms)
        decays = [options.decay**step for step in range(options.length)]
        weights = tuple(decay / sum(decays) for decay in decays)
        unroll = UnrollConfig(shape, 1, weights, options.loss, options.rows)
        super().__init__(target_info, unroll, CausalLayer(shape), positions, None)
        self.pre_fc_norm_embedding = Norm(shape.width, shape.eps)
        self.pre_fc_norm_hidden = Norm(shape.width, shape.eps)
        self.fc = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.register_buffer("head", target_info.lm_head.detach(), persistent=False)
        self.to(target_info.torch_device)

    @property
    def token_norm(self) -> Norm:
        return self.pre_fc_norm_embedding

    @property
    def matrix(self) -> Tensor:
        return self.head

    def states(self, target_outputs: TargetOutputs) -> Tensor:
        return target_outputs.last_state

    def enter(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        joined: Tensor = self.fc(torch.cat([tokens, to_autocast(self.pre_fc_norm_hidden(states))], -1))
        joined = joined.float()
        return joined, to_autocast(cast(CausalLayer, self.layers[0]).input_layernorm(joined))

    def checkpoint_config(self) -> dict[str, Any]:
        return layer_keys(self.unroll.shape, 1, self.target) | {
            "architectures": ["Qwen3NextMTP"],
            "num_nextn_predict_layers": 1,
            "num_target_layers": self.target.layers,
        }
