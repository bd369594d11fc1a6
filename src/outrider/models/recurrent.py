"""Build recurrent layers from the tensors of a checkpoint.

Letters as in kernels/recurrence.py: H heads of P values, G key heads of N keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UserError
from ..kernels import RecurrentWeights, Weight
from .config import ModelConfig, Recurrent
from .layers import WeightReader


def recurrent(config: ModelConfig, shape: Recurrent, reader: WeightReader, layer: int) -> RecurrentWeights:
    """Read the recurrent layer that takes the place of attention in a layer."""
    prefix = f"model.layers.{layer}."
    module = prefix + ("linear_attn." if shape.delta else "mamba.")
    channels, gate, controls = (_projections if shape.delta else _mamba_projections)(config, shape, reader, module)
    conv = reader.floats(module + "conv1d.weight", 2 * shape.keys + shape.values, 1, shape.conv_size).squeeze(1)
    bias = reader.vector(module + "conv1d.bias", len(conv)) if shape.conv_bias else None
    if not shape.delta:
        order = _mamba_order(shape).to(conv.device)
        conv, bias = conv[order], None if bias is None else bias[order]
    return RecurrentWeights(
        channels=reader.counted(reader.quantized(channels, fine=False)),
        controls=reader.counted(controls),  # never quantized: errors of decays add up in the state
        gate=reader.counted(reader.quantized(gate, fine=False)),
        output=reader.matrix(module + "out_proj.weight", config.width, shape.values),
        conv=conv,
        decay=_decay(reader, module, shape.heads),
        step_bias=reader.vector(module + "dt_bias", shape.heads),
        out_norm=reader.vector(module + "norm.weight", shape.head_dim if shape.delta else shape.values),
        heads=shape.heads,
        key_heads=shape.key_heads,
        head_dim=shape.head_dim,
        state_dim=shape.state_dim,
        delta=shape.delta,
        eps=config.stream_eps,
        out_eps=config.eps,
        norm=reader.norm(prefix + "input_layernorm.weight", config.width),
        conv_bias=bias,
        skip=None if shape.delta else reader.vector(module + "D", shape.heads),
    )


def _decay(reader: WeightReader, module: str, heads: int) -> Tensor:
    """Read the decay of each head: stored as it is in GGUF files, elsewhere as a logarithm."""
    if reader.has(module + "A"):
        return reader.vector(module + "A", heads)
    return -torch.exp(reader.vector(module + "A_log", heads))


def _mamba_order(shape: Recurrent) -> Tensor:
    """Return the channels of Mamba-2, which are values, keys and queries, in our order."""
    values, keys, queries = torch.split(
        torch.arange(2 * shape.keys + shape.values), [shape.values, shape.keys, shape.keys]
    )
    return torch.cat([queries, keys, values])


def _mamba_projections(
    config: ModelConfig, shape: Recurrent, reader: WeightReader, module: str
) -> tuple[Weight, Weight, Weight]:
    """Read the matrices of channels, gates and controls, which Mamba-2 has in one tensor: gates, channels, controls."""
    channels = 2 * shape.keys + shape.values
    fused = reader.stored(module + "in_proj.weight", shape.values + channels + shape.heads, config.width)
    gates, others, controls = torch.split(
        torch.arange(shape.values + channels + shape.heads), [shape.values, channels, shape.heads]
    )
    return _rows(fused, others[_mamba_order(shape)]), _rows(fused, gates), _rows(fused, controls)


def _projections(
    config: ModelConfig, shape: Recurrent, reader: WeightReader, module: str
) -> tuple[Weight, Weight, Weight]:
    """Read the matrices of channels, gates and controls: one each (Qwen3.5), or by key head in two (Qwen3-Next).

    GGUF files of Qwen3-Next have one each for channels and gates, and the controls by key head.
    """
    width, channels = config.width, 2 * shape.keys + shape.values
    controls = _controls(config, shape, reader, module)
    if not reader.has(module + "in_proj_qkvz.weight"):
        return (
            reader.stored(module + "in_proj_qkv.weight", channels, width),
            reader.stored(module + "in_proj_z.weight", shape.values, width),
            controls,
        )
    fused = reader.stored(module + "in_proj_qkvz.weight", channels + shape.values, width)
    values = shape.heads // shape.key_heads * shape.head_dim  # of a key head
    order = torch.arange(channels + shape.values).view(shape.key_heads, -1)  # [G, rows of a key head]
    query, key, value, gate = torch.split(order, [shape.state_dim, shape.state_dim, values, values], 1)
    return _rows(fused, query, key, value), _rows(fused, gate), controls


def _controls(config: ModelConfig, shape: Recurrent, reader: WeightReader, module: str) -> Weight:
    """Read the matrix of controls: all time steps, then all rates."""
    if reader.has(module + "in_proj_ba.weight"):
        both = reader.stored(module + "in_proj_ba.weight", 2 * shape.heads, config.width)
        rows = torch.arange(2 * shape.heads).view(shape.key_heads, -1)
        rate, step = torch.split(rows, shape.heads // shape.key_heads, 1)
        return _rows(both, step, rate)
    steps, rates = (reader.stored(f"{module}in_proj_{name}.weight", shape.heads, config.width) for name in ("a", "b"))
    if steps.kind != rates.kind:
        raise UserError(
            f"the tensors `{module}in_proj_a.weight` and `in_proj_b.weight` are stored as {steps.kind} and "
            f"{rates.kind}: expected one format"
        )
    return replace(steps, shape=(2 * shape.heads, config.width), data=torch.cat([steps.data, rates.data]))


def _rows(weight: Weight, *rows: Tensor) -> Weight:
    """Return these rows of a matrix, one part after the other."""
    chosen = torch.cat([part.flatten() for part in rows]).to(weight.data.device)
    return replace(weight, shape=(len(chosen), weight.shape[1]), data=weight.data[chosen])
