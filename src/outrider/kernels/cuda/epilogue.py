"""What the kernels for float and for quantized matrices share: tilings, arguments, and the end of a matmul."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import multiply, rounded, shared_memory
from .matrices import PER_WORD, Matrix
from .pointwise import apply_gate

ROWS = 16  # rows of activations per program: one tensor-core tile, so that 1 and 16 rows cost the same
EARLY: tl.constexpr = tl.constexpr(16)  # rows per program up to which all parts load the residual


@dataclass(frozen=True)
class Tiling:
    outputs: int  # per program
    columns: int  # per iteration of its loop
    warps: int
    stages: int  # software-pipelining stages
    rows: int = ROWS  # of activations per program
    parts: int = 1  # split-k factor, for matrices with too few outputs to fill the GPU
    slices: int = 1  # column slices of an iteration, one for each warp; 1: warps share the outputs


class Biases(NamedTuple):
    """Argument of a kernel: [outputs] f32 each, or None. `up` is used by a gated matmul alone, after its gate."""

    first: Tensor | None
    up: Tensor | None
    deltas: Tensor | None = None  # [rows, 2 * outputs] f32, gate first: added to each row of a gated matmul


class SplitK(NamedTuple):
    """Argument of a kernel: memory of split-k; None without."""

    scratch: Tensor | None  # [programs, numbers of a program] f32
    counters: Tensor | None  # [tiles] int32, all 0 before and after


def fitting_stages(tile: Tiling, matrix: Matrix, states: torch.dtype, gated: bool) -> int:
    """Return the stages of a tiling, or fewer if the shared memory of the GPU is too small for them.

    Each stage but the last has a buffer for what an iteration reads: `tile.columns` of the states, of dtype `states`,
    and of the matrix. The number of stages changes no result.
    """
    buffer = tile.columns * tile.rows * states.itemsize  # bytes
    if matrix.kind == "float":
        line = tile.columns * matrix.data.element_size()  # bytes of a row of the matrix
        buffer += tile.columns * torch.float32.itemsize  # of a norm weight
    else:
        line = tile.columns // PER_WORD[matrix.kind] * matrix.data.element_size()
        if matrix.scales is not None:
            line += tile.columns // matrix.chunk * matrix.groups * matrix.scales.element_size()
    buffer += line * tile.outputs * (2 if gated else 1)
    return min(tile.stages, 1 + shared_memory() // buffer)


@triton.jit
def lines_of(index, outputs, output_block: tl.constexpr, activation: tl.constexpr):
    """Return the rows of the matrix that tile `index` multiplies, int64. Of a gated matmul: gate, then up.

    Programs at the edge read the last row again, so that loads need no row mask.
    """
    halves: tl.constexpr = 1 if activation is None else 2
    line = tl.arange(0, halves * output_block)
    own = tl.minimum(index * output_block + line % output_block, outputs - 1).to(tl.int64)
    return own + line // output_block * outputs


@triton.jit
def zeros(outputs: tl.constexpr, rows: tl.constexpr, slices: tl.constexpr):
    """Return the sums before the first `add_matmul`."""
    return tl.zeros([outputs, rows], tl.float32) if slices == 1 else tl.zeros([slices, outputs, rows], tl.float32)


@triton.jit
def add_matmul(left, right, total, slices: tl.constexpr):
    """Return total + left [outputs, columns] @ right [columns, rows]: [outputs, rows], or one per slice."""
    if slices > 1:
        outputs: tl.constexpr = left.shape[0]
        span: tl.constexpr = left.shape[1] // slices
        left = tl.permute(tl.reshape(left, [outputs, slices, span]), (1, 0, 2))
        right = tl.reshape(right, [slices, span, right.shape[1]])
    return multiply(left, right, total)


@triton.jit
def read_addends(biases, out, row, output, rows, outputs, activation: tl.constexpr, add: tl.constexpr):
    """Load what `finish` adds: biases [output_block, 1], residual [output_block, row_block]; zeros if there are none.

    Kernels call it before they add the parts of split-k, which hides the latency. With many rows `finish` loads the
    residual, because each part would load all of it.
    """
    bias = _read_bias(biases.first, output, outputs)
    up_bias = bias
    if activation is not None:
        up_bias = _read_bias(biases.up, output, outputs)
    residual = tl.zeros([output.shape[0], row.shape[0]], tl.float32)
    if add and row.shape[0] <= EARLY:
        residual = _read_residual(out, row, output, rows, outputs)
    return bias, up_bias, residual


@triton.jit
def finish(
    total,  # [output_block, row_block]; of a gated matmul [2 * output_block, row_block]: gate above up
    addends,
    deltas,
    out,
    row,
    output,
    rows,
    outputs,
    activation: tl.constexpr,
    add: tl.constexpr,
):
    """Apply bias, gate and residual to the sums, and store them."""
    bias, up_bias, residual = addends
    other_total = total
    if activation is not None:
        both = tl.reshape(total, [2, output.shape[0], row.shape[0]])
        total, other_total = tl.split(tl.permute(both, (1, 2, 0)))
    total += bias
    kept = (row < rows)[None, :] & (output < outputs)[:, None]
    if activation is not None:
        other_total += up_bias
        if deltas is not None:
            at = deltas + row.to(tl.int64)[None, :] * (2 * outputs) + output[:, None]
            total += tl.load(at, mask=kept, other=0)
            other_total += tl.load(at + outputs, mask=kept, other=0)
        total = apply_gate(total, other_total, activation)
    if add and row.shape[0] > EARLY:
        residual = _read_residual(out, row, output, rows, outputs)
    total += residual
    target = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(target, rounded(total, out.dtype.element_ty), mask=kept)


@triton.jit
def _read_residual(out, row, output, rows, outputs):
    kept = (row < rows)[None, :] & (output < outputs)[:, None]
    return tl.load(out + row.to(tl.int64)[None, :] * outputs + output[:, None], mask=kept, other=0)


@triton.jit
def _read_bias(bias, output, outputs):
    value = tl.zeros([output.shape[0], 1], tl.float32)
    if bias is not None:
        value = tl.load(bias + output, mask=output < outputs, other=0)[:, None]
    return value
