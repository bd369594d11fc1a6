"""Helpers of all Triton kernels: the device (a GPU, or the CPU under Triton's interpreter), rounding, PDL.

Programmatic dependent launch (PDL, compute capability 9): a kernel starts when all programs of the one before have
released it or ended. A kernel that is launched with LAUNCH calls `wait` before it touches memory that another kernel
of the pass reads or writes. `wait` returns when the kernel before has ended; that one has waited too, so all earlier
kernels have ended. Before it, a kernel may load weights, which no kernel writes.

Rope and attention also load the batch before they wait, and decode attention the keys of earlier steps: their
writers have ended by then, because a kernel releases the next one after its own wait. Norms and `split_row` alone
release before it, so that the matmul behind them loads weights meanwhile. So neither may follow the writer of a batch
or of keys directly, with rope or attention behind it.

Kernels without PDL keep the usual order.
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
E4M3_SUPPORTED = INTERPRETED or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9))
LAUNCH: dict[str, bool] = {"launch_pdl": True} if _SUPPORTED else {}

# Assembly of `after_wait`: $0 becomes $1, behind a wait if $2 is not 0.
WAIT = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p griddepcontrol.wait; mov.b32 $0, $1; }"
WAIT_ALONE = tl.constexpr(WAIT)
WAIT_AND_RELEASE = tl.constexpr(WAIT.replace("wait;", "wait; @p griddepcontrol.launch_dependents;"))


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
def after_wait(number, waits, release: tl.constexpr = True):
    """Return `number`, after the work of `wait` if `waits`.

    What is loaded at addresses that depend on the result is loaded after the wait, also in a pipelined loop. The
    assembly counts as pure, because the compiler refuses to pipeline a loop whose assembly has effects. So dependence
    alone keeps the order, and a kernel calls `wait` again before it touches other memory.
    """
    if PDL_ENABLED:
        code: tl.constexpr = WAIT_AND_RELEASE if release else WAIT_ALONE
        number = tl.inline_asm_elementwise(
            code, "=r,r,r", [number, waits.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1
        )
    return number


@triton.jit
def release():
    """Let the next kernel start when all programs of this one have come here or ended."""
    if PDL_ENABLED:
        cuda.gdc_launch_dependents()
