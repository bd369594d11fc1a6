"""Matrices as the GPU multiplies them: floats as they are, GGUF's formats in one of two grouped layouts.

All are row by row, so that some rows of a matrix are a matrix. Numbers that stand side by side in a row share a scale
and a minimum: number = scale * quant + minimum. int8: a byte a number. int4: numbers 0-15 of a group of 32 are the low
nibbles of its 16 bytes and numbers 16-31 the high ones, so a tile of bytes gives two tiles of numbers without moving
any of them between lanes. Scales and minima are halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..blocks import FORMATS, Groups, dequantise
from ..structures import Weight
from .device import DEVICE, INTERPRETED

CHUNK = 1 << 25  # numbers that are converted at a time: temporaries stay small beside a model
NIBBLE_GROUP = 32  # numbers that share a scale in the int4 layout
FOUR_BITS = ("q4_0", "q4_1", "q4_k")
WITH_MINIMA = ("q4_1", "q5_1", "q4_k", "q5_k")
EXPANDED = 0 if INTERPRETED else 2048  # shorter rows are kept as bf16: to unpack them takes longer than to read them
MOST_TILES = 512  # of a matrix whose tiles are shared between programs
ALIGNMENT = 16  # bytes that are loaded at once
WIDEST = (torch.float32, torch.float16, torch.bfloat16)  # of mixed floats the first kind that occurs


@dataclass(frozen=True)
class Matrix:
    kind: Literal["float", "int8", "int4"]
    shape: tuple[int, int]  # N, K
    data: Tensor  # [N, K] floats or int8, or [N, K / 2] uint8
    compute: torch.dtype  # of both factors when they are multiplied; sums are fp32
    group: int = 1  # numbers that share a scale: 16 or 32
    scales: Tensor | None = None  # [N, K / group] f16
    minima: Tensor | None = None  # [N, K / group] f16; None: all 0
    fixed: bool = False  # whether a row's product may not depend, to the bit, on how many rows there are
    arrivals: Tensor = field(default_factory=lambda: torch.zeros(MOST_TILES, dtype=torch.int32, device=DEVICE))


def matrix(weight: Weight, *, fixed: bool = False) -> Matrix:
    return pack([weight], fixed)


def pack(weights: Sequence[Weight], fixed: bool = False) -> Matrix:
    """Matrices with rows of one length, one below the other."""
    assert len({weight.shape[1] for weight in weights}) == 1, [weight.shape for weight in weights]
    if not all(FORMATS[weight.kind].quantised for weight in weights) or weights[0].shape[1] <= EXPANDED:
        return _floats(weights, fixed)
    if all(weight.kind in FOUR_BITS for weight in weights):
        return _grouped(weights, "int4", fixed)
    return _grouped(weights, "int8", fixed)


def rows(matrix: Matrix, begin: int, end: int) -> Matrix:
    """Rows begin .. end - 1, in the same memory."""
    return replace(
        matrix,
        shape=(end - begin, matrix.shape[1]),
        data=matrix.data[begin:end],
        scales=None if matrix.scales is None else matrix.scales[begin:end],
        minima=None if matrix.minima is None else matrix.minima[begin:end],
    )


def _floats(weights: Sequence[Weight], fixed: bool) -> Matrix:
    kinds = {FORMATS[weight.kind].dtype for weight in weights}
    dtype = next((kind for kind in WIDEST if kind in kinds), torch.bfloat16)
    parts = [
        weight.data.reshape(weight.shape).to(DEVICE, dtype)
        if FORMATS[weight.kind].dtype
        else dequantise(replace(weight, data=weight.data.to(DEVICE))).to(dtype)
        for weight in weights
    ]
    data = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)  # [N, K]
    if data.data_ptr() % ALIGNMENT:
        data = data.clone()
    return Matrix("float", (data.shape[0], data.shape[1]), data, dtype, fixed=fixed)


def _grouped(weights: Sequence[Weight], kind: Literal["int8", "int4"], fixed: bool) -> Matrix:
    """Quantised matrices in the layout `kind`; groups are as fine as the finest of them."""
    count, columns = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    group = 16 if any(weight.kind == "q6_k" for weight in weights) else NIBBLE_GROUP
    lowest = kind == "int4" or any(weight.kind in WITH_MINIMA for weight in weights)
    width, dtype = (columns // 2, torch.uint8) if kind == "int4" else (columns, torch.int8)
    data = torch.empty(count, width, dtype=dtype, device=DEVICE)  # [N, K], or [N, K / 2]
    scales = torch.empty(count, columns // group, dtype=torch.float16, device=DEVICE)  # [N, K / group]
    minima = torch.empty_like(scales) if lowest else None
    begin = 0
    for part in (part for weight in weights for part in _split(weight)):
        at = slice(begin, begin + part.quants.numel() // columns)
        begin = at.stop
        if kind == "int4":
            part = _unsigned(part)
        quants = part.quants.reshape(-1, columns)
        data[at] = _nibbles(quants) if kind == "int4" else quants
        scales[at] = _spread(part.scales, scales[at])
        if minima is not None:
            minima[at] = 0 if part.minima is None else _spread(part.minima, minima[at])
    return Matrix(kind, (count, columns), data, torch.bfloat16, group, scales, minima, fixed)


def _split(weight: Weight) -> Iterator[Groups]:
    """The blocks of some rows after the other, taken apart on the device."""
    block = FORMATS[weight.kind]
    assert block.split is not None
    packed = weight.data.reshape(weight.shape[0], -1)  # [N, bytes of a row]
    step = max(CHUNK // weight.shape[1], 1)
    for first in range(0, weight.shape[0], step):
        yield block.split(packed[first : first + step].to(DEVICE).reshape(-1, block.bytes))


def _unsigned(part: Groups) -> Groups:
    """Quants of four bits as 0 .. 15: q4_0 has them as -8 .. 7, without a minimum."""
    return part if part.minima is not None else Groups(part.quants + 8, part.scales, -8 * part.scales)


def _nibbles(quants: Tensor) -> Tensor:
    """[N, K] of 0 .. 15 -> [N, K / 2] bytes."""
    low, high = quants.view(torch.uint8).reshape(len(quants), -1, 2, NIBBLE_GROUP // 2).unbind(2)  # [N, K / 32, 16]
    return (low | (high << 4)).flatten(1)


def _spread(values: Tensor, out: Tensor) -> Tensor:
    """One value a group, for the groups of `out` [rows, K / group], which may be finer."""
    values = values.reshape(len(out), -1)
    return values.repeat_interleave(out.shape[1] // values.shape[1], 1)
