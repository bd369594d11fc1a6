"""Recurrent layers: one program for a few rows of a head's state, which reads all tokens of a row in order.

A program convolves the channels that it needs for itself. It keeps no states of a tree's nodes: each node begins at the
stored state and reads its ancestors again, which are few. Letters as in ../recurrence.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..recurrence import UNIT_EPS, LayerStates, RecurrentWeights
from ..structures import Batch
from .device import INTERPRETED, loop_bound, on_device
from .matmul import matmul
from .matrices import Matrix, matrix

VALUES = 32  # rows of a head's state in a program: 4096 numbers with 128 keys, 32 registers of each thread
LINE_BLOCK = 1024  # numbers of a line that a program copies


class StateTensors(NamedTuple):
    """Argument of the kernels: LayerStates, and Batch.states."""

    states: Tensor
    inputs: Tensor
    lengths: Tensor
    rows: Tensor  # [B, 3] int32


class StepTensors(NamedTuple):
    """Argument of the kernels: tokens of a step, and their projections."""

    positions: Tensor  # [T] int32
    starts: Tensor  # [B + 1] int32
    parents: Tensor | None  # [T] int32
    channels: Tensor  # [T, C] f32
    controls: Tensor  # [T, X] f32


class LayerVectors(NamedTuple):
    """Argument of the kernels: small weights."""

    conv: Tensor  # [C, W] f32
    conv_bias: Tensor | None  # [C] f32
    decay: Tensor  # [H] f32
    step_bias: Tensor  # [H] f32
    skip: Tensor | None  # [H] f32


class Sizes(NamedTuple):
    """Argument of the kernels, known when they are compiled."""

    heads: int
    key_heads: int
    head_dim: int
    state_dim: int
    conv_size: int
    lines: int
    delta: bool
    eps: float  # UNIT_EPS
    keys: int  # block of N: a power of 2
    values: int  # block of P
    channels: int  # C
    controls: int  # X


@dataclass(frozen=True)
class RecurrentLayer:
    channels: Matrix  # [C, E]
    controls: Matrix  # [X, E]
    gate: Matrix  # [H * P, E]
    output: Matrix  # [E, H * P]
    vectors: LayerVectors
    out_norm: Tensor  # [P] or [H * P] f32
    norm: Tensor | None  # [E] f32
    heads: int
    key_heads: int
    head_dim: int
    state_dim: int
    delta: bool
    eps: float
    out_eps: float


def recurrent_layer(weights: RecurrentWeights, *, batch_invariant: bool = False) -> RecurrentLayer:
    def vector(values: Tensor) -> Tensor:
        found = on_device(values)
        assert found is not None
        return found

    def pack(weight: Any) -> Matrix:
        return matrix(weight, batch_invariant=batch_invariant)

    return RecurrentLayer(
        channels=pack(weights.channels),
        controls=pack(weights.controls),
        gate=pack(weights.gate),
        output=pack(weights.output),
        vectors=LayerVectors(
            vector(weights.conv),
            on_device(weights.conv_bias),
            vector(weights.decay),
            vector(weights.step_bias),
            on_device(weights.skip),
        ),
        out_norm=vector(weights.out_norm),
        norm=on_device(weights.norm),
        heads=weights.heads,
        key_heads=weights.key_heads,
        head_dim=weights.head_dim,
        state_dim=weights.state_dim,
        delta=weights.delta,
        eps=weights.eps,
        out_eps=weights.out_eps,
    )


def recurrent(x: Tensor, layer: RecurrentLayer, batch: Batch, states: LayerStates) -> None:
    if batch.states is None:
        raise ValueError("a recurrent layer needs the slots of its states: the batch has no `states`")
    tokens, rows, values = x.shape[0], batch.states.shape[0], layer.heads * layer.head_dim
    if tokens == 0:
        return
    channels, controls, gate = (
        matmul(x, part, norm=layer.norm, eps=layer.eps) for part in (layer.channels, layer.controls, layer.gate)
    )
    step = StepTensors(batch.positions, batch.query_starts, batch.parents, channels, controls)
    kept = StateTensors(states.states, states.inputs, states.lengths, batch.states)
    lines, width = states.inputs.shape[1:]
    block = triton.next_power_of_2(layer.head_dim)
    sizes = Sizes(
        layer.heads,
        layer.key_heads,
        layer.head_dim,
        layer.state_dim,
        layer.vectors.conv.shape[1],
        lines,
        layer.delta,
        UNIT_EPS,
        triton.next_power_of_2(layer.state_dim),
        block if INTERPRETED else min(block, VALUES),
        channels.shape[1],
        controls.shape[1],
    )
    mixed = torch.zeros(tokens, values, device=x.device)  # [T, H * P]
    blocks = triton.cdiv(layer.head_dim, sizes.values)
    run_states[(rows, layer.heads, blocks)](step, kept, layer.vectors, mixed, sizes=sizes)
    pieces = triton.cdiv(width, LINE_BLOCK)
    keep_inputs[(rows, pieces)](step, kept, width, sizes=sizes, block=LINE_BLOCK)
    out = torch.empty(tokens, values, dtype=layer.output.compute, device=x.device)
    parts = layer.heads if layer.delta else layer.key_heads
    size = values // parts
    gate_and_norm[(tokens, parts)](
        mixed, gate, layer.out_norm, out, layer.out_eps, size, layer.delta, block=triton.next_power_of_2(size)
    )
    matmul(out, layer.output, add=x)


def copy_inputs(layers: Sequence[LayerStates], sources: Tensor, targets: Tensor) -> None:
    for layer in layers:
        width = layer.inputs.shape[2]
        copy_lines[(triton.cdiv(width, LINE_BLOCK),)](
            layer.inputs, sources, targets, sources.shape[0], width, block=LINE_BLOCK
        )


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def ancestor(parents, token, steps):
    """Return the ancestor of a token that is `steps` above it."""
    for _ in range(loop_bound(steps)):
        token = tl.load(parents + token)
    return token


@triton.jit
def convolve(step, line, vectors, token, position, begin, start, channel, mask, sizes: tl.constexpr):
    """Return channels [n] of a token after the convolution and silu; token < begin: of a position before the row.

    line: [R, C + X], the inputs that an earlier step kept.
    """
    count: tl.constexpr = sizes.channels
    width: tl.constexpr = count + sizes.controls
    size: tl.constexpr = sizes.conv_size
    total = tl.zeros(channel.shape, tl.float32)
    if vectors.conv_bias is not None:
        total += tl.load(vectors.conv_bias + channel, mask=mask, other=0.0)
    for back in tl.static_range(size):
        weight = tl.load(vectors.conv + channel * size + (size - 1 - back), mask=mask, other=0.0)
        own = token >= begin
        from_step = tl.load(step.channels + token.to(tl.int64) * count + channel, mask=mask & own, other=0.0)
        from_line = tl.load(
            line + (position % sizes.lines).to(tl.int64) * width + channel,
            mask=mask & (token < begin) & (position >= 0),
            other=0.0,
        )
        total += weight * (from_step + from_line)
        before = token - 1
        if step.parents is not None:
            before = tl.load(step.parents + token, mask=own, other=-1)
        position = tl.where(own & (before < begin), start - 1, position - 1)
        token = tl.where(own, tl.where(before < begin, begin - 1, before), token)
    return silu(total)


@triton.jit
def unit(x, length, eps: tl.constexpr):
    return x * (length / tl.sqrt(tl.sum(x * x) + eps))


@triton.jit
def read_token(state, step, line, vectors, token, position, begin, start, head, value, sizes: tl.constexpr):
    """Return the state [values, keys] after a token, and its output [values]; arguments as in `convolve`."""
    key_width: tl.constexpr = sizes.key_heads * sizes.state_dim
    count: tl.constexpr = sizes.channels
    width: tl.constexpr = count + sizes.controls
    lane = tl.arange(0, sizes.keys)
    key_head = head // (sizes.heads // sizes.key_heads)
    is_key, is_value = lane < sizes.state_dim, value < sizes.head_dim
    at = key_head * sizes.state_dim + lane
    query = convolve(step, line, vectors, token, position, begin, start, at, is_key, sizes)
    key = convolve(step, line, vectors, token, position, begin, start, key_width + at, is_key, sizes)
    channel = 2 * key_width + head * sizes.head_dim + value
    v = convolve(step, line, vectors, token, position, begin, start, channel, is_value, sizes)
    query, key, v = tl.where(is_key, query, 0.0), tl.where(is_key, key, 0.0), tl.where(is_value, v, 0.0)
    controls: tl.constexpr = sizes.controls
    own = token >= begin
    from_step = step.controls + token.to(tl.int64) * controls + head
    from_line = line + (position % sizes.lines).to(tl.int64) * width + count + head
    raw = tl.load(from_step, mask=own, other=0.0) + tl.load(from_line, mask=token < begin, other=0.0)
    raw += tl.load(vectors.step_bias + head)
    time = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    state = state * tl.exp(tl.load(vectors.decay + head) * time)
    if sizes.delta:
        eps: tl.constexpr = sizes.eps
        query = unit(query, sizes.state_dim**-0.5, eps)
        key = unit(key, 1.0, eps)
        more = tl.load(from_step + sizes.heads, mask=own, other=0.0)
        more += tl.load(from_line + sizes.heads, mask=token < begin, other=0.0)
        rate = 1.0 / (1.0 + tl.exp(-more))
        known = tl.sum(state * key[None, :], 1)
        state += ((v - known) * rate)[:, None] * key[None, :]
    else:
        state += (v * time)[:, None] * key[None, :]
    out = tl.sum(state * query[None, :], 1)
    if vectors.skip is not None:
        out += tl.load(vectors.skip + head) * v
    return state, out


@triton.jit
def run_states(step, kept, vectors, mixed, sizes: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    value = tl.program_id(2) * sizes.values + tl.arange(0, sizes.values)
    lane = tl.arange(0, sizes.keys)
    width: tl.constexpr = sizes.channels + sizes.controls
    begin, end = tl.load(step.starts + row), tl.load(step.starts + row + 1)
    if begin == end:
        return
    source = tl.load(kept.rows + row * 3).to(tl.int64)
    target = tl.load(kept.rows + row * 3 + 1).to(tl.int64)
    read = tl.load(kept.rows + row * 3 + 2)
    start = tl.load(step.positions + begin)
    length = tl.where(start > 0, tl.load(kept.lengths + source), 0)
    line = kept.inputs + source * sizes.lines * width
    at = (head * sizes.head_dim + value)[:, None] * sizes.state_dim + lane[None, :]
    mask = (value < sizes.head_dim)[:, None] & (lane < sizes.state_dim)[None, :]
    size: tl.constexpr = sizes.heads * sizes.head_dim * sizes.state_dim
    state = tl.load(kept.states + source * size + at, mask=mask & (start > 0), other=0.0)
    for position in range(loop_bound(length), loop_bound(start)):
        state, _ = read_token(
            state, step, line, vectors, begin - 1, start * 0 + position, begin, start, head, value, sizes
        )
    out_at = mixed + head * sizes.head_dim + value
    stride: tl.constexpr = sizes.heads * sizes.head_dim
    block: tl.constexpr = sizes.values
    is_value = value < sizes.head_dim
    for index in range(loop_bound(read)):
        token = begin + index
        state, out = read_token(state, step, line, vectors, token, start - 1, begin, start, head, value, sizes)
        tl.store(out_at + token.to(tl.int64) * stride, out, mask=is_value)
    tl.store(kept.states + target * size + at, state, mask=mask)
    for index in range(loop_bound(read), loop_bound(end - begin)):
        token = begin + index
        if step.parents is None:
            state, out = read_token(state, step, line, vectors, token, start - 1, begin, start, head, value, sizes)
            tl.store(out_at + token.to(tl.int64) * stride, out, mask=is_value)
        else:
            node = state
            out = tl.zeros([block], tl.float32)
            depth = tl.load(step.positions + token) - start - read  # below the tokens that the stored state has read
            for above in range(loop_bound(depth + 1)):
                each = ancestor(step.parents, token, depth - above)
                node, out = read_token(node, step, line, vectors, each, start - 1, begin, start, head, value, sizes)
            tl.store(out_at + token.to(tl.int64) * stride, out, mask=is_value)


@triton.jit
def keep_inputs(step, kept, width, sizes: tl.constexpr, block: tl.constexpr):
    """Keep the inputs that the next step may need, and the length of the state."""
    row = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    count: tl.constexpr = sizes.channels
    controls: tl.constexpr = sizes.controls
    begin, end = tl.load(step.starts + row), tl.load(step.starts + row + 1)
    if begin == end:
        return
    source = tl.load(kept.rows + row * 3).to(tl.int64)
    target = tl.load(kept.rows + row * 3 + 1).to(tl.int64)
    read = tl.load(kept.rows + row * 3 + 2)
    start = tl.load(step.positions + begin)
    if source != target:
        for position in range(loop_bound(tl.maximum(start + read - sizes.conv_size + 1, 0)), loop_bound(start)):
            line = position % sizes.lines
            found = tl.load(kept.inputs + (source * sizes.lines + line) * width + column, mask=column < width)
            tl.store(kept.inputs + (target * sizes.lines + line) * width + column, found, mask=column < width)
    is_channel = column < count
    for index in range(loop_bound(tl.maximum(read - sizes.conv_size + 1, 0)), loop_bound(end - begin)):
        token = (begin + index).to(tl.int64)
        channel = tl.load(step.channels + token * count + column, mask=is_channel, other=0.0)
        control = tl.load(
            step.controls + token * controls + column - count, mask=(column >= count) & (column < width), other=0.0
        )
        line = (start + index) % sizes.lines
        tl.store(kept.inputs + (target * sizes.lines + line) * width + column, channel + control, mask=column < width)
    if tl.program_id(1) == 0:
        tl.store(kept.lengths + target, start + read)


@triton.jit
def gate_and_norm(mixed, gate, norm, out, eps, size, delta: tl.constexpr, block: tl.constexpr):
    """Norm a head and gate it, or (without the delta rule) gate the heads that share keys and norm them together."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, block)
    mask = lane < size
    at = (token * tl.num_programs(1) + part) * size + lane
    x = tl.load(mixed + at, mask=mask, other=0.0)
    g = silu(tl.load(gate + at, mask=mask, other=0.0))
    if not delta:
        x = x * g
    weights = norm + lane if delta else norm + part * size + lane
    x = x / tl.sqrt(tl.sum(x * x) / size + eps) * tl.load(weights, mask=mask, other=0.0)
    if delta:
        x = x * g
    tl.store(out + at, x.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["sources", "targets"])
def copy_lines(inputs, sources, targets, count, width, block: tl.constexpr):
    column = tl.program_id(0) * block + tl.arange(0, block)
    for index in range(loop_bound(count)):
        source = tl.load(sources + index).to(tl.int64)
        target = tl.load(targets + index).to(tl.int64)
        found = tl.load(inputs + source * width + column, mask=column < width)
        tl.store(inputs + target * width + column, found, mask=column < width)
