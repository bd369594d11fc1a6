"""Stacks of layers: attention or a recurrent layer, then an MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..recurrence import LayerStates
from ..structures import Batch, LayerPages
from .layers import AttentionLayer, MlpLayer, MoeLayer, attend, mlp, moe, project_qkv
from .recurrent import RecurrentLayer, recurrent

StackedLayer = tuple[AttentionLayer | RecurrentLayer, MlpLayer | MoeLayer, LayerPages | LayerStates]


def layer_stack(
    layers: Sequence[tuple[AttentionLayer | RecurrentLayer, MlpLayer | MoeLayer]],
    pages: Sequence[LayerPages | LayerStates],
) -> list[StackedLayer]:
    widths = {mixer.output.shape[0] for mixer, _ in layers}
    widths |= {(mixer.query if isinstance(mixer, AttentionLayer) else mixer.gate).shape[1] for mixer, _ in layers}
    if len(widths) > 1:
        raise ValueError(f"the layers of a stack have different widths: {sorted(widths)}")
    return [(mixer, mlp, kept) for (mixer, mlp), kept in zip(layers, pages, strict=True)]


def run_layers(x: Tensor, layer_stack: list[StackedLayer], batch: Batch) -> None:
    for mixer, perceptron, kept in layer_stack:
        if isinstance(mixer, RecurrentLayer):
            assert isinstance(kept, LayerStates)
            recurrent(x, mixer, batch, kept)
        else:
            assert isinstance(kept, LayerPages)
            queries = project_qkv(x, mixer, batch, kept)  # [T, H * D]
            attend(queries, mixer, batch, kept, x)
        if isinstance(perceptron, MoeLayer):
            moe(x, perceptron)
        else:
            mlp(x, perceptron, batch.adapters)
