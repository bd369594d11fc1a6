"""Multi-token prediction: one module after the target's last state, that serves every token of a draft (FastMTP).

It shares the target's embedding and head, and has the names of Qwen3-Next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..losses import Loss
from ..target import Lesson, Subject
from .autoregressive import Layer, Plan, Unrolled
from .base import check_at_least, check_decay
from .layers import Norm, layer_keys, layer_shape, narrow


@dataclass(frozen=True)
class Options:
    length: int = 4  # tokens of a draft in training
    decay: float = 0.6  # each counts so much of the one before it
    loss: Loss = "kl"
    mlp_width: int = 0  # 0: the target's
    head_norms: bool = False  # norms on queries and keys, as Qwen3 has them
    rows: int = 2_048  # logits that are there at a time


class MtpStudent(Unrolled):
    method = "mtp"
    taps = ()
    prefix = "mtp."
    head: Tensor  # [V, E]

    def __init__(self, subject: Subject, options: Options, positions: int) -> None:
        check_at_least(1, length=options.length, rows=options.rows)
        check_at_least(0, mlp_width=options.mlp_width)
        check_decay(options.decay)
        shape = layer_shape(subject.config, options.mlp_width, options.head_norms)
        shares = [options.decay**step for step in range(options.length)]
        weights = tuple(share / sum(shares) for share in shares)
        plan = Plan(shape, 1, weights, options.loss, options.rows)
        super().__init__(subject, plan, Layer(shape), positions, None)
        self.pre_fc_norm_embedding = Norm(shape.width, shape.eps)
        self.pre_fc_norm_hidden = Norm(shape.width, shape.eps)
        self.fc = nn.Linear(2 * shape.width, shape.width, bias=False)
        self.register_buffer("head", subject.head.detach(), persistent=False)
        self.to(subject.torch_device)

    @property
    def token_norm(self) -> Norm:
        return self.pre_fc_norm_embedding

    @property
    def matrix(self) -> Tensor:
        return self.head

    def states(self, lesson: Lesson) -> Tensor:
        return lesson.last

    def enter(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        joined: Tensor = self.fc(torch.cat([tokens, narrow(self.pre_fc_norm_hidden(states))], -1))
        joined = joined.float()
        return joined, narrow(cast(Layer, self.layers[0]).input_layernorm(joined))

    def checkpoint_config(self) -> dict[str, Any]:
        return layer_keys(self.plan.shape, 1, self.target) | {
            "architectures": ["Qwen3NextMTP"],
            "num_nextn_predict_layers": 1,
            "num_target_layers": self.target.layers,
        }
