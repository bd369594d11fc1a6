"""The storage formats of weights: how many bytes a block has, what its bits mean as fp32, and how floats become blocks.

A quantized row is a string of blocks; a block holds `elements` numbers in `bytes` bytes: its scales and its packed
quants. The layouts are GGUF's. In the shapes below X is the number of blocks.

`quantize_weight` writes blocks of 32: int8 is q8_0 (symmetric), int5 is q5_1 and int4 is q4_1 (asymmetric).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ..errors import UserError
from .structures import Weight

DEQUANTIZE_CHUNK = 1 << 22  # numbers that are expanded at a time: temporaries stay small beside the result
QUANTIZE_CHUNK = 1 << 20  # weights that are quantized at a time: bounds the temporary memory
BLOCK = 32  # weights in a block that `quantize_weight` writes
# Fractions of a block's range to clip below and above: outliers lose a little precision, all others gain.
CUTS = tuple(product((0.0, 0.03, 0.06, 0.09, 0.12), repeat=2))


@dataclass(frozen=True)
class Groups:
    """Unpacked blocks. Neighbouring weights form groups; weight = scale * quant + minimum."""

    quants: Tensor  # [X, elements] int8
    scales: Tensor  # [X, groups] f32
    minima: Tensor | None = None  # [X, groups] f32

    def numbers(self) -> Tensor:
        """Return the weights: [X, elements] f32."""
        quants = self.quants.reshape(*self.scales.shape, -1).to(torch.float32)  # [X, groups, elements of a group]
        numbers = self.scales[:, :, None] * quants
        return (numbers if self.minima is None else numbers + self.minima[:, :, None]).flatten(1)


@dataclass(frozen=True)
class Format:
    elements: int  # numbers in a block
    bytes: int
    dtype: torch.dtype | None = None  # of a plain float format
    split: Callable[[Tensor], Groups] | None = None  # of blocks [X, bytes] uint8

    @property
    def quantized(self) -> bool:
        return self.split is not None


def row_bytes(kind: str, columns: int) -> int:
    """Return the bytes of a row of `columns` weights, a multiple of the format's block."""
    block = FORMATS[kind]
    if columns % block.elements:
        raise ValueError(f"a row of {columns} numbers is no multiple of the {block.elements} in a block of `{kind}`")
    return columns // block.elements * block.bytes


