"""Programmatic dependent launch (PDL, compute capability 9): a kernel starts before its predecessor has ended.

A kernel that is launched with LAUNCH calls `wait` before it touches memory that another kernel reads or writes. Before
that it may prefetch weights, which no kernel writes. Its predecessor has waited too, so all earlier kernels have ended.
Kernels without PDL keep the usual order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from .device import INTERPRETED

_SUPPORTED = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
PDL_ENABLED: tl.constexpr = tl.constexpr(_SUPPORTED)
LAUNCH: dict[str, bool] = {"launch_pdl": True} if _SUPPORTED else {}
LANES: tl.constexpr = tl.constexpr(128)


@triton.jit
def wait():
    """Wait until all earlier kernels have ended and their writes are visible, then let the next kernel start."""
    if PDL_ENABLED:
        cuda.gdc_wait()
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
