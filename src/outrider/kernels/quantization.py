"""The storage formats of weights: how many bytes a block has, and what its bits mean as fp32.

A quantized row is a string of blocks; a block holds `elements` numbers in `bytes` bytes: its scales and its packed
quants. The layouts are GGUF's, except fp8, and q4_z and q8_z, which are q4_1 and q8_0 with zero points instead of
minima: checkpoints of GPTQ, AWQ and compressed-tensors have these. In the shapes below X is the number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from .structures import Weight

BLOCK = 32  # weights in a block that `kernels.cpu.quantize_weight` writes
# The 16 values of a nibble: those of iq4_nl grow with their distance from 0; those of mxfp4 are twice an fp4 (e2m1).
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# Bytes of a block that are halves, by which all its numbers are multiplied; the first two in other formats. Zero points
# are no factors.
SCALES = {"q4_1": (0, 4), "q5_1": (0, 4), "q4_k": (0, 4), "q5_k": (0, 4), "q6_k": (208, 210)}
INT4_LEVELS = 15  # above the minimum
CUTS = (0.0, 0.03, 0.06, 0.09, 0.12)  # fractions of a block's range that int4 clips at each end (csrc/quantize.cpp)
DEQUANTIZE_CHUNK = 1 << 22  # numbers that are expanded at a time: temporaries stay small beside the result


@dataclass(frozen=True)
class Groups:
    """Unpacked blocks. Neighbouring weights form groups; weight = scale * quant + minimum."""

    quants: Tensor  # [X, elements] int8, or float8_e4m3fn
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
    if weight.order is not None:
        stored = dequantize(replace(weight, order=None))
        return torch.empty_like(stored).index_copy_(1, weight.order.to(stored.device, torch.int64), stored)
    block = FORMATS[weight.kind]
    if block.split is None:
        return weight.data.reshape(weight.shape).to(torch.float32)
    packed = weight.data.reshape(-1, block.bytes)  # [X, bytes]
    out = torch.empty(packed.shape[0], block.elements, device=packed.device)  # [X, elements]
    step = max(DEQUANTIZE_CHUNK // block.elements, 1)
    for first in range(0, packed.shape[0], step):
        out[first : first + step] = block.split(packed[first : first + step]).numbers()
    return out.reshape(weight.shape)


def doubled(weight: Weight) -> Weight:
    """Return a matrix with every number times 2, which is exact: the scales and minima of blocks are floats."""
    block = FORMATS[weight.kind]
    if weight.data.is_meta:  # of a model whose weights are not read
        return weight
    if block.split is None:
        return replace(weight, data=2 * weight.data)
    packed = weight.data.reshape(-1, block.bytes).clone()  # [X, bytes]
    if weight.kind == "mxfp4":
        packed[:, 0] += 1  # an exponent
    elif weight.kind == "fp8":
        packed[:, :4] = (2 * packed[:, :4].contiguous().view(torch.float32)).view(torch.uint8)
    else:
        first, last = SCALES.get(weight.kind, (0, 2))
        packed[:, first:last] = (2 * packed[:, first:last].contiguous().view(torch.float16)).view(torch.uint8)
    return replace(weight, data=packed.reshape(weight.data.shape))


def quantize_fp8(weight: Weight) -> Weight:
    """Quantize a float matrix [N, K] to e4m3 with a scale for each row, on its own device."""
    rows, columns = weight.shape
    out = torch.empty(rows, row_bytes("fp8", columns), dtype=torch.uint8, device=weight.data.device)
    step = max(DEQUANTIZE_CHUNK // columns, 1)
    for first in range(0, rows, step):
        values = weight.data[first : first + step].to(torch.float32)  # [rows, K]
        scales = values.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max  # [rows, 1]
        quants = (values / scales.clamp(min=torch.finfo(torch.float32).tiny)).to(torch.float8_e4m3fn)
        blocks = out[first : first + step].view(len(values), -1, 4 + BLOCK)
        blocks[:, :, :4] = scales.view(torch.uint8)[:, None]
        blocks[:, :, 4:] = quants.view(torch.uint8).view(len(values), -1, BLOCK)
    return Weight("fp8", weight.shape, out)


def quantize_int8(weight: Weight) -> Weight:
    """Quantize a float matrix [N, K] to q8_0 on its own device: the bits that the native kernel writes."""
    rows, columns = weight.shape
    out = torch.empty(rows, row_bytes("q8_0", columns), dtype=torch.uint8, device=weight.data.device)
    step = max(DEQUANTIZE_CHUNK // columns, 1)
    for first in range(0, rows, step):
        values = weight.data[first : first + step].to(torch.float32).reshape(-1, BLOCK)  # [X, 32]
        scales = (values.abs().amax(1, keepdim=True) / 127).to(torch.float16)  # [X, 1]
        inverse = torch.where(scales == 0, 0.0, 1 / scales.to(torch.float32))
        quants = (values * inverse).clamp(-127, 127).nan_to_num(-127).round().to(torch.int8)
        blocks = out[first : first + step].view(len(values), 2 + BLOCK)
        blocks[:, :2] = scales.view(torch.uint8)
        blocks[:, 2:] = quants.view(torch.uint8)
    return Weight("q8_0", weight.shape, out)


def quantize_int4(weight: Weight) -> Weight:
    """Quantize a float matrix [N, K] to q4_1 on its own device: the bits that the native kernel writes."""
    rows, columns = weight.shape
    out = torch.empty(rows, row_bytes("q4_1", columns), dtype=torch.uint8, device=weight.data.device)
    step = max(DEQUANTIZE_CHUNK // columns, 1)
    for first in range(0, rows, step):
        values = weight.data[first : first + step].to(torch.float32).reshape(-1, BLOCK)  # [X, 32]
        scales, minima = _best_ranges(values)  # [X, 1] f16
        quants = _levels(values, scales, minima).nan_to_num_(0).to(torch.uint8)
        blocks = out[first : first + step].view(len(values), 4 + BLOCK // 2)
        blocks[:, :2], blocks[:, 2:4] = scales.view(torch.uint8), minima.view(torch.uint8)
        blocks[:, 4:] = quants[:, : BLOCK // 2] | quants[:, BLOCK // 2 :] << 4
    return Weight("q4_1", weight.shape, out)


def _best_ranges(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and minimum of the clipped range of each block [X, 32] with the least squared error: [X, 1] f16.

    Blocks that are not all finite have none: both are 0. Errors are added in the order of the native kernel.
    """
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)  # [X, 1]
    least = torch.full_like(low, torch.inf)
    best_scale, best_minimum = (torch.zeros_like(low, dtype=torch.float16) for _ in range(2))
    for below, above in product(np.array(CUTS, np.float32), repeat=2):
        scale = ((high - low) * float((np.float32(1) - below - above) / np.float32(INT4_LEVELS))).to(torch.float16)
        minimum = (low + (high - low) * float(below)).to(torch.float16)
        levels = _levels(values, scale, minimum)
        errors = levels.mul_(scale.to(torch.float32)).add_(minimum.to(torch.float32)).sub_(values)
        squares = errors.square_().view(-1, BLOCK // 4, 4)
        sums = squares[:, 0]  # [X, 4]
        for index in range(1, BLOCK // 4):
            sums = sums + squares[:, index]
        total = (sums[:, 0] + sums[:, 1] + (sums[:, 2] + sums[:, 3]))[:, None]
        better = total < least
        least = torch.where(better, total, least)
        best_scale = torch.where(better, scale, best_scale)
        best_minimum = torch.where(better, minimum, best_minimum)
    return best_scale, best_minimum


def _levels(values: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """Return the nearest of the 16 levels of each value, as a float: [X, 32]."""
    scales = scales.to(torch.float32)
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    return (values - minima.to(torch.float32)).mul_(inverse).clamp_(0, INT4_LEVELS).round_()


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


def _fp8(packed: Tensor) -> Groups:
    """A fp32 scale, then 32 e4m3 floats. Scales of rows, or of blocks of rows and columns, are repeated."""
    return Groups(packed[:, 4:].contiguous().view(torch.float8_e4m3fn), packed[:, :4].contiguous().view(torch.float32))


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


def _looked_up(packed: Tensor, values: tuple[int, ...]) -> Tensor:
    """[X, 16] bytes of nibbles, which are indices into 16 values: [X, 32] int8."""
    return torch.tensor(values, dtype=torch.int8, device=packed.device)[_nibbles(packed).long()]


def _iq4_nl(packed: Tensor) -> Groups:
    return Groups(_looked_up(packed[:, 2:], IQ4_NL), _half(packed[:, :2]))


def _mxfp4(packed: Tensor) -> Groups:
    # The first byte is the scale's exponent. Halved, because the values are doubled, the smallest are subnormal.
    exponent = packed[:, :1].to(torch.int32)
    scales = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23).view(torch.float32)
    return Groups(_looked_up(packed[:, 1:], MXFP4), scales)


def _zero_points(quants: Tensor, halves: Tensor) -> Groups:
    """weight = scale * (quant - zero point): both products are exact in fp32, and so is their sum."""
    scale, zero = _half(halves).tensor_split(2, 1)
    return Groups(quants, scale, -(scale * zero))


def _q4_z(packed: Tensor) -> Groups:
    return _zero_points(_nibbles(packed[:, 4:]).to(torch.int8), packed[:, :4])


def _q8_z(packed: Tensor) -> Groups:
    return _zero_points(packed[:, 4:].view(torch.int8), packed[:, :4])


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
    "iq4_nl": Format(32, 18, split=_iq4_nl),
    "mxfp4": Format(32, 17, split=_mxfp4),
    "q4_z": Format(32, 20, split=_q4_z),
    "q8_z": Format(32, 36, split=_q8_z),
    "fp8": Format(BLOCK, 4 + BLOCK, split=_fp8),
}
