"""Stacks of layers, which the native library runs in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..recurrence import LayerStates
from ..structures import Batch, LayerPages
from . import _native
from .layers import AttentionLayer, MlpLayer, MoeLayer, pages_of
from .layers import _batch as native_batch
from .recurrent import RecurrentLayer, states_of
from .runtime import floats


@dataclass(frozen=True, slots=True)
class Stack:
    native: _native.LayerStack
    width: int  # E
    alive: tuple[object, ...]


def layer_stack(
    layers: Sequence[tuple[AttentionLayer | RecurrentLayer, MlpLayer | MoeLayer]],
    pages: Sequence[LayerPages | LayerStates],
) -> Stack:
    storages = [_storage(mixer, kept) for (mixer, _), kept in zip(layers, pages, strict=True)]
    mixers, mlps = [mixer.native for mixer, _ in layers], [mlp.native for _, mlp in layers]
    widths = {layer.width for pair in layers for layer in pair}
    widths |= {mixer.input_width for mixer, _ in layers if isinstance(mixer, AttentionLayer)}
    if len(widths) > 1:
        raise ValueError(f"the layers of a stack have different widths: {sorted(widths)}")
    return Stack(_native.LayerStack(mixers, mlps, storages), max(widths, default=0), (tuple(layers), tuple(pages)))


def _storage(mixer: AttentionLayer | RecurrentLayer, kept: LayerPages | LayerStates) -> _native.Pages | _native.States:
    if isinstance(mixer, AttentionLayer):
        assert isinstance(kept, LayerPages)
        return pages_of(mixer, kept)
    assert isinstance(kept, LayerStates)
    return states_of(mixer, kept)


def run_layers(x: Tensor, layer_stack: Stack, batch: Batch) -> None:
    step = native_batch(batch)
    _native.run_layers(layer_stack.native, floats(x, step.tokens, layer_stack.width), step)
