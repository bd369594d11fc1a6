"""Recurrent layers of the CPU backend: weights packed for the native library, and calls of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..recurrence import LayerStates, RecurrentWeights
from ..structures import Batch
from . import _native
from .layers import _addresses as addresses
from .layers import _batch as native_batch
from .layers import _in_one_order as in_one_order
from .layers import _vector as vector_of
from .layers import matrix
from .runtime import FLOAT, INTEGER, address, floats, integers


@dataclass(slots=True)
class RecurrentLayer:
    native: _native.Recurrent
    width: int  # E
    state_shape: tuple[int, int, int]  # H, P, N
    input_width: int  # C + X
    alive: tuple[Tensor | None, ...]
    states: LayerStates | None = None  # the storage that `native_states` was made from
    native_states: _native.States | None = None


def recurrent_layer(weights: RecurrentWeights, fast_activations: bool = False) -> RecurrentLayer:
    width, values, heads = weights.output.shape[0], weights.heads * weights.head_dim, weights.heads
    conv_size = weights.conv.shape[1]
    vectors = {
        "norm": vector_of("norm", weights.norm, width),
        "out_norm": vector_of("out_norm", weights.out_norm, weights.head_dim if weights.delta else values),
        "decay": vector_of("decay", weights.decay, heads),
        "step_bias": vector_of("step_bias", weights.step_bias, heads),
        "skip": vector_of("skip", weights.skip, heads),
        "conv": vector_of("conv", weights.conv.T, weights.num_channels),  # [W, C]
        "conv_bias": vector_of("conv_bias", weights.conv_bias, weights.num_channels),
    }
    channels, controls, gate = in_one_order(weights.channels, weights.controls, weights.gate)
    native = _native.Recurrent(
        channels=matrix(channels, fast_activations),
        controls=matrix(controls, fast_activations),
        gate=matrix(gate, fast_activations),
        output=matrix(weights.output, fast_activations),
        heads=heads,
        key_heads=weights.key_heads,
        head_dim=weights.head_dim,
        state_dim=weights.state_dim,
        conv_size=conv_size,
        delta=weights.delta,
        eps=weights.eps,
        out_eps=weights.out_eps,
        **addresses(vectors),
    )
    shape = heads, weights.head_dim, weights.state_dim
    return RecurrentLayer(native, width, shape, weights.num_channels + weights.num_controls, tuple(vectors.values()))


def recurrent(x: Tensor, layer: RecurrentLayer, batch: Batch, states: LayerStates) -> None:
    step = native_batch(batch)
    _native.recurrent(layer.native, floats(x, step.tokens, layer.width), step, states_of(layer, states))


def copy_inputs(layers: Sequence[LayerStates], sources: Tensor, targets: Tensor) -> None:
    count = sources.shape[0]
    _native.copy_inputs(
        [native_states(layer) for layer in layers], integers(sources, count), integers(targets, count), count
    )


def states_of(layer: RecurrentLayer, states: LayerStates) -> _native.States:
    """Return the native view of a layer's states, built once."""
    if layer.states is not states or layer.native_states is None:
        shape, width = tuple(states.states.shape[1:]), states.inputs.shape[2]
        if shape != layer.state_shape or width != layer.input_width:
            raise ValueError(
                f"the storage holds states {list(shape)} and inputs of {width} numbers, but the layer has "
                f"{list(layer.state_shape)} and {layer.input_width}"
            )
        layer.native_states, layer.states = native_states(states), states
    return layer.native_states


def native_states(states: LayerStates) -> _native.States:
    slots, lines, width = states.inputs.shape
    return _native.States(
        states=address(states.states, FLOAT, slots, *states.states.shape[1:]),
        inputs=address(states.inputs, FLOAT),
        lengths=address(states.lengths, INTEGER, slots),
        slots=slots,
        lines=lines,
        size=states.states[0].numel(),
        width=width,
    )
