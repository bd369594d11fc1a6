"""Matmuls of activations [T, K] with a matrix [N, K]: one fused kernel for few rows, cuBLAS for many.

The kernel for float matrices multiplies [outputs, columns] of the matrix with [columns, rows], accumulating in fp32.
The matrix is the left factor, so that the long side of the tensor-core tile runs along its rows. Fused: RMS norm (its
weight when x is read, its scale after the loop), bias, the gate of an MLP, the residual. The first weights of a program
are loaded before it waits for the kernel that computes x. With more than 16 rows the norm is a kernel of its own, and
with more than 32 cuBLAS is as fast, unless there is a gate to fuse. A batch-invariant matrix always takes the fused
kernel, 16 rows at a time: its sums have one order for any T. Its tiling depends on the shape of the matrix alone.
Quantized matrices: see quantized_matmul.py; of FP8 with many rows: e4m3_matmul.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import Activation
from . import e4m3_matmul, quantized_matmul
from .device import INTERPRETED, LAUNCH, after_wait, loop_bound, rounded, wait
from .epilogue import ROWS, Biases, SplitK, Tiling, add_matmul, finish, fitting_stages, lines_of, read_addends, zeros
from .matrices import Matrix
from .pointwise import gate, rms_norm

EXPANDED_ROWS = 384  # rows of activations above which a quantized matrix is dequantized for cuBLAS: measured on an H200
EXPANDED = 1 << 26  # weights that are dequantized at a time
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Operation(NamedTuple):
    """Constants of the kernel: the matrix and the operations after the matmul."""

    columns: int
    compute: tl.dtype
    activation: Activation | None  # of a gated matmul, whose matrix has 2 * outputs rows; None: not gated
    add: bool  # add to the contents of `out`


class TileShape(NamedTuple):
    """Constants of the kernel: see Tiling."""

    row_block: int
    output_block: int
    column_block: int
    parts: int
    slices: int


EMULATED = Tiling(128, 128, 4, 1)  # in the interpreter a tile costs the same whatever its size
MANY_ROWS = (32, 64)  # rows of larger tiles of 16-bit matrices; with 64, of gated matmuls alone
# Outputs from which a matrix is taken for an LM head. That runs outside of graphs, too: other tiles would compile late.
LEAST_HEAD = 16384
MULTIPROCESSORS = 132  # of an H200: split-k makes at most as many programs
# Measured on an H200, where `choose` is slower: (bytes per weight, N, K, gated, rows per program).
TUNED: dict[tuple[int, int, int, bool, int], Tiling] = {
    (2, 32000, 4096, False, ROWS): Tiling(128, 64, 4, 5),
    (2, 49152, 576, False, ROWS): Tiling(128, 64, 4, 5),
    (2, 19456, 2560, True, ROWS): Tiling(32, 128, 4, 6),
    (2, 22016, 2048, True, ROWS): Tiling(32, 128, 4, 6),
    (2, 34816, 5120, True, ROWS): Tiling(32, 128, 4, 6),
    (2, 28672, 4096, True, 64): Tiling(64, 128, 8, 4, rows=64),
}


def tiling(matrix: Matrix, gated: bool, tokens: int) -> Tiling | None:
    """Return the tiling of a float matrix for this many rows, None if cuBLAS is faster.

    `gated`: its two halves (gate, up) are multiplied together. A batch-invariant matrix has one tiling.
    """
    outputs, columns = matrix.shape
    rows: int | None = ROWS
    if not matrix.batch_invariant and tokens > ROWS:
        rows = next((rows for rows in MANY_ROWS if tokens <= rows), None)
    return None if rows is None else choose(matrix.data.element_size(), outputs, columns, gated, rows)


@cache
def choose(size: int, outputs: int, columns: int, gated: bool, rows: int) -> Tiling | None:
    """Return the tiling of a matrix by its form, None for cuBLAS: measured on an H200 in layers of 0.5B to 14B."""
    found = None if INTERPRETED else TUNED.get((size, outputs, columns, gated, rows))
    if found is not None:
        return found
    is_fp32 = size == torch.float32.itemsize
    is_head = outputs >= LEAST_HEAD and not gated
    if rows > ROWS and (is_fp32 or is_head or (rows == max(MANY_ROWS) and not gated)):
        return None
    if INTERPRETED:
        return replace(EMULATED, rows=rows)
    if is_fp32:
        return Tiling(16, 64, 4, 3)
    if rows == max(MANY_ROWS):
        tiles = Tiling(64, 128, 8, 4, rows), Tiling(128, 64, 8, 4, rows)
        return next((tile for tile in tiles if triton.cdiv(outputs // 2, tile.outputs) <= MULTIPROCESSORS), None)
    if rows == ROWS and outputs < 2048 and columns <= 2048 and not gated:
        # The whole tile is loaded before the states are ready.
        warps = 4 if columns <= 1024 else 8
        step = max(128, 1 << (columns - 1).bit_length())
        return Tiling(16, step, warps, 1, rows=8, slices=warps)
    # With 64 lines a warpgroup uses wgmma, and fewer programs read the states.
    tile = Tiling(32, 128, 4, 4, rows) if gated else Tiling(64, 128, 4, 4 if is_head else 6, rows)
    programs, parts = triton.cdiv(outputs // 2 if gated else outputs, tile.outputs), 1
    while 2 * parts * programs <= MULTIPROCESSORS and columns >= 4 * parts * tile.columns:
        parts *= 2
    return replace(tile, parts=parts)


def matmul(
    x: Tensor,
    matrix: Matrix,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return linear(rms_norm(x)) + bias: [T, N] f32, in `out` if given, or added to `add` [T, N].

    x [T, K] is fp32 or of the matrix's compute dtype.
    """
    target = add if add is not None else out
    if target is None:
        target = torch.empty(x.shape[0], matrix.shape[0], device=x.device)  # [T, N]
    if e4m3_matmul.is_faster(matrix, x.shape[0]):
        e4m3_matmul.write(e4m3_matmul.multiply(x, matrix, norm, eps, target.dtype), bias, target, add is not None)
        return target
    if _is_fused(x.shape[0], matrix, gated=False):
        _launch_fused(x, matrix, norm, eps, Biases(bias, None), target, None, add is not None)
        return target
    _multiply(_normed(x, norm, eps, matrix), matrix, target, add is not None)
    if bias is not None:
        target += bias
    return target


