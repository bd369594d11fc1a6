"""Matmuls of many rows with FP8 weights, on the tensor cores for e4m3, by cuBLAS.

The tensor cores multiply e4m3 numbers in half the time that bf16 takes, and the weights need not be unpacked. Two e4m3
numbers, of 4 significant bits each, represent the 8 bits of a bf16 exactly, if it is scaled by a power of two for its
row. Bits are lost only below 2^-13 of the largest number of the row. With `activations=fast` an activation is rounded
to one e4m3 number and gate and up to bf16, whatever the number of rows is. Sums of e4m3 numbers have about 14 bits.

The terms of a row are lines of the left factor, with columns in the order of the words (matrices.py). cuBLAS multiplies
the lines without scales, because its kernels with a scale for each row are slower. The kernel that follows adds the
sums of the terms and applies the scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import Activation
from .device import INTERPRETED, LAUNCH, release, rounded, wait
from .matrices import ALIGNMENT, Matrix
from .pointwise import BLOCK, biased_gate

# Rows between which two terms are fastest: on an H200 for 1.5B, 8B and 14B (512 and 1,024 were measured, 768 was not).
# With fewer the fused kernel unpacks each weight once; with more, dequantized weights are multiplied once, not twice.
FEWEST_ROWS, MOST_ROWS = 33, 768
LEAST = tl.constexpr(2.0**-100)  # largest number of a row, so that no scale is 0
LOW = tl.constexpr(2.0**-4)  # the second term is stored times 16: the first leaves at most 1/16 of the number


class Unscaled(NamedTuple):
    """Argument of kernels: the result of a matmul before terms are added and scales applied."""

    lines: Tensor  # [T * terms, N]: the terms of a row are neighbours
    row_scales: Tensor  # [T] f32
    channel_scales: Tensor  # [N] f32


def is_faster(matrix: Matrix, tokens: int) -> bool:
    """Return whether `multiply` is faster than the fused kernel, and than cuBLAS with dequantized weights."""
    readable = matrix.terms > 0 and matrix.shape[0] % ALIGNMENT == 0  # by cuBLAS
    if not readable or matrix.batch_invariant or tokens < FEWEST_ROWS:
        return False
    return matrix.terms == 1 or tokens <= MOST_ROWS


def multiply(x: Tensor, matrix: Matrix, norm: Tensor | None, eps: float, dtype: torch.dtype) -> Unscaled:
    """Multiply x [T, K], or its rms_norm, with `matrix`; dtype: of the lines."""
    tokens, width = x.shape
    padded = matrix.data.shape[1] * 2
    states = torch.empty(tokens * matrix.terms, padded, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tokens, device=x.device)
    _launch_rows(x, norm, states, scales, width, padded, eps, matrix.terms, matrix.span)
    assert matrix.channel is not None
    return Unscaled(_cublas(states, matrix.data.view(torch.float8_e4m3fn), matrix.one, dtype), scales, matrix.channel)


def rounded_rows(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """Return x [T, K], or its rms_norm, as `multiply` rounds it to one term: bf16."""
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    _launch_rows(x, norm, out, None, x.shape[1], x.shape[1], eps, 1, 1)
    return out


def write(found: Unscaled, bias: Tensor | None, out: Tensor, add: bool) -> None:
    """Write the result, plus bias, to `out` [T, N], or add it there."""
    tokens, width = out.shape
    grid = (tokens, triton.cdiv(width, BLOCK))
    terms = found.lines.shape[0] // tokens
    write_row[grid](found, bias, out, width, terms=terms, add=add, block=BLOCK, **LAUNCH)


def gate(
    both: Unscaled, deltas: Tensor | None, gate_bias: Tensor | None, up_bias: Tensor | None, activation: Activation
) -> Tensor:
    """Return activation(gate) * up: [T, N], of results [T, 2 * N], gate before up; deltas as in Biases."""
    tokens, width = both.row_scales.shape[0], both.lines.shape[1] // 2
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device=both.lines.device)  # [T, N]
    grid = (tokens, triton.cdiv(width, BLOCK))
    terms = both.lines.shape[0] // tokens
    gate_row[grid](
        both, deltas, gate_bias, up_bias, out, width, terms=terms, activation=activation, block=BLOCK, **LAUNCH
    )
    return out


def _cublas(lines: Tensor, weights: Tensor, one: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply lines [L, padded K] with weights [N, padded K]: [L, N]."""
    if INTERPRETED:
        return (lines.float() @ weights.float().T).to(dtype)
    return torch._scaled_mm(lines, weights.T, one, one, out_dtype=dtype)


