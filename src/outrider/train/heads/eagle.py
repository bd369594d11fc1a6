"""EAGLE-3: a layer over aux hidden states of the target, with its own draft vocabulary and lm_head.

This is the variant called EAGLE-3.1: each aux hidden state has a norm, and so has the state that is fed back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...errors import UserError
from ..losses import Loss
from ..target import TargetInfo, TargetOutputs
from .autoregressive import AutoregressiveHead, CausalLayer, UnrollConfig
from .base import check_at_least, check_decay, most_frequent
from .layers import HeadMatrix, LayerShape, Norm, layer_keys, layer_shape, make_lm_head, to_autocast


@dataclass(frozen=True)
class Options:
    draft_vocabulary: int = 16_384  # tokens that it can draft: the target's most frequent ones; 0: all
    length: int = 7  # tokens of a draft in training
    decay: float = 0.8  # weight of the loss of each drafted token, relative to the one before it
    loss: Loss = "kl"
    layers: int = 1
    mlp_width: int = 0  # 0: the target's
    aux_layers: tuple[int, ...] = ()  # hidden states to read, entering these layers; default: the model's
    head: HeadMatrix = "trained"
    head_norms: bool = False  # norms on queries and keys, as in Qwen3
    rows: int = 4_096  # rows of logits in memory at a time


class FirstLayer(CausalLayer):
    """A layer whose attention reads token and state side by side, each with its own norm."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape, 2 * shape.width)
        self.hidden_norm = Norm(shape.width, shape.eps)


class EagleDraftHead(AutoregressiveHead):
    method = "eagle3"

    def __init__(self, target_info: TargetInfo, options: Options, positions: int) -> None:
        config = target_info.config
        check(options, config.layers)
        shape = layer_shape(config, options.mlp_width, options.head_norms)
        weights = tuple(options.decay**step for step in range(options.length))
        unroll = UnrollConfig(shape, options.layers, weights, options.loss, options.rows)
        ids = most_frequent(target_info.token_counts, options.draft_vocabulary, config.end_tokens)
        super().__init__(target_info, unroll, FirstLayer(shape), positions, ids)
        self.aux_layers = options.aux_layers or target_info.aux_layers
        self.fc_norm = nn.ModuleList(Norm(config.width, config.eps) for _ in self.aux_layers)
        self.fc = nn.Linear(len(self.aux_layers) * config.width, shape.width, bias=False)
        lm_head = target_info.lm_head.detach()
        self.target_rows = lm_head if ids is None else lm_head[ids.to(lm_head.device)]  # [U, E]
        self.lm_head = make_lm_head(options.head, self.target_rows)
        self.to(target_info.torch_device)

    @property
    def first(self) -> FirstLayer:
        return cast(FirstLayer, self.layers[0])

    @property
    def token_norm(self) -> Norm:
        return self.first.input_layernorm

    @property
    def matrix(self) -> Tensor:
        return self.target_rows if self.lm_head is None else self.lm_head.weight

    def states(self, target_outputs: TargetOutputs) -> Tensor:
        states = [target_outputs.aux_states[layer] for layer in self.aux_layers]
        normed = [to_autocast(norm(state)) for norm, state in zip(self.fc_norm, states, strict=True)]
        fused: Tensor = self.fc(torch.cat(normed, -1))  # [B, L, aux layers * E] to [B, L, E]
        return fused.float()

    def enter(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return states, torch.cat([tokens, to_autocast(self.first.hidden_norm(states))], -1)

    def checkpoint_config(self) -> dict[str, Any]:
        return layer_keys(self.unroll.shape, self.unroll.layers, self.target) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.matrix),
            "target_hidden_size": self.target.width,
            "num_target_layers": self.target.layers,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
            "fc_norm": True,
            "norm_before_fc": False,
            "norm_before_residual": False,
            "norm_output": True,
        }


def check(options: Options, layers: int) -> None:
    check_at_least(1, length=options.length, layers=options.layers, rows=options.rows)
    check_at_least(0, draft_vocabulary=options.draft_vocabulary, mlp_width=options.mlp_width)
    check_decay(options.decay)
    beyond = [layer for layer in options.aux_layers if not 0 <= layer <= layers]
    if beyond:
        raise UserError(
            f"`aux_layers` names the state entering layer {beyond[0]}, but the target has {layers} layers: "
            f"pass numbers from 0 to {layers}"
        )
