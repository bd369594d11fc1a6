"""The native library: instruction-set level, threads, busy time, and addresses of tensors for its functions.

The checks of dtype, layout and (if given) shape are inlined in each function that returns an address: a function call
more costs about a microsecond in every step.
"""

from __future__ import annotations

import os
from typing import TypedDict

import torch
from torch import Tensor

from ...cgroups import cpu_quota
from ...errors import UserError
from . import _native

# Levels at which activations are quantized to 8 bits unless the user asks for more: there the KL divergence from exact
# activations is below 1e-3 on SmolLM2-135M and Qwen2.5-Coder 0.5B, and a step of 1, 4 and 16 rows of Qwen2.5-Coder 1.5B
# takes 0.81, 0.70 and 0.66 of the time of `high` (docs/log.md, "Activations in 8 bits"). Measured at neon; i8mm has its
# bits.
FAST_LEVELS = ("neon", "i8mm")

FLOAT, INTEGER, LONG, FLAG = torch.float32, torch.int32, torch.int64, torch.uint8


class Facts(TypedDict):
    level: str
    levels: list[str]  # available on this machine and in this build, the best last
    threads: int


def facts() -> Facts:
    return {"level": _native.level_name(), "levels": _native.available_levels(), "threads": _native.thread_count()}


def fast_by_default() -> bool:
    """Return True if activations are quantized to 8 bits at this level unless the user asks for more."""
    return _native.level_name() in FAST_LEVELS


def set_threads(count: int) -> None:
    try:
        _native.set_thread_count(count)
    except ValueError as error:
        raise UserError(str(error)) from None


def busy_seconds() -> float:
    """Return the seconds that this process has spent in kernels."""
    return _native.busy_seconds()


def stream_read(tensor: Tensor) -> int:
    """Read a contiguous tensor with all threads at memory speed; return a checksum, so that the read is not elided."""
    if not tensor.is_contiguous():
        raise refusal(tensor, tensor.dtype, ())
    return _native.stream_read(tensor.data_ptr(), tensor.nbytes)


def _start() -> None:
    """Choose level and threads now, so that a bad `OUTRIDER_ISA` or `OUTRIDER_THREADS` is refused at import.

    The native library counts the cores of the affinity mask. A quota of CPU time may be less: waiting threads spin, so
    more threads than cores would use it up in the middle of a step.
    """
    try:
        count = facts()["threads"]
        if not os.environ.get("OUTRIDER_THREADS") and (quota := cpu_quota()) is not None and quota < count:
            _native.set_thread_count(max(1, int(quota)))
    except ValueError as error:
        raise UserError(str(error)) from None


# A kernel gets addresses: these checks are the only ones, and `python -O` must not remove them.


def floats(tensor: Tensor, *shape: int) -> int:
    if tensor.dtype is FLOAT and tensor.is_contiguous() and (not shape or tensor.shape == shape):
        return tensor.data_ptr()
    raise refusal(tensor, FLOAT, shape)


def integers(tensor: Tensor, *shape: int) -> int:
    if tensor.dtype is INTEGER and tensor.is_contiguous() and (not shape or tensor.shape == shape):
        return tensor.data_ptr()
    raise refusal(tensor, INTEGER, shape)


def address(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    if tensor.dtype is dtype and tensor.is_contiguous() and (not shape or tensor.shape == shape):
        return tensor.data_ptr()
    raise refusal(tensor, dtype, shape)


def refusal(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> ValueError:
    order = "" if tensor.is_contiguous() else ", which is not contiguous"
    wanted = f"{list(shape)} of {dtype}" if shape else f"any shape of {dtype}"
    return ValueError(f"a kernel expects {wanted}, but got {list(tensor.shape)} of {tensor.dtype}{order}")


_start()
