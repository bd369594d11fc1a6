"""How a product is cut into programs: by the shape of the matrix alone, never by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from .device import INTERPRETED
from .matrices import Matrix

ROWS = 16  # of activations that a program multiplies: one tile of the tensor cores, so 1 row and 16 cost the same
WIDE_ROWS = 64  # where there are many and the matrix is quantised


@dataclass(frozen=True)
class Tiling:
    outputs: int  # of a program
    columns: int  # of a step of its loop
    warps: int
    stages: int  # steps whose loads are under way
    rows: int = ROWS  # of activations
    parts: int = 1  # programs that share the columns: where the outputs alone would leave much of the GPU idle
    ahead: int = 1 << 16  # bytes of the matrix that a program asks for while the kernel before it still runs
    slices: int = 1  # of the columns of a step, each for some of the warps: where outputs and rows give them no work


WIDE = Tiling(64, 64, 4, 3)  # for WIDE_ROWS
EMULATED = Tiling(128, 128, 4, 1)  # the interpreter takes as long for a small tile as for a large one
# From an H200, whole steps of a model timed: (storage, bytes of a number, N, K, gated) of matrices that matter.
TUNED: dict[tuple[str, int, int, int, bool], Tiling] = {
    ("float", 2, 6144, 4096, False): Tiling(64, 128, 4, 6, ahead=1 << 15),
    ("float", 2, 4096, 4096, False): Tiling(64, 128, 4, 6, parts=2, ahead=1 << 15),
    ("float", 2, 28672, 4096, True): Tiling(64, 128, 4, 4, ahead=1 << 15),
    ("float", 2, 4096, 14336, False): Tiling(64, 128, 4, 6, parts=2),
    ("float", 2, 128256, 4096, False): Tiling(64, 128, 4, 4),
    ("float", 2, 32000, 4096, False): Tiling(128, 64, 4, 5, ahead=1 << 14),
    ("float", 2, 4096, 12288, False): Tiling(64, 128, 4, 6, parts=2),
    ("float", 2, 960, 576, False): Tiling(16, 1024, 4, 1, rows=8, ahead=0, slices=4),
    ("float", 2, 576, 576, False): Tiling(16, 1024, 4, 1, rows=8, ahead=0, slices=4),
    ("float", 2, 3072, 576, True): Tiling(16, 64, 2, 8, rows=8, ahead=0),
    ("float", 2, 576, 1536, False): Tiling(16, 2048, 8, 1, rows=8, ahead=0, slices=8),
    ("float", 2, 49152, 576, False): Tiling(128, 64, 4, 5),
    ("int8", 1, 28672, 4096, True): Tiling(128, 128, 4, 3),
    ("int8", 1, 4096, 14336, False): Tiling(32, 256, 4, 3),
    ("int4", 1, 28672, 4096, True): Tiling(64, 128, 4, 4),
    ("int4", 1, 4096, 14336, False): Tiling(32, 256, 4, 3),
}


def tiling(matrix: Matrix, gated: bool) -> Tiling:
    """`gated`: two halves of the matrix are multiplied side by side."""
    outputs, columns = matrix.shape
    return choose(matrix.kind, matrix.data.element_size(), outputs, columns, gated)


@cache
def choose(kind: str, size: int, outputs: int, columns: int, gated: bool) -> Tiling:
    if INTERPRETED:
        return EMULATED
    found = TUNED.get((kind, size, outputs, columns, gated))
    if found is not None:
        return found
    if kind != "float":
        return Tiling(64, 128, 4, 3) if outputs >= 16384 else Tiling(32, 256, 4, 3)
    if size == torch.float32.itemsize:
        return Tiling(16, 64, 4, 3)
    if outputs < 2048:  # few programs, or none would be left for most of the GPU
        if columns <= 2048 and not gated:  # all of the matrix is under way before the states are there
            warps = 4 if columns <= 1024 else 8
            step = max(128, 1 << (columns - 1).bit_length())
            return Tiling(16, step, warps, 1, rows=8, ahead=0, slices=warps)
        return Tiling(16, 128, 4, 5) if columns % 128 == 0 else Tiling(16, 64, 4, 8)
    # From 64 outputs on a warpgroup multiplies by itself, and the states are read by fewer programs.
    return Tiling(64, 128, 4, 4) if gated or outputs >= 16384 else Tiling(64, 128, 4, 6)
