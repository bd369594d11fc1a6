"""EAGLE-3: a layer over tapped states of the target, with a vocabulary and a matrix to the logits of its own.

It is what is called EAGLE-3.1: each tapped state has a norm, and the state that is fed back is normed too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...errors import UserError
from ..losses import Loss
from ..target import Lesson, Subject
from .autoregressive import Layer, Plan, Unrolled
from .base import check_at_least, check_decay, frequent
from .layers import HeadMatrix, LayerShape, Norm, layer_keys, layer_shape, narrow, own_head


@dataclass(frozen=True)
class Options:
    draft_vocabulary: int = 16_384  # tokens that it can draft, the target's most frequent; 0: all
    length: int = 7  # tokens of a draft in training
    decay: float = 0.8  # each counts so much of the one before it
    loss: Loss = "kl"
    layers: int = 1
    mlp_width: int = 0  # 0: the target's
    taps: tuple[int, ...] = ()  # states entering these layers; default: as the model suggests
    head: HeadMatrix = "trained"
    head_norms: bool = False  # norms on queries and keys, as Qwen3 has them
    rows: int = 4_096  # logits that are there at a time


class First(Layer):
    """Its attention reads token and state side by side, each with a norm of its own."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape, 2 * shape.width)
        self.hidden_norm = Norm(shape.width, shape.eps)


class EagleStudent(Unrolled):
    method = "eagle3"

    def __init__(self, subject: Subject, options: Options, positions: int) -> None:
        config = subject.config
        check(options, config.layers)
        shape = layer_shape(config, options.mlp_width, options.head_norms)
        weights = tuple(options.decay**step for step in range(options.length))
        plan = Plan(shape, options.layers, weights, options.loss, options.rows)
        ids = frequent(subject.counts, options.draft_vocabulary, config.end_tokens)
        super().__init__(subject, plan, First(shape), positions, ids)
        self.taps = options.taps or subject.taps
        self.fc_norm = nn.ModuleList(Norm(config.width, config.eps) for _ in self.taps)
        self.fc = nn.Linear(len(self.taps) * config.width, shape.width, bias=False)
        rows = subject.head.detach() if ids is None else subject.head.detach()[ids.to(subject.head.device)]
        self.target_rows = rows  # [U, E]
        self.lm_head = own_head(options.head, rows)
        self.to(subject.torch_device)

    @property
    def first(self) -> First:
        return cast(First, self.layers[0])

    @property
    def token_norm(self) -> Norm:
        return self.first.input_layernorm

    @property
    def matrix(self) -> Tensor:
        return self.target_rows if self.lm_head is None else self.lm_head.weight

    def states(self, lesson: Lesson) -> Tensor:
        pairs = zip(self.fc_norm, self.taps, strict=True)
        joined = torch.cat([narrow(norm(lesson.states[tap])) for norm, tap in pairs], -1)  # [B, L, taps * E]
        fused: Tensor = self.fc(joined)
        return fused.float()

    def enter(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return states, torch.cat([tokens, narrow(self.first.hidden_norm(states))], -1)

    def checkpoint_config(self) -> dict[str, Any]:
        return layer_keys(self.plan.shape, self.plan.layers, self.target) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.matrix),
            "target_hidden_size": self.target.width,
            "num_target_layers": self.target.layers,
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "fc_norm": True,
            "norm_before_fc": False,
            "norm_before_residual": False,
            "norm_output": True,
        }


def check(options: Options, layers: int) -> None:
    check_at_least(1, length=options.length, layers=options.layers, rows=options.rows)
    check_at_least(0, draft_vocabulary=options.draft_vocabulary, mlp_width=options.mlp_width)
    check_decay(options.decay)
    beyond = [tap for tap in options.taps if not 0 <= tap <= layers]
    if beyond:
        raise UserError(
            f"`taps` names the state entering layer {beyond[0]}, but the target has {layers} layers: pass 0 to {layers}"
        )
