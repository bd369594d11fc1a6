"""The device of the Triton kernels (a GPU, or the CPU under Triton's interpreter), and helpers for the interpreter."""

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
    """Copy a norm weight, a bias or a table to the device as fp32; one that is there already is shared."""
    return None if values is None else values.to(DEVICE, torch.float32).contiguous()


@triton.jit
def loop_bound(number):
    """Return `number` as a bound for `range`: the interpreter's scalars are arrays, which `range` refuses."""
    if EMULATED:
        return number.handle.data.item()
    return number


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """Round to nearest even; the interpreter would truncate fp32 to bf16."""
    if EMULATED and dtype == tl.bfloat16 and value.dtype == tl.float32:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        value = bits.to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit
def multiply(left, right, total):
    """Return total + left @ right, in fp32; the interpreter would read bf16 as integers."""
    if EMULATED:  # products of 16-bit floats are exact in fp32
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")
