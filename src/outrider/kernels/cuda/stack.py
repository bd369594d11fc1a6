"""Layers with their storage, run one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import Batch, LayerPages
from .attention import AttentionLayer, attend, project_qkv
from .mlp import MlpLayer, mlp

StackedLayer = tuple[AttentionLayer, MlpLayer, LayerPages]


def stack(layers: Sequence[tuple[AttentionLayer, MlpLayer]], pages: Sequence[LayerPages]) -> list[StackedLayer]:
    widths = {width for attention, _ in layers for width in (attention.qkv.shape[1], attention.output.shape[0])}
    if len(widths) > 1:
        raise ValueError(f"the layers of a stack have different widths: {sorted(widths)}")
    return [(attention, perceptron, kept) for (attention, perceptron), kept in zip(layers, pages, strict=True)]


def run_stack(x: Tensor, stack: list[StackedLayer], batch: Batch) -> None:
    for attention, perceptron, pages in stack:
        queries = project_qkv(x, attention, batch, pages)  # [T, H * D]
        attend(queries, attention, batch, pages, x)
        mlp(x, perceptron)
