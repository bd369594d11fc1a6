"""Matmuls of bf16 activations [T, K] with a quantized matrix [N, K]: weights become bf16 in registers.

The kernel reads tiles of words through shared memory into the registers of the tensor cores' left factor, unpacks
them there with about one instruction per weight, and multiplies. Layout and arithmetic of the words: matrices.py.
Conversions of integers by the hardware are several times slower than memory, so the bits of a weight are placed into a
float whose exponent is known, and the excess is subtracted. Sums are fp32. A batch-invariant matrix is cut into the
same columns and parts for any T. The number of rows in a tile has no influence on the sums of a row.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structures import Activation
from .device import EMULATED, INTERPRETED, LAUNCH, fetch, loop_bound, multiply, rounded, wait
from .epilogue import ROWS, Biases, SplitK, Tiling, finish, fitting_stages
from .matrices import MANY_OUTPUTS, MOST_TILES, PADDED, PER_WORD, Matrix
from .tables import looked_up_nibbles

AHEAD: tl.constexpr = tl.constexpr(256)  # bytes of each row of the matrix that a program prefetches under PDL


class Words(NamedTuple):
    """Argument of the kernel: see Matrix."""

    data: Tensor
    scales: Tensor | None
    channel: Tensor | None


class Format(NamedTuple):
    """Constants of the kernel: the layout of the matrix, see Matrix."""

    kind: str
    span: int
    groups: int
    paired: bool
    table: str
    even: bool  # rows are not padded


class TileShape(NamedTuple):
    """Constants of the kernel: see Tiling."""

    row_block: int
    output_block: int
    chunks: int
    split: bool


EMULATED_TILING = Tiling(128, PADDED, 4, 1)  # in the interpreter a tile costs the same whatever its size
# For shapes that TUNED lacks, by the rows of activations per program. Measured on an H200 for models of 4B, 8B and 14B,
# those of 8 rows also for 0.5B to 1.5B. With 8 rows Triton uses `mma.sync`, which needs fewer instructions beside it
# than `wgmma`.
USUAL = {
    8: Tiling(64, 128, 4, 4, rows=8),
    ROWS: Tiling(64, 256, 4, 3),
    32: Tiling(64, 256, 4, 3, rows=32),
    64: Tiling(64, 128, 4, 3, rows=64),
    128: Tiling(128, 128, 8, 3, rows=128),
}
DEQUANTIZED = 32  # rows of the matrix that a program dequantizes
# Programs that split-k makes at most, by their warps: as many as run at once on the 132 multiprocessors of an H200.
# Gated matmuls, which have two sums, count as those of 8 warps: split-k made one of a 4B shape 1.5 times as slow.
PROGRAMS = {4: 396, 8: 132}
FEWEST_STEPS = 3  # iterations of a program's loop that split-k leaves
# Matrices of Llama-3.1-8B as N, K, gated: qkv, attention output, gate and up, down, LM head.
SHAPES = ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (128256, 4096, False))
# Measured on an H200 for SHAPES, by kind and rows per program: outputs, columns, warps, stages and parts of a Tiling.
# Those of fp8 and int4 with 8 rows in the steps of an engine: the tiling of the int4 down matrix that is fastest alone
# takes 7 us longer there, between the other kernels of a layer.
MEASURED = {
    ("fp8", 8): ((64, 256, 4, 4, 4), (64, 128, 4, 6, 4), (64, 256, 4, 3, 1), (64, 512, 4, 3, 4), (64, 256, 4, 4, 1)),
    ("fp8", 16): ((64, 128, 4, 6, 4), (64, 128, 2, 4, 4), (64, 256, 4, 3, 1), (64, 256, 4, 4, 4), (64, 256, 4, 3, 1)),
    ("fp8", 64): ((64, 128, 4, 3, 4), (64, 128, 4, 4, 4), (64, 128, 4, 3, 1), (128, 128, 8, 4, 4), (128, 128, 8, 4, 1)),
    ("int4", 8): ((64, 128, 4, 4, 4), (64, 128, 2, 6, 4), (64, 256, 4, 3, 1), (128, 256, 8, 3, 4), (128, 256, 4, 3, 1)),
    ("int4", 16): ((64, 128, 4, 4, 4), (64, 128, 2, 6, 4), (64, 256, 4, 4, 1), (128, 256, 4, 3, 8), (64, 256, 4, 3, 1)),
    ("int4", 64): (
        (64, 128, 4, 3, 4),
        (64, 128, 4, 4, 4),
        (128, 128, 8, 3, 1),
        (128, 128, 8, 4, 8),
        (128, 128, 8, 4, 1),
    ),
    ("int8", 8): ((64, 256, 4, 4, 4), (32, 256, 2, 3, 4), (128, 256, 4, 3, 1), (32, 256, 2, 4, 2), (64, 256, 4, 3, 1)),
    ("int8", 16): ((64, 256, 4, 3, 4), (64, 128, 2, 4, 4), (64, 256, 4, 3, 1), (64, 128, 2, 4, 4), (64, 128, 4, 4, 1)),
    ("int8", 64): (
        (128, 128, 8, 4, 2),
        (128, 128, 8, 4, 4),
        (128, 128, 8, 4, 1),
        (128, 128, 8, 4, 4),
        (128, 128, 8, 3, 1),
    ),
}
TUNED = {
    (kind, *shape, rows): Tiling(outputs, columns, warps, stages, rows, parts)
    for (kind, rows), tiles in MEASURED.items()
    for shape, (outputs, columns, warps, stages, parts) in zip(SHAPES, tiles, strict=True)
}


def tiling(matrix: Matrix, gated: bool, tokens: int) -> Tiling:
    """Return the tiling for this many rows. Those of a batch-invariant matrix add in the same order."""
    outputs, columns = matrix.shape
    if matrix.batch_invariant:
        tile = choose(matrix.kind, outputs, columns, gated, ROWS, 1)
        return tile if tokens <= ROWS else replace(tile, rows=64, stages=min(tile.stages, 3))
    rows = rows_per_program(tokens)
    return choose(matrix.kind, outputs, columns, gated, rows, triton.cdiv(tokens, rows))


def rows_per_program(tokens: int) -> int:
    """Return the rows of a tile for this many rows: a program unpacks its weights for each block of them."""
    most = max(USUAL)
    if tokens > most:
        return most // 2 if 0 < tokens % most <= most // 2 else most
    return next(rows for rows in USUAL if tokens <= rows)


@cache
def choose(kind: str, outputs: int, columns: int, gated: bool, rows: int, blocks: int) -> Tiling:
    """Return the tiling with this many rows per program, and this many blocks of them."""
    if INTERPRETED:
        return EMULATED_TILING
    found = TUNED.get((kind, outputs, columns, gated, rows)) if blocks == 1 else None
    if found is not None:
        return found
    tile, padded = USUAL[rows], triton.cdiv(columns, PADDED) * PADDED
    if rows == 64 and outputs >= MANY_OUTPUTS and not gated:
        tile = replace(USUAL[128], rows=rows)
    if rows == 8 and (outputs >= MANY_OUTPUTS or gated):
        tile = replace(USUAL[ROWS], rows=rows)
    if padded % tile.columns:
        tile = replace(tile, columns=PADDED)
    programs, steps = blocks * triton.cdiv(outputs // 2 if gated else outputs, tile.outputs), padded // tile.columns
    most, parts = PROGRAMS[8 if gated else tile.warps], 1
    while 2 * parts * programs <= most and steps >= 2 * parts * FEWEST_STEPS:
        parts *= 2
    return replace(tile, parts=parts)


def format_of(matrix: Matrix) -> Format:
    even = matrix.shape[1] % PADDED == 0
    return Format(matrix.kind, matrix.span, matrix.groups, matrix.paired, matrix.table, even)


def launch(
    x: Tensor,
    matrix: Matrix,
    biases: Biases,
    out: Tensor,
    activation: Activation | None,
    add: bool,
    tile: Tiling | None = None,
) -> None:
    """Write the matmul of x [T, K] bf16 to `out` [T, N], or add it; `activation`: of a gated matmul."""
    tokens, outputs = out.shape
    if tokens == 0:
        return
    tile = tile or tiling(matrix, activation is not None, tokens)
    # Programs that share a part of the matrix are neighbours, so that all but the first find it in the cache.
    blocks, tiles = triton.cdiv(tokens, tile.rows), triton.cdiv(outputs, tile.outputs)
    split = SplitK(None, None)
    steps = matrix.data.shape[1] * PER_WORD[matrix.kind] // tile.columns
    if steps * tile.columns != matrix.data.shape[1] * PER_WORD[matrix.kind]:
        raise ValueError(f"{tile} does not divide rows of {matrix.shape[1]} columns")
    if tile.parts > 1:
        numbers = tile.outputs * tile.rows * (1 if activation is None else 2)  # of a program
        scratch = torch.empty(blocks * tiles * tile.parts, numbers, device=x.device)
        counters = matrix.split_counters  # each call leaves them at 0
        if blocks * tiles > MOST_TILES:
            counters = torch.zeros(blocks * tiles, dtype=torch.int32, device=x.device)
        split = SplitK(scratch, counters)
    quantized_matmul_tile[(blocks, tiles, tile.parts)](
        x.contiguous(),
        Words(matrix.data, matrix.scales, matrix.channel),
        biases,
        out,
        split,
        tokens,
        outputs,
        matrix.shape[1],
        matrix.data.shape[1],
        0 if matrix.scales is None else matrix.scales.stride(0),
        tile.parts,
        format=format_of(matrix),
        shape=TileShape(tile.rows, tile.outputs, tile.columns // matrix.chunk, tile.parts > 1),
        activation=activation,
        add=add,
        num_warps=tile.warps,
        num_stages=fitting_stages(tile, matrix, x.dtype, activation is not None),
        **LAUNCH,
    )


def dequantized_rows(matrix: Matrix, begin: int, end: int) -> Tensor:
    """Return rows begin .. end - 1 as bf16: [end - begin, K]."""
    out = torch.empty(end - begin, matrix.shape[1], dtype=matrix.compute, device=matrix.data.device)
    if end > begin:
        chunks = PADDED // matrix.chunk
        grid = (triton.cdiv(end - begin, DEQUANTIZED), matrix.data.shape[1] // (chunks * matrix.span))
        dequantize_tile[grid](
            Words(matrix.data, matrix.scales, matrix.channel),
            out,
            begin,
            end,
            matrix.shape[1],
            matrix.data.shape[1],
            0 if matrix.scales is None else matrix.scales.stride(0),
            format=format_of(matrix),
            row_block=DEQUANTIZED,
            chunks=chunks,
            **LAUNCH,
        )
    return out


@triton.jit
def dequantize_tile(
    words,
    out,  # [end - begin, columns] bf16
    begin,
    end,
    columns,
    stride,  # words of a row
    scale_stride,  # entries of a chunk of all rows
    format: tl.constexpr,
    row_block: tl.constexpr,
    chunks: tl.constexpr,
):
    wait()
    row = tl.program_id(0) * row_block + tl.arange(0, row_block)
    line = tl.minimum(begin + row, end - 1).to(tl.int64)
    weights = read_tile(words, line, tl.program_id(1), stride, scale_stride, chunks, format)
    if words.channel is not None:
        weights = rounded(weights.to(tl.float32) * tl.load(words.channel + line)[:, None], tl.bfloat16)
    column = tl.program_id(1) * weights.shape[1] + tl.arange(0, weights.shape[1])
    kept = (begin + row < end)[:, None]
    if not format.even:
        kept = kept & (column < columns)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * columns + column[None, :], rounded(weights, tl.bfloat16), mask=kept)


# One binary for any number of rows, so that a row's result does not depend on it.
@triton.jit(do_not_specialize=["rows", "parts"])
def quantized_matmul_tile(
    x,  # [rows, columns] bf16
    words,
    biases,
    out,  # [rows, outputs]
    split,
    rows,
    outputs,
    columns,
    stride,  # words of a row
    scale_stride,  # entries of a chunk of all rows
    parts,  # split-k factor
    format: tl.constexpr,
    shape: tl.constexpr,
    activation: tl.constexpr,
    add: tl.constexpr,
):
    per: tl.constexpr = 4 if format.kind == "int4" else 2  # weights of a word
    step_words: tl.constexpr = shape.chunks * format.span
    step_columns: tl.constexpr = per * step_words
    row_block: tl.constexpr = shape.row_block
    output_block: tl.constexpr = shape.output_block
    row = tl.program_id(0) * row_block + tl.arange(0, row_block)
    output = tl.program_id(1) * output_block + tl.arange(0, output_block)
    # Programs at the edge read the last row again, so that loads need no row mask.
    line = tl.minimum(output, outputs - 1).to(tl.int64)
    other_line = line + outputs  # of a gated matmul
    all_steps = stride // step_words
    begin = tl.program_id(2) * all_steps // parts
    steps = (tl.program_id(2) + 1) * all_steps // parts - begin  # of this program: parts may differ by one
    own = words.data + line * stride + begin * step_words
    if steps * step_words >= AHEAD // 2:
        fetch(own, AHEAD, AHEAD)
        if activation is not None:
            fetch(own + outputs.to(tl.int64) * stride, AHEAD, AHEAD)
    wait()
    total = tl.zeros([output_block, row_block], tl.float32)
    other_total = tl.zeros([output_block, row_block], tl.float32)
    for index in range(loop_bound(steps)):
        step = begin + index
        column = step * step_columns + tl.arange(0, step_columns)
        known = (row < rows)[None, :]
        if not format.even:
            known = known & (column < columns)[:, None]
        right = tl.load(x + row.to(tl.int64)[None, :] * columns + column[:, None], mask=known, other=0)
        left = read_tile(words, line, step, stride, scale_stride, shape.chunks, format)
        total = multiply(left, right, total)
        if activation is not None:
            left = read_tile(words, other_line, step, stride, scale_stride, shape.chunks, format)
            other_total = multiply(left, right, other_total)
    if words.channel is not None:
        total *= tl.load(words.channel + line)[:, None]
        if activation is not None:
            other_total *= tl.load(words.channel + other_line)[:, None]
    if not shape.split:
        finish(total, other_total, biases, out, row, output, rows, outputs, activation, add)
    else:
        _finish_part(total, other_total, split, parts, biases, out, row, output, rows, outputs, activation, add)


@triton.jit
def _finish_part(
    total,  # [output_block, row_block]
    other_total,
    split,
    parts,
    biases,
    out,
    row,
    output,
    rows,
    outputs,
    activation: tl.constexpr,
    add: tl.constexpr,
):
    """Store the sums of this program; the last program of a tile adds all parts and stores the result."""
    output_block: tl.constexpr = total.shape[0]
    row_block: tl.constexpr = total.shape[1]
    offset = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    size: tl.constexpr = output_block * row_block
    length: tl.constexpr = size if activation is None else 2 * size
    lane = tl.arange(0, output_block)[:, None] * row_block + tl.arange(0, row_block)[None, :]
    own = split.scratch + (offset * parts + tl.program_id(2)) * length + lane
    tl.store(own, total)
    if activation is not None:
        tl.store(own + size, other_total)
    tl.debug_barrier()  # all writes of this program come before its count
    if tl.atomic_add(split.counters + offset, 1, sem="acq_rel") == parts - 1:
        # The parts are added in their order, so that the sum does not depend on which program is last.
        tl.store(split.counters + offset, 0)
        total = tl.zeros([output_block, row_block], tl.float32)
        other_total = tl.zeros([output_block, row_block], tl.float32)
        for part in range(loop_bound(parts)):
            piece = split.scratch + (offset * parts + part) * length + lane
            total += tl.load(piece, cache_modifier=".cg")
            if activation is not None:
                other_total += tl.load(piece + size, cache_modifier=".cg")
        finish(total, other_total, biases, out, row, output, rows, outputs, activation, add)


@triton.jit
def read_tile(words, line, step, stride, scale_stride, chunks: tl.constexpr, format: tl.constexpr):
    """Load `chunks` chunks of rows `line` [output_block] int64, and return their weights: [outputs, columns] bf16."""
    per: tl.constexpr = 4 if format.kind == "int4" else 2
    span: tl.constexpr = format.span
    groups: tl.constexpr = format.groups
    outputs: tl.constexpr = line.shape[0]
    word = step * (chunks * span) + tl.arange(0, chunks * span)
    tile = tl.load(words.data + line[:, None] * stride + word[None, :], eviction_policy="evict_first")
    tile = tl.reshape(tile, [outputs, chunks, span])
    if groups > 0:
        entry = tl.arange(0, chunks * groups)
        chunk = step * chunks + entry // groups
        offset = chunk.to(tl.int64)[None, :] * scale_stride + line[:, None] * groups + (entry % groups)[None, :]
        scales = tl.load(words.scales + offset, eviction_policy="evict_first")
        scales = tl.reshape(scales, [outputs, chunks, groups])
    if per == 4:
        quarter_0, quarter_1, quarter_2, quarter_3 = _nibbles(tile, format)
        if groups == 1:
            common = tl.reshape(scales, [outputs, chunks])
            quarter_0 = _scaled(quarter_0, common, format)
            quarter_1 = _scaled(quarter_1, common, format)
            quarter_2 = _scaled(quarter_2, common, format)
            quarter_3 = _scaled(quarter_3, common, format)
        else:
            even, odd = tl.split(tl.reshape(scales, [outputs, chunks, 2, 2]))
            scale_0, scale_2 = tl.split(even)
            scale_1, scale_3 = tl.split(odd)
            quarter_0 = _scaled(quarter_0, scale_0, format)
            quarter_1 = _scaled(quarter_1, scale_1, format)
            quarter_2 = _scaled(quarter_2, scale_2, format)
            quarter_3 = _scaled(quarter_3, scale_3, format)
        weights = _concatenated(_concatenated(quarter_0, quarter_1), _concatenated(quarter_2, quarter_3))
    else:
        low, high = _bytes(tile, format)
        if groups == 1:
            common = tl.reshape(scales, [outputs, chunks])
            low, high = _scaled(low, common, format), _scaled(high, common, format)
        if groups == 2:
            low_scale, high_scale = tl.split(scales)
            low, high = _scaled(low, low_scale, format), _scaled(high, high_scale, format)
        weights = _concatenated(low, high)
    return tl.reshape(weights, [outputs, chunks * per * span])


@triton.jit
def _concatenated(left, right):
    """Join two tiles [outputs, chunks, n] along their columns: only registers get other names."""
    both = tl.permute(tl.join(left, right), (0, 1, 3, 2))
    return tl.reshape(both, [left.shape[0], left.shape[1], 2 * left.shape[2]])


@triton.jit
def _nibbles(tile, format: tl.constexpr):
    """Convert the four nibbles of words to bf16, exactly: -8 .. 7, or the values of a table."""
    table: tl.constexpr = format.table
    if table != "":
        return looked_up_nibbles(tile, table)
    if EMULATED:
        bits = tile.to(tl.int32)
        return (
            ((bits & 15) - 8).to(tl.float32),
            ((bits >> 4 & 15) - 8).to(tl.float32),
            ((bits >> 8 & 15) - 8).to(tl.float32),
            ((bits >> 12 & 15) - 8).to(tl.float32),
        )
    # 128 + quant, minus 136.
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 t, u, c;
            mov.b32 u, 0x3F803F80;
            mov.b32 c, 0xC308C308;
            lop3.b32 t, $4, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, t, u, c;
            shr.b32 t, $4, 4;
            lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $1, t, u, c;
            shr.b32 t, $4, 8;
            lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $2, t, u, c;
            shr.b32 t, $4, 12;
            lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $3, t, u, c;
            }""",
        "=r,=r,=r,=r,r",
        [tile],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _bytes(tile, format: tl.constexpr):
    """Convert the low and the high bytes of words to bf16, exactly."""
    if EMULATED:
        return _byte(tile, 0, format), _byte(tile, 8, format)
    if format.kind == "int8":
        # 128 + the low seven bits, minus 128, or minus 256 if the sign bit is set.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, t, m;
            mov.b32 m, 0xBF80BF80;
            lop3.b32 a, $2, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, $2, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, b, m, a;
            shr.b32 t, $2, 8;
            lop3.b32 a, t, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, t, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 $1, b, m, a;
            }""",
            "=r,=r,r",
            [tile],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    # Exponent and mantissa below the sign make a bf16 that is 2^120 times too small.
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 a, t, m, z;
            mov.b32 m, 0x7B807B80;
            mov.b32 z, 0x80008000;
            shl.b32 t, $2, 8;
            shr.b32 a, t, 4;
            and.b32 a, a, 0x07F007F0;
            lop3.b32 a, t, 0x80008000, a, 0xEA;
            fma.rn.bf16x2 $0, a, m, z;
            shr.b32 a, $2, 4;
            and.b32 a, a, 0x07F007F0;
            lop3.b32 a, $2, 0x80008000, a, 0xEA;
            fma.rn.bf16x2 $1, a, m, z;
            }""",
        "=r,=r,r",
        [tile],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _scaled(tile, scales, format: tl.constexpr):
    """Multiply a tile [outputs, chunks, n] by its scales [outputs, chunks], and add its minima."""
    scales = tl.broadcast_to(scales[:, :, None], tile.shape)
    if EMULATED:
        if scales.dtype == tl.int32:
            value = tile.to(tl.float32) * (scales << 16).to(tl.float32, bitcast=True)
        else:
            value = tile.to(tl.float32) * scales.to(tl.float32)
        if format.paired:
            value += (scales & -0x10000).to(tl.float32, bitcast=True)
        return rounded(value, tl.bfloat16)
    if format.paired:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, o;
            prmt.b32 s, $2, 0, 0x1010;
            prmt.b32 o, $2, 0, 0x3232;
            fma.rn.bf16x2 $0, $1, s, o;
            }""",
            "=r,r,r,r",
            [tile, scales],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    if scales.dtype == tl.int32:  # the same scale twice
        return tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
            "=r,r,r,r",
            [tile, scales],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return tl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
        "=r,r,r",
        [tile, scales],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _byte(tile, shift: tl.constexpr, format: tl.constexpr):
    """Convert a byte of words for the interpreter, which has no assembler."""
    bits = (tile.to(tl.int32) >> shift) & 255
    if format.kind == "int8":
        value = (bits - ((bits & 128) << 1)).to(tl.float32)
    else:
        value = (((bits & 127) << 20) | ((bits & 128) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return rounded(value, tl.bfloat16)