def gated_matmul(
    x: Tensor,
    gate_up: Matrix,
    *,
    norm: Tensor | None,
    eps: float,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: Activation,
    deltas: Tensor | None = None,
) -> Tensor:
    """Return activation(gate) * up: [T, N] in the compute dtype; the matrix [2 * N, K] holds gate, then up.

    deltas [T, 2 * N] f32 are added to the products.
    """
    outputs = gate_up.shape[0] // 2
    if e4m3_matmul.is_faster(gate_up, x.shape[0]):
        found = e4m3_matmul.multiply(x, gate_up, norm, eps, gate_up.compute)
        return e4m3_matmul.gate(found, deltas, gate_bias, up_bias, activation)
    if _is_fused(x.shape[0], gate_up, gated=True):
        out = torch.empty(x.shape[0], outputs, dtype=gate_up.compute, device=x.device)  # [T, N]
        _launch_fused(x, gate_up, norm, eps, Biases(gate_bias, up_bias, deltas), out, activation, False)
        return out
    both = torch.empty(x.shape[0], 2 * outputs, dtype=gate_up.compute, device=x.device)  # [T, 2 * N]
    _multiply(_normed(x, norm, eps, gate_up), gate_up, both)
    if deltas is not None:
        both += deltas
    return gate(both, gate_bias, up_bias, activation)


def linear(x: Tensor, matrix: Matrix) -> Tensor:
    return matmul(x, matrix)


def norm_linear(x: Tensor, weight: Tensor, eps: float, matrix: Matrix, out: Tensor | None = None) -> Tensor:
    return matmul(x, matrix, norm=weight, eps=eps, out=out)


def _is_fused(tokens: int, matrix: Matrix, gated: bool) -> bool:
    """Return whether a fused kernel multiplies this many rows, or cuBLAS."""
    if matrix.kind == "float":
        return tiling(matrix, gated, tokens) is not None
    return matrix.batch_invariant or tokens <= EXPANDED_ROWS


def _launch_fused(
    x: Tensor,
    matrix: Matrix,
    norm: Tensor | None,
    eps: float,
    biases: Biases,
    out: Tensor,
    activation: Activation | None,
    add: bool,
) -> None:
    if matrix.kind == "float":
        tile = tiling(matrix, activation is not None, x.shape[0])
        assert tile is not None
        if tile.rows > ROWS:
            x, norm = _normed(x, norm, eps, matrix), None
        launch(x, matrix, norm, eps, biases, out, tile, activation, add)
    else:
        quantized_matmul.launch(_normed(x, norm, eps, matrix), matrix, biases, out, activation, add)


