"""Weight matrices on the GPU: floats unchanged, GGUF's quantized formats in one of two grouped layouts.

All layouts are row-major, so that a range of rows is a matrix. Groups of neighbouring weights share a scale and a
minimum: weight = scale * quant + minimum. int8: one byte per weight. int4: weights 0-15 of a group of 32 are the low
nibbles of its 16 bytes, weights 16-31 the high ones, so that a tile of bytes unpacks into two tiles without moving
data between lanes. Scales and minima are fp16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ..quantization import FORMATS, Groups, dequantize
from ..structures import Weight
from .device import DEVICE, INTERPRETED

CHUNK = 1 << 25  # weights that are converted at a time: bounds the temporary memory
NIBBLE_GROUP = 32  # weights that share a scale in the int4 layout
FOUR_BITS = ("q4_0", "q4_1", "q4_k", "q4_z")
WITH_MINIMA = ("q4_1", "q5_1", "q4_k", "q5_k", "q4_z", "q8_z")
EXPANDED = 0 if INTERPRETED else 2048  # rows up to this length are stored as bf16: unpacking costs more than reading
MOST_TILES = 512  # output tiles of a matrix under split-k: the number of its counters
ALIGNMENT = 16  # bytes: vectorised loads need it
WIDEST = (torch.float32, torch.float16, torch.bfloat16)  # mixed float matrices take the first dtype that occurs


@dataclass(frozen=True)
class Matrix:
    kind: Literal["float", "int8", "int4"]
    shape: tuple[int, int]  # N, K
    data: Tensor  # [N, K] floats or int8, or [N, K / 2] uint8
    compute: torch.dtype  # of both factors of the matmul; it accumulates in fp32
    group: int = 1  # weights that share a scale: 16 or 32
    scales: Tensor | None = None  # [N, K / group] f16
    minima: Tensor | None = None  # [N, K / group] f16; None: all 0
    batch_invariant: bool = False  # a row's result must not depend on the number of rows
    split_counters: Tensor = field(default_factory=lambda: torch.zeros(MOST_TILES, dtype=torch.int32, device=DEVICE))


def matrix(weight: Weight, *, batch_invariant: bool = False) -> Matrix:
    return pack([weight], batch_invariant)


def pack(weights: Sequence[Weight], batch_invariant: bool = False, expand: bool = True) -> Matrix:
    """Stack matrices with equal row length. `expand`: store short rows of quantized blocks as bf16."""
    assert len({weight.shape[1] for weight in weights}) == 1, [weight.shape for weight in weights]
    integers = all(FORMATS[weight.kind].quantized and weight.kind != "fp8" for weight in weights)
    if not integers or (expand and weights[0].shape[1] <= EXPANDED):
        return _floats(weights, batch_invariant)
    if all(weight.kind in FOUR_BITS for weight in weights):
        return _grouped(weights, "int4", batch_invariant)
    return _grouped(weights, "int8", batch_invariant)


def rows(matrix: Matrix, begin: int, end: int) -> Matrix:
    """Return rows begin .. end - 1 as a view."""
    return replace(
        matrix,
        shape=(end - begin, matrix.shape[1]),
        data=matrix.data[begin:end],
        scales=None if matrix.scales is None else matrix.scales[begin:end],
        minima=None if matrix.minima is None else matrix.minima[begin:end],
    )


def _floats(weights: Sequence[Weight], batch_invariant: bool) -> Matrix:
    kinds = {FORMATS[weight.kind].dtype for weight in weights}
    dtype = next((kind for kind in WIDEST if kind in kinds), torch.bfloat16)
    parts = [
        weight.data.reshape(weight.shape).to(DEVICE, dtype)
        if FORMATS[weight.kind].dtype
        else dequantize(replace(weight, data=weight.data.to(DEVICE))).to(dtype)
        for weight in weights
    ]
    data = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)  # [N, K]
    if data.data_ptr() % ALIGNMENT:
        data = data.clone()
    return Matrix("float", (data.shape[0], data.shape[1]), data, dtype, batch_invariant=batch_invariant)


def _grouped(weights: Sequence[Weight], kind: Literal["int8", "int4"], batch_invariant: bool) -> Matrix:
    """Stack quantized matrices in the layout `kind`, with the smallest group size among them."""
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
    return Matrix(kind, (count, columns), data, torch.bfloat16, group, scales, minima, batch_invariant)


def _split(weight: Weight) -> Iterator[Groups]:
    """Unpack the blocks of a range of rows at a time, on the device."""
    block = FORMATS[weight.kind]
    assert block.split is not None
    packed = weight.data.reshape(weight.shape[0], -1)  # [N, bytes of a row]
    step = max(CHUNK // weight.shape[1], 1)
    for first in range(0, weight.shape[0], step):
        yield block.split(packed[first : first + step].to(DEVICE).reshape(-1, block.bytes))


def _unsigned(part: Groups) -> Groups:
    """Shift 4-bit quants to 0 .. 15: those of q4_0 are -8 .. 7, without a minimum."""
    return part if part.minima is not None else Groups(part.quants + 8, part.scales, -8 * part.scales)


def _nibbles(quants: Tensor) -> Tensor:
    """Pack [N, K] values 0 .. 15 into [N, K / 2] bytes."""
    low, high = quants.view(torch.uint8).reshape(len(quants), -1, 2, NIBBLE_GROUP // 2).unbind(2)  # [N, K / 32, 16]
    return (low | (high << 4)).flatten(1)


def _spread(values: Tensor, out: Tensor) -> Tensor:
    """Repeat the value of each group for the groups of `out` [rows, K / group], which may be smaller."""
    values = values.reshape(len(out), -1)
    return values.repeat_interleave(out.shape[1] // values.shape[1], 1)