def dequantize(weight: Weight) -> Tensor:
    """Return the fp32 values of a weight in its logical shape."""
    block = FORMATS[weight.kind]
    if block.split is None:
        return weight.data.reshape(weight.shape).to(torch.float32)
    packed = weight.data.reshape(-1, block.bytes)  # [X, bytes]
    out = torch.empty(packed.shape[0], block.elements, device=packed.device)  # [X, elements]
    step = max(DEQUANTIZE_CHUNK // block.elements, 1)
    for first in range(0, packed.shape[0], step):
        out[first : first + step] = block.split(packed[first : first + step]).numbers()
    return out.reshape(weight.shape)


def _half(packed: Tensor) -> Tensor:
    """Bytes [X, 2n] that are n halves, as fp32 [X, n]."""
    return packed.contiguous().view(torch.float16).to(torch.float32)


def _fields(packed: Tensor, width: int) -> Tensor:
    """Bytes [..., n] as fields of `width` bits, all the lowest first: [..., 8 / width, n]."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed.unsqueeze(-2) >> shifts) & ((1 << width) - 1)


def _nibbles(packed: Tensor) -> Tensor:
    """[X, 16] bytes: the low nibbles are numbers 0-15, the high ones 16-31: [X, 32]."""
    return _fields(packed, 4).flatten(-2)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[X, 4] bytes, bit i belongs to number i: [X, 32], each 0 or 16."""
    return _fields(packed, 1).transpose(-1, -2).flatten(-2) << 4


def _q4_0(packed: Tensor) -> Groups:
    return Groups(_nibbles(packed[:, 2:]).to(torch.int8) - 8, _half(packed[:, :2]))


def _q4_1(packed: Tensor) -> Groups:
    return Groups(_nibbles(packed[:, 4:]).to(torch.int8), _half(packed[:, :2]), _half(packed[:, 2:4]))


def _q5_0(packed: Tensor) -> Groups:
    quants = _nibbles(packed[:, 6:]) | _fifth_bits(packed[:, 2:6])
    return Groups(quants.to(torch.int8) - 16, _half(packed[:, :2]))


def _q5_1(packed: Tensor) -> Groups:
    quants = _nibbles(packed[:, 8:]) | _fifth_bits(packed[:, 4:8])
    return Groups(quants.to(torch.int8), _half(packed[:, :2]), _half(packed[:, 2:4]))


def _q8_0(packed: Tensor) -> Groups:
    return Groups(packed[:, 2:].view(torch.int8), _half(packed[:, :2]))


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The head of q4_k and q5_k, [X, 16] bytes: scales and minima of eight groups of 32, each [X, 8].

    Two halves multiply six-bit integers: groups 0-3 keep theirs in the low bits of bytes 4-7 (scale) and 8-11
    (minimum); groups 4-7 have their low nibbles in bytes 12-15 and their two high bits on top of bytes 4-11. What is
    stored is the minimum's size below zero.
    """
    scale, minimum, mixed = packed[:, 4:16].reshape(-1, 3, 4).unbind(1)  # [X, 4] each
    scales = torch.cat([scale & 63, (mixed & 15) | (scale >> 6 << 4)], 1)  # [X, 8]
    minima = torch.cat([minimum & 63, (mixed >> 4) | (minimum >> 6 << 4)], 1)
    unit = _half(packed[:, :4])  # [X, 2]
    return unit[:, :1] * scales, -(unit[:, 1:] * minima)


def _nibbles_k(packed: Tensor) -> Tensor:
    """[X, 128] bytes, 32 of them for two groups, the low nibbles for the first: [X, 8, 32]."""
    return _fields(packed.reshape(-1, 4, 32), 4).reshape(-1, 8, 32)


def _q4_k(packed: Tensor) -> Groups:
    return Groups(_nibbles_k(packed[:, 16:]).flatten(1).to(torch.int8), *_scales_and_minima(packed))


def _q5_k(packed: Tensor) -> Groups:
    # Bit g of byte i belongs to number i of group g.
    quants = _nibbles_k(packed[:, 48:]) | (_fields(packed[:, 16:48], 1) << 4)  # [X, 8, 32]
    return Groups(quants.flatten(1).to(torch.int8), *_scales_and_minima(packed))


def _q6_k(packed: Tensor) -> Groups:
    low = _fields(packed[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)  # 64 bytes serve 128 numbers
    high = _fields(packed[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256)  # and so do 32 of these
    quants = (low | (high << 4)).to(torch.int8) - 32
    return Groups(quants, _half(packed[:, 208:]) * packed[:, 192:208].view(torch.int8))  # a scale for 16 numbers


FORMATS = {
    "f32": Format(1, 4, torch.float32),
    "f16": Format(1, 2, torch.float16),
    "bf16": Format(1, 2, torch.bfloat16),
    "q4_0": Format(32, 18, split=_q4_0),
    "q4_1": Format(32, 20, split=_q4_1),
    "q5_0": Format(32, 22, split=_q5_0),
    "q5_1": Format(32, 24, split=_q5_1),
    "q8_0": Format(32, 34, split=_q8_0),
    "q4_k": Format(256, 144, split=_q4_k),
    "q5_k": Format(256, 176, split=_q5_k),
    "q6_k": Format(256, 210, split=_q6_k),
}


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
    step = max(QUANTIZE_CHUNK // columns, 1)
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
    return torch.cat([*_as_bytes(scale, minimum), fifth.sum(2, dtype=torch.uint8), _pack_nibbles(quants & 15)], 1)


def _pack_int4(x: Tensor) -> Tensor:
    """[X, 32] f32 -> [X, 20] bytes: half scale, half minimum, 32 nibbles."""
    scale, minimum, quants = _best_range(x, 15)
    return torch.cat([*_as_bytes(scale, minimum), _pack_nibbles(quants)], 1)


def _as_bytes(*halves: Tensor) -> tuple[Tensor, ...]:
    return tuple(one.half().view(torch.uint8) for one in halves)


def _pack_nibbles(quants: Tensor) -> Tensor:
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
