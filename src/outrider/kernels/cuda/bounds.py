"""Bounds of loops in Triton kernels that are known only when they run."""

from __future__ import annotations

import triton
import triton.language as tl

from .place import INTERPRETED

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def bound(number):
    """The same number. The interpreter's are arrays of one, which `range` does not take."""
    if _INTERPRETED:
        return number.handle.data.item()
    return number
