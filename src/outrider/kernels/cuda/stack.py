"""Layers with their storage, run one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import Batch, LayerPages
from .attention import AttentionLayer, attention
from .mlp import MlpLayer, mlp

StackedLayer = tuple[AttentionLayer, MlpLayer, LayerPages]


def stack(layers: Sequence[tuple[AttentionLayer, MlpLayer]], pages: Sequence[LayerPages]) -> list[StackedLayer]:
    widths = {width for layer, _ in layers for width in (layer.qkv.shape[1], layer.output.shape[0])}
    if len(widths) > 1:
        raise ValueError(f"the layers of a stack have different widths: {sorted(widths)}")
    return [(layer, perceptron, kept) for (layer, perceptron), kept in zip(layers, pages, strict=True)]


def run_stack(x: Tensor, stack: list[StackedLayer], batch: Batch) -> None:
    for layer, perceptron, pages in stack:
        attention(x, layer, batch, pages)
        mlp(x, perceptron)
