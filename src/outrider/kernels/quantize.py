"""Quantization of float weights in blocks of 32: int8 to q8_0 (symmetric), int5 to q5_1, int4 to q4_1 (asymmetric)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from ..errors import UserError
from .blocks import FORMATS, row_bytes
from .structures import Weight

BLOCK = 32
CHUNK = 1 << 20  # weights that are quantized at a time: bounds the temporary memory
# Fractions of a block's range to clip below and above: outliers lose a little precision, all others gain.
CUTS = tuple(product((0.0, 0.03, 0.06, 0.09, 0.12), repeat=2))


def quantize_weight(weight: Weight, to: str) -> Weight:
    """Quantize a float matrix [N, K]; `to` is int8, int5 or int4."""
    if to not in TARGETS:
        raise UserError(f"`quantize` is `{to}`: expected one of {', '.join(TARGETS)}")
    rows, columns = weight.shape
    if FORMATS[weight.kind].quantized:
        raise ValueError(f"a matrix of `{weight.kind}` is quantised already")
    if columns % BLOCK:
        raise UserError(f"a matrix with rows of {columns} numbers has no whole blocks of {BLOCK}: drop `quantize`")
    kind, pack = TARGETS[to]
    source = weight.data.reshape(rows, columns)
    packed = torch.empty(rows, row_bytes(kind, columns), dtype=torch.uint8)  # [N, bytes per row]
    step = max(CHUNK // columns, 1)
    for first in range(0, rows, step):
        part = source[first : first + step].to(torch.float32).reshape(-1, BLOCK)  # [X, 32]
        packed[first : first + step] = pack(part).reshape(-1, packed.shape[1])
    return Weight(kind, weight.shape, packed)


def _pack_int8(x: Tensor) -> Tensor:
    """[X, 32] f32 -> [X, 34] bytes: half scale, 32 int8."""
    scale = (x.abs().amax(1, keepdim=True) / 127).half()
    quants = _divide(x, scale.float()).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), quants.view(torch.uint8)], 1)


def _pack_int5(x: Tensor) -> Tensor:
    """[X, 32] f32 -> [X, 24] bytes: half scale, half minimum, 32 fifth bits, 32 nibbles."""
    scale, minimum, quants = _best_range(x, 31)
    fifth = (quants >> 4).view(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)  # number i's is bit i
    return torch.cat([*_as_bytes(scale, minimum), fifth.sum(2, dtype=torch.uint8), _nibbles(quants & 15)], 1)


def _pack_int4(x: Tensor) -> Tensor:
    """[X, 32] f32 -> [X, 20] bytes: half scale, half minimum, 32 nibbles."""
    scale, minimum, quants = _best_range(x, 15)
    return torch.cat([*_as_bytes(scale, minimum), _nibbles(quants)], 1)


def _as_bytes(*halves: Tensor) -> tuple[Tensor, ...]:
    return tuple(one.half().view(torch.uint8) for one in halves)


def _nibbles(quants: Tensor) -> Tensor:
    """[X, 32] to [X, 16] bytes."""
    return quants[:, :16] | (quants[:, 16:] << 4)


def _best_range(x: Tensor, highest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the clipped range with the least squared error: scale and minimum [X, 1], rounded to fp16, and the quants
    0 .. `highest` [X, 32] uint8."""
    low, high = x.aminmax(dim=1, keepdim=True)
    best = torch.full_like(low, torch.inf)
    best_scale, best_minimum = torch.zeros_like(low), torch.zeros_like(low)
    for below, above in CUTS:
        scale = ((high - low) * ((1 - below - above) / highest)).half().float()
        minimum = (low + (high - low) * below).half().float()
        wrong = _levels(x, scale, minimum, highest).mul_(scale).add_(minimum).sub_(x).square_().sum(1, keepdim=True)
        better = wrong < best
        best = torch.where(better, wrong, best)
        best_scale = torch.where(better, scale, best_scale)
        best_minimum = torch.where(better, minimum, best_minimum)
    return best_scale, best_minimum, _levels(x, best_scale, best_minimum, highest).to(torch.uint8)


def _levels(x: Tensor, scale: Tensor, minimum: Tensor, highest: int) -> Tensor:
    return _divide(x - minimum, scale).round_().clamp_(0, highest)


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale, or 0 if the scale is 0: a block of equal weights, or of weights too small for fp16."""
    return x * torch.where(scale == 0, 0, 1 / scale)


TARGETS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "int8": ("q8_0", _pack_int8),
    "int5": ("q5_1", _pack_int5),
    "int4": ("q4_1", _pack_int4),
}
