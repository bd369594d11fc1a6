"""Helpers of all Triton kernels: the device (a GPU, or the CPU under Triton's interpreter), rounding, PDL.

Programmatic dependent launch (PDL, compute capability 9): a kernel starts before its predecessor has ended. A kernel
that is launched with LAUNCH calls `wait` before it touches memory that another kernel reads or writes. Before that it
may prefetch weights, which no kernel writes. Its predecessor has waited too, so all earlier kernels have ended. Kernels
without PDL keep the usual order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra import cuda
from triton.runtime import driver

from ..compilations import COMPILATIONS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
EMULATED: tl.constexpr = tl.constexpr(INTERPRETED)
_SUPPORTED = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
PDL_ENABLED: tl.constexpr = tl.constexpr(_SUPPORTED)
LAUNCH: dict[str, bool] = {"launch_pdl": True} if _SUPPORTED else {}
LANES: tl.constexpr = tl.constexpr(128)


def _count_compilations() -> None:
    """Have Triton report each kernel that it compiles, or loads from its cache on disk."""
    earlier = knobs.compilation.listener

    def count(**report: Any) -> None:
        COMPILATIONS.add(report["src"].name, report["cache_hit"])
        if earlier is not None:
            earlier(**report)

    knobs.compilation.listener = count


_count_compilations()


def vector(values: Tensor) -> Tensor:
    return values.to(DEVICE)


def record(run: Callable[[Any], None]) -> Any | None:
    return None  # CUDA graphs capture whole decode steps instead (device/graphs.py)


def on_device(values: Tensor | None) -> Tensor | None:
    """Copy a norm weight, a bias or a table to the device as fp32; one that is there already is shared."""
    return None if values is None else values.to(DEVICE, torch.float32).contiguous()


@cache
def shared_memory() -> int:
    """Return the bytes of shared memory that a program may use: 99 KiB to 227 KiB; no limit in the interpreter."""
    if INTERPRETED:
        return 1 << 62
    found = driver.active.utils.get_device_properties(driver.active.get_current_device())
    return int(found["max_shared_mem"])


@triton.jit
def loop_bound(number):
    """Return `number` as a bound for `range`: the interpreter's scalars are arrays, which `range` refuses."""
    if EMULATED:
        return number.handle.data.item()
    return number


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """Round to nearest even; the interpreter would truncate fp32 to bf16 and to small e4m3."""
    if EMULATED and dtype == tl.bfloat16 and value.dtype == tl.float32:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        value = bits.to(tl.float32, bitcast=True)
    if EMULATED and dtype == tl.float8e4nv and value.dtype == tl.float32:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        small = (value + 24576.0) - 24576.0  # below 2^-6 to multiples of 2^-9
        value = tl.where(tl.abs(value) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return value.to(dtype)


@triton.jit
def multiply(left, right, total):
    """Return total + left @ right, in fp32; the interpreter would read bf16 as integers."""
    if EMULATED:  # products of 16-bit floats are exact in fp32
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def wait(release: tl.constexpr = True):
    """Wait until all earlier kernels have ended and their writes are visible.

    Then let the next kernel start, or leave that to `release`.
    """
    if PDL_ENABLED:
        cuda.gdc_wait()
        if release:
            cuda.gdc_launch_dependents()


@triton.jit
def release():
    """Let the next kernel start when all programs of this one have come here or ended."""
    if PDL_ENABLED:
        cuda.gdc_launch_dependents()


@triton.jit
def fetch(rows, stride: tl.constexpr, size: tl.constexpr):
    """Prefetch the first `size` bytes of each of `rows` into L2: pointers [n], `stride` bytes apart."""
    pieces: tl.constexpr = LANES // rows.shape[0] if rows.shape[0] < LANES else 1
    share: tl.constexpr = (size if size < stride else stride) // pieces // 16 * 16
    if PDL_ENABLED and share > 0 and stride % 16 == 0:
        # One request per lane: rows [n] spread over [n, pieces].
        address = rows.to(tl.int64)[:, None] + share * tl.arange(0, pieces)[None, :]
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [address, tl.full(address.shape, share, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
