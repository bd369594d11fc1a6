"""Tilings of the fused matmul, by the shape of the matrix alone, never by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from .device import INTERPRETED
from .matrices import Matrix

ROWS = 16  # rows of activations per program: one tensor-core tile, so that 1 and 16 rows cost the same
WIDE_ROWS = 64  # the same for quantized matrices and more than 16 rows


@dataclass(frozen=True)
class Tiling:
    outputs: int  # per program
    columns: int  # per iteration of its loop
    warps: int
    stages: int  # software-pipelining stages
    rows: int = ROWS  # of activations per program
    parts: int = 1  # split-k factor, for matrices with too few outputs to fill the GPU
    ahead: int = 1 << 16  # bytes of the matrix that a program prefetches under PDL
    slices: int = 1  # column slices of an iteration, distributed over warps that outputs and rows leave idle


WIDE = Tiling(64, 64, 4, 3)  # for WIDE_ROWS
EMULATED = Tiling(128, 128, 4, 1)  # in the interpreter a tile costs the same whatever its size
# Measured on an H200 with whole decode steps: (kind, bytes per weight, N, K, gated) of common models.
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
    """Return the tiling of a matrix. `gated`: its two halves (gate, up) are multiplied together."""
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
    if outputs < 2048:  # small tiles, so that there are enough programs for the GPU
        if columns <= 2048 and not gated:  # the whole matrix is loaded before the states are ready
            warps = 4 if columns <= 1024 else 8
            step = max(128, 1 << (columns - 1).bit_length())
            return Tiling(16, step, warps, 1, rows=8, ahead=0, slices=warps)
        return Tiling(16, 128, 4, 5) if columns % 128 == 0 else Tiling(16, 64, 4, 8)
    # With 64 outputs a warpgroup uses wgmma, and fewer programs read the states.
    return Tiling(64, 128, 4, 4) if gated or outputs >= 16384 else Tiling(64, 128, 4, 6)
