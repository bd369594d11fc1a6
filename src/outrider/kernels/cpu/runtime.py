"""The native library as a whole: its instruction-set level, its threads, its clock."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from ...errors import UserError
from .. import _native


class Facts(TypedDict):
    level: str
    levels: list[str]  # that this machine and this build offer, the best last
    threads: int


def facts() -> Facts:
    return {"level": _native.level_name(), "levels": _native.available_levels(), "threads": _native.thread_count()}


def set_threads(count: int) -> None:
    try:
        _native.set_thread_count(count)
    except ValueError as error:
        raise UserError(str(error)) from None


def busy_seconds() -> float:
    """Seconds that this process has spent in kernels so far."""
    return _native.busy_seconds()


def stream_read(tensor: Tensor) -> int:
    """Read a contiguous tensor with all threads, as fast as memory gives it; a checksum, so that it must be read."""
    assert tensor.is_contiguous()
    return _native.stream_read(tensor.data_ptr(), tensor.nbytes)


def _start() -> None:
    """Settle the instruction set and the number of threads, so that a bad setting is refused here."""
    try:
        facts()
    except ValueError as error:
        raise UserError(str(error)) from None


_start()
