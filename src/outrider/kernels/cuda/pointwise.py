"""Row-wise and pointwise kernels: norms, embeddings, the gate of an MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import Activation
from .device import LAUNCH, release, rounded, wait
from .matrices import SUM_FACTOR, UNITS, Matrix
from .tables import looked_up

BLOCK = 1024  # elements per program of pointwise kernels
INT8, INT4, FP8 = tl.constexpr(UNITS["int8"]), tl.constexpr(UNITS["int4"]), tl.constexpr(UNITS["fp8"])
SUM: tl.constexpr = tl.constexpr(SUM_FACTOR)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)  # [T, E]
    _norm(x.contiguous(), weight, out, eps, False)
    return out


def add_normed(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> None:
    """Add rms_norm(y) to x, both [T, E] f32."""
    _norm(y, weight, x, eps, True)


def norm_columns(x: Tensor, begin: int, weight: Tensor, eps: float) -> None:
    """Replace columns begin .. begin + len(weight) - 1 of x [T, N] f32 by their rms_norm, in place."""
    part = x[:, begin : begin + weight.shape[0]]
    _norm(part, weight, part, eps, False)


def soft_cap(x: Tensor, cap: float) -> None:
    count = x.numel()
    if count:
        _cap[(triton.cdiv(count, BLOCK),)](x, count, cap, block=BLOCK, **LAUNCH)


def embed(table: Matrix, tokens: Tensor, scale: float) -> Tensor:
    """Return rows of the table; ids outside it, which only padding has, are clamped."""
    count, columns = tokens.shape[0], table.shape[1]
    out = torch.empty(count, columns, device=tokens.device)  # [T, E]
    if count:
        _embed_row[(count, triton.cdiv(columns, BLOCK))](
            tokens,
            table.data,
            table.scales,
            table.channel,
            out,
            table.shape[0],
            columns,
            table.data.shape[1],
            0 if table.scales is None else table.scales.stride(0),
            scale,
            kind=table.kind,
            span=table.span,
            groups=table.groups,
            paired=table.paired,
            table=table.table,
            block=BLOCK,
            **LAUNCH,
        )
    return out


def gate(both: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, activation: Activation) -> Tensor:
    """Return activation(gate) * up: [T, N], of both [T, 2 * N], gate before up."""
    tokens, width = both.shape[0], both.shape[1] // 2
    out = torch.empty(tokens, width, dtype=both.dtype, device=both.device)  # [T, N]
    if tokens:
        grid = (tokens, triton.cdiv(width, BLOCK))
        _gate_row[grid](both, gate_bias, up_bias, out, width, activation=activation, block=BLOCK)
    return out


def _norm(x: Tensor, weight: Tensor, out: Tensor, eps: float, add: bool) -> None:
    tokens, width = x.shape
    block = triton.next_power_of_2(width)
    warps = min(max(block // 256, 1), 16)
    if tokens:
        _norm_row[(tokens,)](x, weight, out, width, x.stride(0), eps, add=add, block=block, num_warps=warps, **LAUNCH)


@triton.jit
def _norm_row(x, weight, out, width, stride, eps, add: tl.constexpr, block: tl.constexpr):
    """Normalize one row. x and out have the same stride between rows."""
    first = tl.program_id(0).to(tl.int64) * stride
    column = tl.arange(0, block)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0)  # no kernel writes it
    release()  # a matmul that follows loads its first weights meanwhile
    wait(release=False)
    value = tl.load(x + first + column, mask=inside, other=0).to(tl.float32)
    if add:
        residual = tl.load(out + first + column, mask=inside, other=0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    value *= factor
    if add:
        value += residual
    tl.store(out + first + column, rounded(value, out.dtype.element_ty), mask=inside)


@triton.jit
def _cap(x, count, cap, block: tl.constexpr):
    wait()
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + index, mask=index < count, other=0)
    tl.store(x + index, capped(value, cap), mask=index < count)


@triton.jit
def capped(value, cap):
    """Return cap * tanh(value / cap)."""
    return cap * (2 * tl.sigmoid(2 * value / cap) - 1)


@triton.jit
def _embed_row(
    tokens,  # [T] int32: row ids
    data,
    scales,
    channel,
    out,
    count,  # rows of the table
    columns,
    stride,  # elements of a row of `data`
    scale_stride,  # entries of a chunk of all rows
    factor,
    kind: tl.constexpr,
    span: tl.constexpr,
    groups: tl.constexpr,
    paired: tl.constexpr,
    table: tl.constexpr,
    block: tl.constexpr,
):
    wait()
    row = tl.program_id(0).to(tl.int64)
    line = tl.minimum(tl.maximum(tl.load(tokens + row), 0), count - 1).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    if kind == "float":
        value = tl.load(data + line * stride + column, mask=inside, other=0).to(tl.float32)
    else:
        per: tl.constexpr = 4 if kind == "int4" else 2  # weights of a word
        offset = column // (per * span) * span + column % span
        word = tl.load(data + line * stride + offset, mask=inside, other=0).to(tl.int32)
        bits = word >> (column // span % per * (16 // per))
        if table != "":
            value = looked_up(bits & 15, table)
        elif kind == "int4":
            index = column // span % per
            magnitude = (word >> 4 * (index ^ 1) & 7).to(tl.float32) + 0.5
            value = tl.where((word >> 15 - 4 * index & 1) != 0, -magnitude, magnitude) * (INT4 * SUM)
        elif kind == "int8":
            value = ((bits & 255) - 128).to(tl.float32) * INT8
        else:
            value = e4m3_number(word, column // span % per) * (1 / FP8 if channel is not None else SUM)
        if scales is not None:
            chunk: tl.constexpr = per * span
            at = (column // chunk).to(tl.int64) * scale_stride + line * groups + column % chunk // (chunk // groups)
            entry = tl.load(scales + at, mask=inside, other=0)
            if scales.dtype.element_ty == tl.int32:
                value *= (entry << 16).to(tl.float32, bitcast=True)
            else:
                value *= entry.to(tl.float32)
            if paired:
                minimum = (entry & -0x10000).to(tl.float32, bitcast=True)
                value += minimum * SUM if kind == "int4" else minimum
        if channel is not None:
            value *= tl.load(channel + line)
    tl.store(out + row * columns + column, rounded(value * factor, out.dtype.element_ty), mask=inside)


@triton.jit
def e4m3_number(word, index):
    """Return the number of a field of fp8 words as fp32, times UNITS["fp8"]; see matrices.py."""
    bits = word >> 8 * index
    return ((bits & 0x80) << 24 | (bits & 0x7F) << 20).to(tl.float32, bitcast=True)


@triton.jit
def _gate_row(both, gate_bias, up_bias, out, width, activation: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gated = tl.load(both + row * 2 * width + column, mask=inside, other=0).to(tl.float32)
    up = tl.load(both + (row * 2 + 1) * width + column, mask=inside, other=0).to(tl.float32)
    value = biased_gate(gated, up, gate_bias, up_bias, column, inside, activation)
    tl.store(out + row * width + column, rounded(value, out.dtype.element_ty), mask=inside)


@triton.jit
def biased_gate(gate, up, gate_bias, up_bias, column, inside, activation: tl.constexpr):
    """Return activation(gate + gate_bias) * (up + up_bias) for these columns; a bias may be None."""
    if gate_bias is not None:
        gate += tl.load(gate_bias + column, mask=inside, other=0)
    if up_bias is not None:
        up += tl.load(up_bias + column, mask=inside, other=0)
    return apply_gate(gate, up, activation)


@triton.jit
def apply_gate(gate, up, activation: tl.constexpr):
    """Return activation(gate) * up."""
    inner = gate
    if activation == "gelu_tanh":  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    elif activation == "swiglu_oai":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        inner = 1.702 * gate
    return gate * tl.sigmoid(inner) * up