def _launch_rows(
    x: Tensor,
    norm: Tensor | None,
    out: Tensor,
    scales: Tensor | None,
    width: int,
    padded: int,
    eps: float,
    terms: int,
    span: int,
) -> None:
    block = triton.next_power_of_2(padded)
    warps = min(max(block // 512, 1), 16)
    if x.shape[0]:
        split_row[(x.shape[0],)](
            x.contiguous(), norm, out, scales, width, padded, eps, terms=terms, span=span, block=block,
            num_warps=warps, **LAUNCH,
        )  # fmt: skip


@triton.jit
def split_row(
    x,  # [T, width]
    norm,  # [width] f32, or None
    out,  # [T * terms, padded] e4m3, or [T, width] bf16
    scales,  # [T] f32; None: `out` is bf16, and scaled
    width,
    padded,
    eps,
    terms: tl.constexpr,
    span: tl.constexpr,
    block: tl.constexpr,
):
    """Split one row into terms. Columns c and c + span of each 2 * span become neighbours; span 1: in their order."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, block)
    column = index // (2 * span) * (2 * span) + index % 2 * span + index % (2 * span) // 2
    inside = column < width
    factor = 1.0
    if norm is not None:
        factor = tl.load(norm + column, mask=inside, other=0)  # no kernel writes it
    release()  # as norms do: see device.py
    wait(release=False)
    value = tl.load(x + row * width + column, mask=inside, other=0).to(tl.float32)
    if norm is not None:
        value *= tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        value *= factor
    largest = tl.maximum(tl.max(tl.abs(value), 0), LEAST)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    value *= 128 / power  # less than 256
    high = rounded(value, tl.float8e4nv)
    if scales is None:
        tl.store(out + row * width + column, rounded(high.to(tl.float32) * (power / 128), tl.bfloat16), mask=inside)
    else:
        line = out + row * terms * padded
        tl.store(line + index, high, mask=index < padded)
        if terms == 2:
            low = rounded((value - high.to(tl.float32)) / LOW, tl.float8e4nv)
            tl.store(line + padded + index, low, mask=index < padded)
        tl.store(scales + row, power / 128)


@triton.jit
def _scaled(found, row, column, inside, width, terms: tl.constexpr):
    """Return numbers of one row of the result, fp32."""
    line = found.lines + row * terms * width
    value = tl.load(line + column, mask=inside, other=0).to(tl.float32)
    if terms == 2:
        value += LOW * tl.load(line + width + column, mask=inside, other=0).to(tl.float32)
    return value * (tl.load(found.row_scales + row) * tl.load(found.channel_scales + column, mask=inside, other=0))


@triton.jit
def write_row(found, bias, out, width, terms: tl.constexpr, add: tl.constexpr, block: tl.constexpr):
    wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    value = _scaled(found, row, column, inside, width, terms)
    if bias is not None:
        value += tl.load(bias + column, mask=inside, other=0)
    if add:
        value += tl.load(out + row * width + column, mask=inside, other=0)
    tl.store(out + row * width + column, rounded(value, out.dtype.element_ty), mask=inside)


@triton.jit
def gate_row(
    both, deltas, gate_bias, up_bias, out, width, terms: tl.constexpr, activation: tl.constexpr, block: tl.constexpr
):
    wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gated = _scaled(both, row, column, inside, 2 * width, terms)
    up = _scaled(both, row, width + column, inside, 2 * width, terms)
    if deltas is not None:
        gated += tl.load(deltas + row * 2 * width + column, mask=inside, other=0)
        up += tl.load(deltas + (row * 2 + 1) * width + column, mask=inside, other=0)
    value = biased_gate(gated, up, gate_bias, up_bias, column, inside, activation)
    tl.store(out + row * width + column, rounded(value, tl.bfloat16), mask=inside)
