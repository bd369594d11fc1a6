"""Conversions and products of tiles that mean the same under Triton's interpreter, which knows bf16 only by halves."""

from __future__ import annotations

import triton
import triton.language as tl

from .place import INTERPRETED

EMULATED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """fp32 to the nearest number of `dtype`, the even one of two; the interpreter would cut bf16 off."""
    if EMULATED and dtype == tl.bfloat16 and value.dtype == tl.float32:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        value = bits.to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit
def multiply(left, right, total):
    """total + left @ right, in fp32; the interpreter would read bf16 as integers."""
    if EMULATED:  # products of halves are exact in fp32
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")
