"""The gated MLP: two kernels a layer for few rows, with a third one where a norm follows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import Activation, MlpWeights
from .matrices import Matrix, pack
from .place import placed
from .pointwise import add_normed
from .product import gated, product


@dataclass(frozen=True)
class MlpLayer:
    gate_up: Matrix  # [2 * N, E], gate above up
    down: Matrix  # [E, N]
    activation: Activation
    eps: float
    norm: Tensor | None  # [E] f32
    post_norm: Tensor | None  # [E] f32
    gate_bias: Tensor | None  # [N] f32
    up_bias: Tensor | None  # [N] f32
    down_bias: Tensor | None  # [E] f32


def mlp_layer(weights: MlpWeights, *, fixed: bool = False) -> MlpLayer:
    return MlpLayer(
        gate_up=pack([weights.gate, weights.up], fixed),
        down=pack([weights.down], fixed),
        activation=weights.activation,
        eps=weights.eps,
        norm=placed(weights.norm),
        post_norm=placed(weights.post_norm),
        gate_bias=placed(weights.gate_bias),
        up_bias=placed(weights.up_bias),
        down_bias=placed(weights.down_bias),
    )


def mlp(x: Tensor, layer: MlpLayer) -> None:
    inner = gated(
        x,
        layer.gate_up,
        norm=layer.norm,
        eps=layer.eps,
        gate_bias=layer.gate_bias,
        up_bias=layer.up_bias,
        activation=layer.activation,
    )  # [T, N]
    if layer.post_norm is None:
        product(inner, layer.down, bias=layer.down_bias, add=x)
    else:
        add_normed(x, product(inner, layer.down, bias=layer.down_bias), layer.post_norm, layer.eps)
