"""Matmuls of bf16 activations [T, K] with a quantized matrix [N, K]: weights become bf16 in registers.

The kernel reads tiles of words through shared memory into the registers of the tensor cores' left factor, unpacks
them there with 1 to 1.5 instructions per weight, and multiplies. Layout and arithmetic of the words: matrices.py.
Conversions of integers by the hardware are several times slower than memory, so the bits of a weight are placed into a
float whose exponent is known. Sums are fp32. The first words of a program are loaded before it waits for the kernel
that computes the activations. A batch-invariant matrix is cut into the same columns and parts for any T. The number of
rows in a tile has no influence on the sums of a row.
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
from .device import EMULATED, INTERPRETED, LAUNCH, after_wait, loop_bound, release, rounded, wait
from .epilogue import ROWS, Biases, SplitK, Tiling, add_matmul, finish, fitting_stages, lines_of, read_addends, zeros
from .matrices import MANY_OUTPUTS, MOST_TILES, PADDED, PER_WORD, SUM_FACTOR, UNITS, Matrix
from .pointwise import e4m3_number
from .tables import looked_up_nibbles

SUM: tl.constexpr = tl.constexpr(SUM_FACTOR)
STATES: tl.constexpr = tl.constexpr(1 / UNITS["fp8"] / SUM_FACTOR)
INT8_UNIT: tl.constexpr = tl.constexpr(UNITS["int8"])
FEW_NUMBERS: tl.constexpr = tl.constexpr(2048)  # of a tile, up to which registers hold four of them: 8 or 16 rows


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
    slices: int


EMULATED_TILING = Tiling(128, PADDED, 4, 1)  # in the interpreter a tile costs the same whatever its size
# For shapes that TUNED lacks, by the rows of activations per program; up to 8 rows: see `few_rows`. Measured on an H200
# for models of 4B, 8B and 14B.
USUAL = {
    8: Tiling(64, 256, 4, 3, rows=8),
    ROWS: Tiling(64, 256, 4, 3),
    32: Tiling(64, 256, 4, 3, rows=32),
    64: Tiling(64, 128, 4, 3, rows=64),
    128: Tiling(128, 128, 8, 3, rows=128),
}
# Turn the fields of two words, the last operand, into pairs of bf16, an operand for each field: see matrices.py.
INT8 = """{
    .reg .b32 m, c, t;
    mov.b32 m, 0x7F007F00;
    mov.b32 c, 0xC000C000;
    and.b32 t, $2, 0x00FF00FF;
    fma.rn.bf16x2 $0, t, m, c;
    prmt.b32 t, $2, 0, 0x4341;
    fma.rn.bf16x2 $1, t, m, c;
    }"""
FP8 = """{
    .reg .b32 s, t;
    and.b32 s, $2, 0x80808080;
    shr.b32 t, $2, 4;
    lop3.b32 $1, t, 0x07F007F0, s, 0xE2;
    shl.b32 s, s, 8;
    shl.b32 t, $2, 4;
    lop3.b32 $0, t, 0x07F007F0, s, 0xE2;
    }"""
INT4 = """{
    .reg .b32 t, h;
    mov.b32 h, 0x00080008;
    lop3.b32 $0, $4, 0x80708070, h, 0xEA;
    shl.b32 t, $4, 4;
    lop3.b32 $1, t, 0x80708070, h, 0xEA;
    prmt.b32 t, $4, 0, 0x2301;
    lop3.b32 $2, t, 0x80708070, h, 0xEA;
    shl.b32 t, t, 4;
    lop3.b32 $3, t, 0x80708070, h, 0xEA;
    }"""
INT8_CODE, FP8_CODE, INT4_CODE = tl.constexpr(INT8), tl.constexpr(FP8), tl.constexpr(INT4)
DEQUANTIZED = 32  # rows of the matrix that a program dequantizes
# Programs that split-k makes at most, by their warps: as many as run at once on the 132 multiprocessors of an H200.
PROGRAMS = {4: 396, 8: 264}
# The same for gated matmuls, whose sums take twice as long to add: split-k makes one of 8B 4 us slower, one of 4B
# 1.5 times as slow. Tiles of 128 rows were measured with it, too.
FEW_PROGRAMS = 132
MOST_PROGRAMS = 640  # of up to 8 rows: the down matrix of 14B has as many; more were not measured
FEWEST_STEPS = 3  # iterations of a program's loop that split-k leaves
# Matrices of Llama-3.1-8B as N, K, gated: qkv, attention output, gate and up, down, LM head.
SHAPES = ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (128256, 4096, False))
# Measured on an H200 for SHAPES, by kind and rows per program: outputs, columns, warps, stages and parts of a Tiling.
# Those of fp8 and int4 (but the LM head) in chains of layers. Alone, others are the fastest: a program starts where
# those of the kernel before leave memory and registers, so some multiprocessors may get several programs, others none.
MEASURED = {
    ("fp8", 16): ((64, 256, 4, 4, 2), (64, 128, 4, 6, 4), (64, 256, 4, 3, 1), (64, 256, 4, 4, 4), (64, 256, 4, 3, 1)),
    ("fp8", 64): (
        (64, 128, 4, 3, 4),
        (64, 128, 4, 4, 4),
        (64, 128, 8, 4, 1),
        (128, 128, 8, 4, 8),
        (128, 128, 8, 4, 1),
    ),
    ("int4", 16): ((64, 128, 4, 6, 4), (64, 128, 4, 6, 4), (64, 256, 4, 3, 1), (128, 256, 4, 3, 8), (64, 256, 4, 3, 1)),
    ("int4", 64): (
        (64, 128, 4, 3, 4),
        (64, 128, 4, 4, 4),
        (64, 128, 8, 4, 1),
        (128, 128, 8, 4, 8),
        (128, 128, 8, 4, 1),
    ),
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
    if rows == 8 and (gated or outputs < MANY_OUTPUTS):
        return few_rows(outputs, columns, gated)
    tile, padded = USUAL[rows], triton.cdiv(columns, PADDED) * PADDED
    if rows == 64 and gated:
        tile = replace(tile, warps=8, stages=4)
    elif rows == 64 and outputs >= MANY_OUTPUTS:
        tile = replace(USUAL[128], rows=rows)
    if padded % tile.columns:
        tile = replace(tile, columns=PADDED)
    programs, steps = blocks * triton.cdiv(outputs // 2 if gated else outputs, tile.outputs), padded // tile.columns
    most, parts = FEW_PROGRAMS if gated or rows == 128 else PROGRAMS[tile.warps], 1
    while 2 * parts * programs <= most and steps >= 2 * parts * FEWEST_STEPS:
        parts *= 2
    return replace(tile, parts=parts)


def few_rows(outputs: int, columns: int, gated: bool) -> Tiling:
    """Return the tiling for up to 8 rows.

    Measured on an H200 in chains of layers: int4 of 1B, 1.5B, 4B, 8B and 14B, FP8 of 1.5B, 4B, 8B and 14B, int8 of 8B.
    For the down matrix of FP8 and int8, slices would be about 1 % faster; of int4 they are 2 to 5 % slower.
    """
    padded = triton.cdiv(columns, PADDED) * PADDED
    if gated:
        tile = Tiling(16, 256, 2, 3, rows=8)
    elif columns >= 2 * outputs:  # as the down matrix
        tile = Tiling(32, 256, 2, 4, rows=8, parts=4)
    elif padded % 512 == 0:  # as qkv and the attention output
        return Tiling(16, 512, 4, 4, rows=8, slices=4)
    else:
        tile = Tiling(64, 256, 4, 3, rows=8, parts=4)
    if padded % tile.columns:
        tile = replace(tile, columns=PADDED)
    programs, steps, parts = triton.cdiv(outputs, tile.outputs), padded // tile.columns, tile.parts
    while parts > 1 and (parts * programs > MOST_PROGRAMS or 2 * steps < 3 * parts):
        parts //= 2
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
        shape=TileShape(tile.rows, tile.outputs, tile.columns // matrix.chunk, tile.parts > 1, tile.slices),
        activation=activation,
        add=add,
        rounds=matrix.terms == 1 and activation is not None,
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
    weights = true_size(enlarged(weights, words.channel, format).to(tl.float32), format)
    if words.channel is not None:
        weights *= tl.load(words.channel + line)[:, None]
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
    rounds: tl.constexpr,  # sums to bf16, as e4m3_matmul.py does with more rows
):
    per: tl.constexpr = 4 if format.kind == "int4" else 2  # weights of a word
    step_words: tl.constexpr = shape.chunks * format.span
    step_columns: tl.constexpr = per * step_words
    row_block: tl.constexpr = shape.row_block
    output_block: tl.constexpr = shape.output_block
    row = tl.program_id(0) * row_block + tl.arange(0, row_block)
    output = tl.program_id(1) * output_block + tl.arange(0, output_block)
    line = lines_of(tl.program_id(1), outputs, output_block, activation)
    all_steps = stride // step_words
    begin = tl.program_id(2) * all_steps // parts
    steps = (tl.program_id(2) + 1) * all_steps // parts - begin  # of this program: parts may differ by one
    if words.channel is not None:
        factor = tl.load(words.channel + line)[:, None]
    slices: tl.constexpr = shape.slices
    total = zeros(line.shape[0], row_block, slices)
    for index in range(loop_bound(steps)):
        step = begin + index
        left = read_tile(words, line, step, stride, scale_stride, shape.chunks, format)
        step = after_wait(step, index == 0, release=False)  # the first weights are on their way
        column = step * step_columns + tl.arange(0, step_columns)
        known = (row < rows)[None, :]
        if not format.even:
            known = known & (column < columns)[:, None]
        right = tl.load(x + row.to(tl.int64)[None, :] * columns + column[:, None], mask=known, other=0)
        right = enlarged(right, words.channel, format)
        total = add_matmul(left, right, total, slices)
    wait(release=False)
    addends = read_addends(biases, out, row, output, rows, outputs, activation, add)
    release()
    if slices > 1:
        total = tl.sum(total, 0)
    total = true_size(total, format)
    if shape.split:
        # The last program of a tile adds all parts and stores the result.
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        size: tl.constexpr = total.shape[0] * row_block
        lane = tl.arange(0, total.shape[0])[:, None] * row_block + tl.arange(0, row_block)[None, :]
        tl.store(split.scratch + (tile * parts + tl.program_id(2)) * size + lane, total)
        tl.debug_barrier()  # all writes of this program come before its count
        if tl.atomic_add(split.counters + tile, 1, sem="acq_rel") < parts - 1:
            return
        # The parts are added in their order, so that the sum does not depend on which program is last.
        tl.store(split.counters + tile, 0)
        total = _sum_parts(split.scratch + tile * parts * size + lane, parts, size)
    if rounds:
        total = rounded(total, tl.bfloat16).to(tl.float32)
    if words.channel is not None:
        total *= factor
    finish(total, addends, biases.deltas, out, row, output, rows, outputs, activation, add)


@triton.jit
def _sum_parts(pieces, parts, length: tl.constexpr):
    """Return the sum of `parts` tiles in their order; `pieces` points to the first, the next is `length` numbers on."""
    total = tl.zeros(pieces.shape, tl.float32)
    if pieces.shape[0] * pieces.shape[1] <= FEW_NUMBERS:
        for part in range(0, loop_bound(parts), 4):  # four loads have the latency of one
            first = _load_part(pieces, part, parts, length)
            second = _load_part(pieces, part + 1, parts, length)
            third = _load_part(pieces, part + 2, parts, length)
            fourth = _load_part(pieces, part + 3, parts, length)
            total = total + first + second + third + fourth
    else:
        for part in range(loop_bound(parts)):
            total += _load_part(pieces, part, parts, length)
    return total


@triton.jit
def _load_part(pieces, part, parts, length: tl.constexpr):
    return tl.load(pieces + part * length, mask=part < parts, other=0, cache_modifier=".cg")


@triton.jit
def read_tile(words, line, step, stride, scale_stride, chunks: tl.constexpr, format: tl.constexpr):
    """Load `chunks` chunks of rows `line` [output_block] int64, and return their weights: [outputs, columns] bf16.

    `true_size` is to be applied to the weights or to their sums, `enlarged` to the states.
    """
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
def true_size(values, format: tl.constexpr):
    """Multiply fp32 weights of `read_tile`, or sums of them, by the factor that their scales or their states lack."""
    if format.kind == "fp8" or (format.kind == "int4" and format.table == ""):
        values = values * SUM
    return values


@triton.jit
def enlarged(states, channel, format: tl.constexpr):
    """Multiply states, or weights, by STATES if weights are tiny numbers, so that products keep their bits."""
    if format.kind == "fp8" and channel is not None:
        if EMULATED:
            states = states.to(tl.float32)
        states = (states * STATES).to(states.dtype)
    return states


@triton.jit
def _concatenated(left, right):
    """Join two tiles [outputs, chunks, n] along their columns: only registers get other names."""
    both = tl.permute(tl.join(left, right), (0, 1, 3, 2))
    return tl.reshape(both, [left.shape[0], left.shape[1], 2 * left.shape[2]])


@triton.jit
def _nibbles(tile, format: tl.constexpr):
    """Convert the four fields of words to bf16, exactly: UNITS * quant, or the values of a table."""
    table: tl.constexpr = format.table
    if table != "":
        return looked_up_nibbles(tile, table)
    if EMULATED:
        return _nibble(tile, 0), _nibble(tile, 1), _nibble(tile, 2), _nibble(tile, 3)
    return tl.inline_asm_elementwise(
        INT4_CODE,
        "=r,=r,=r,=r,r",
        [tile],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _bytes(tile, format: tl.constexpr):
    """Convert the two fields of words to bf16, exactly: UNITS * quant."""
    if EMULATED:
        return _byte(tile, 0, format), _byte(tile, 1, format)
    code: tl.constexpr = INT8_CODE if format.kind == "int8" else FP8_CODE
    return tl.inline_asm_elementwise(code, "=r,=r,r", [tile], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)


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
            .reg .b16 a, b;
            .reg .b32 s, o;
            mov.b32 {a, b}, $2;
            mov.b32 s, {a, a};
            mov.b32 o, {b, b};
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
def _nibble(tile, index: tl.constexpr):
    """Convert a field of words for the interpreter."""
    bits = tile.to(tl.int32)
    magnitude, sign = bits >> 4 * (index ^ 1) & 7, bits >> 15 - 4 * index & 1
    return (sign << 31 | magnitude << 20 | 1 << 19).to(tl.float32, bitcast=True)


@triton.jit
def _byte(tile, index: tl.constexpr, format: tl.constexpr):
    """Convert a field of words for the interpreter, which has no assembler."""
    bits = tile.to(tl.int32)
    if format.kind == "fp8":
        return e4m3_number(bits, index)
    return ((bits >> 8 * index & 255) - 128).to(tl.float32) * INT8_UNIT