def launch(
    x: Tensor,
    matrix: Matrix,
    norm: Tensor | None,
    eps: float,
    biases: Biases,
    out: Tensor,
    tile: Tiling,
    activation: Activation | None,
    add: bool,
) -> None:
    """Launch the fused kernel for float matrices."""
    tokens, outputs = out.shape
    if tokens == 0:
        return
    # Programs that share a part of the matrix are neighbours, so that all but the first find it in the cache.
    blocks, tiles = triton.cdiv(tokens, tile.rows), triton.cdiv(outputs, tile.outputs)
    split = SplitK(None, None)
    if tile.parts > 1:
        lines = tile.outputs * (1 if activation is None else 2)
        scratch = torch.empty(blocks * tiles * tile.parts, (lines + 1) * tile.rows, device=x.device)
        # Each call leaves the counters at 0. For several blocks of rows they are allocated per call.
        counters = (
            matrix.split_counters if blocks == 1 else torch.zeros(blocks * tiles, dtype=torch.int32, device=x.device)
        )
        split = SplitK(scratch, counters)
    matmul_tile[(blocks, tiles, tile.parts)](
        x.contiguous(),
        norm,
        matrix.data,
        biases,
        out,
        split,
        tokens,
        outputs,
        eps,
        operation=Operation(matrix.shape[1], DTYPES[matrix.compute], activation, add),
        shape=TileShape(tile.rows, tile.outputs, tile.columns, tile.parts, tile.slices),
        num_warps=tile.warps,
        num_stages=fitting_stages(tile, matrix, x.dtype, activation is not None),
        **LAUNCH,
    )


def _normed(x: Tensor, norm: Tensor | None, eps: float, matrix: Matrix) -> Tensor:
    """Return x, or its rms_norm, as it is multiplied with `matrix`."""
    if matrix.terms == 1:
        return e4m3_matmul.rounded_rows(x, norm, eps)
    return x.to(matrix.compute) if norm is None else rms_norm(x, norm, eps, matrix.compute)


