"""Where the Triton kernels run: on the GPU, or, for tests, interpreted on the CPU."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
EMULATED: tl.constexpr = tl.constexpr(INTERPRETED)


def vector(values: Tensor) -> Tensor:
    return values.to(DEVICE)


def on_device(values: Tensor | None) -> Tensor | None:
    """A norm, a bias or a table of a layer; one that is there already stays the one copy that layers share."""
    return None if values is None else values.to(DEVICE, torch.float32).contiguous()


@triton.jit
def bound(number):
    """The same number. The interpreter's are arrays of one, which `range` does not take."""
    if EMULATED:
        return number.handle.data.item()
    return number


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
