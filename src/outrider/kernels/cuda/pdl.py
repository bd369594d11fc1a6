"""Kernels that begin before the one before them has ended (programmatic dependent launch, from compute capability 9).

A kernel that is launched with LAUNCH calls `wait` before it touches anything that another kernel reads or writes.
What it does before that runs beside the last programs of its predecessor: it fetches weights, which no kernel writes.
It waits for a predecessor that has waited itself, so all that came earlier has ended, too. Kernels that know nothing
of this are ordered as ever, before and after.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from .device import INTERPRETED

_ABLE = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
OVERLAPPED: tl.constexpr = tl.constexpr(_ABLE)
LAUNCH: dict[str, bool] = {"launch_pdl": True} if _ABLE else {}
LANES: tl.constexpr = tl.constexpr(128)


@triton.jit
def wait():
    """Until all earlier kernels have ended and what they wrote is seen; then let the next one begin."""
    if OVERLAPPED:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def fetch(rows, stride: tl.constexpr, size: tl.constexpr):
    """Have the L2 bring the first `size` bytes of `rows`: pointers [n] to memory `stride` bytes apart."""
    pieces: tl.constexpr = LANES // rows.shape[0] if rows.shape[0] < LANES else 1
    share: tl.constexpr = (size if size < stride else stride) // pieces // 16 * 16
    if OVERLAPPED and share > 0 and stride % 16 == 0:
        # A request of its own for every lane: rows [n] spread over [n, pieces].
        place = rows.to(tl.int64)[:, None] + share * tl.arange(0, pieces)[None, :]
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [place, tl.full(place.shape, share, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