def _multiply(x: Tensor, matrix: Matrix, out: Tensor, add: bool = False) -> None:
    """Write x [T, K] times the transposed matrix to out [T, N], or add it there.

    A quantized matrix is dequantized in parts.
    """
    if matrix.kind == "float":
        _cublas(x, matrix.data, out, add)
        return
    outputs, columns = matrix.shape
    step = max(EXPANDED // columns, 1)
    for first in range(0, outputs, step):
        last = min(first + step, outputs)
        _cublas(x, quantized_matmul.dequantized_rows(matrix, first, last), out[:, first:last], add)


def _cublas(x: Tensor, weights: Tensor, out: Tensor, add: bool = False) -> None:
    if INTERPRETED:  # on the CPU, torch has no 16-bit matmul with an fp32 result
        found = x.float() @ weights.T.float()
        out.copy_(out + found if add else found)
        return
    precision: dict[str, Any] = {} if x.dtype == out.dtype else {"out_dtype": out.dtype}
    if add:
        torch.addmm(out, x, weights.T, out=out, **precision)
    else:
        torch.mm(x, weights.T, out=out, **precision)


# One binary for any number of rows, so that a row's result does not depend on it.
@triton.jit(do_not_specialize=["rows"])
def matmul_tile(
    x,  # [rows, columns]
    norm,  # [columns] f32, or None
    matrix,  # [outputs, columns]
    biases,
    out,  # [rows, outputs]
    split,
    rows,
    outputs,
    eps,
    operation: tl.constexpr,
    shape: tl.constexpr,
):
    columns: tl.constexpr = operation.columns
    compute: tl.constexpr = operation.compute
    activation: tl.constexpr = operation.activation
    row_block: tl.constexpr = shape.row_block
    output_block: tl.constexpr = shape.output_block
    column_block: tl.constexpr = shape.column_block
    parts: tl.constexpr = shape.parts
    slices: tl.constexpr = shape.slices
    even: tl.constexpr = columns % column_block == 0  # loads need no column mask
    all_steps: tl.constexpr = (columns + column_block - 1) // column_block
    row = tl.program_id(0) * row_block + tl.arange(0, row_block)
    output = tl.program_id(1) * output_block + tl.arange(0, output_block)
    line = lines_of(tl.program_id(1), outputs, output_block, activation)
    total = zeros(line.shape[0], row_block, slices)
    squares = tl.zeros([column_block, row_block], tl.float32)
    if all_steps == parts:
        # The whole tile is loaded before the states are ready.
        first = tl.program_id(2) * column_block
        tile = read_tile(matrix, line, first, column_block, operation)
        wait()
        addends = read_addends(biases, out, row, output, rows, outputs, activation, operation.add)
        column = first + tl.arange(0, column_block)
        right, squares = _states(x, norm, squares, row, column, rows, columns, even, compute)
        total = add_matmul(tile, right, total, slices)
    else:
        begin = tl.program_id(2) * all_steps // parts
        end = (tl.program_id(2) + 1) * all_steps // parts
        for step in range(loop_bound(begin), loop_bound(end)):
            tile = read_tile(matrix, line, step * column_block, column_block, operation)
            # The first weights are on their way.
            column = after_wait(step, step == begin) * column_block + tl.arange(0, column_block)
            right, squares = _states(x, norm, squares, row, column, rows, columns, even, compute)
            total = add_matmul(tile, right, total, slices)
        wait(release=False)
        addends = read_addends(biases, out, row, output, rows, outputs, activation, operation.add)
    size = tl.sum(squares, 0)  # [row_block]
    if slices > 1:
        total = tl.sum(total, 0)
    if parts == 1:
        _finish(total, size, norm, addends, biases.deltas, out, row, output, rows, outputs, eps, operation)
    else:
        offset = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        lines: tl.constexpr = total.shape[0]
        length: tl.constexpr = (lines + 1) * row_block
        lane = tl.arange(0, lines)[:, None] * row_block + tl.arange(0, row_block)[None, :]
        last = lines * row_block + tl.arange(0, row_block)
        own = split.scratch + (offset * parts + tl.program_id(2)) * length
        tl.store(own + lane, total)
        tl.store(own + last, size)
        tl.debug_barrier()  # all writes of this program come before its count
        if tl.atomic_add(split.counters + offset, 1, sem="acq_rel") == parts - 1:
            # The last program adds all parts in their order, so that the sum does not depend on which one is last.
            tl.store(split.counters + offset, 0)
            total = tl.zeros([lines, row_block], tl.float32)
            size = tl.zeros([row_block], tl.float32)
            for part in tl.static_range(parts):
                piece = split.scratch + (offset * parts + part) * length
                total += tl.load(piece + lane, cache_modifier=".cg")
                size += tl.load(piece + last, cache_modifier=".cg")
            _finish(total, size, norm, addends, biases.deltas, out, row, output, rows, outputs, eps, operation)


@triton.jit
def _finish(
    total,  # [output_block, row_block]; of a gated matmul [2 * output_block, row_block]
    size,  # [row_block]: sums of squares
    norm,
    addends,
    deltas,
    out,
    row,
    output,
    rows,
    outputs,
    eps,
    operation: tl.constexpr,
):
    """Apply the norm's scale to the sums, then bias, gate and residual, and store them."""
    activation: tl.constexpr = operation.activation  # as an argument, the member of a constant is no constant
    if norm is not None:
        total = total * tl.rsqrt(size / operation.columns + eps)[None, :]
    finish(total, addends, deltas, out, row, output, rows, outputs, activation, operation.add)


@triton.jit
def read_tile(matrix, line, first, column_block: tl.constexpr, operation: tl.constexpr):
    """Load rows `line` [n] int64 of the matrix, from column `first`: [n, columns]."""
    columns: tl.constexpr = operation.columns
    column = (first + tl.arange(0, column_block))[None, :]
    even: tl.constexpr = columns % column_block == 0  # loads need no column mask
    known = (column < columns) | even
    return tl.load(matrix + line[:, None] * columns + column, mask=known, other=0, eviction_policy="evict_first")


@triton.jit
def _states(x, norm, squares, row, column, rows, columns: tl.constexpr, even: tl.constexpr, compute: tl.constexpr):
    """Load columns of x times the norm's weight, [columns, rows], and update the sums of squares."""
    known = (column < columns) | even
    offset = x + row.to(tl.int64)[None, :] * columns + column[:, None]
    value = tl.load(offset, mask=(row < rows)[None, :] & known[:, None], other=0)
    if norm is not None:
        value = value.to(tl.float32)
        squares += value * value
        value *= tl.load(norm + column, mask=known, other=0)[:, None]
    if compute == tl.float16 and value.dtype == tl.float32:
        value = tl.clamp(value, -65504.0, 65504.0)  # states may exceed fp16 before the norm's scale is applied
    return rounded(value, compute), squares
