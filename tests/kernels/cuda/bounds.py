"""Bounds checks for interpreted Triton kernels: each access must lie inside a tensor that the kernel was given.

On a GPU an access outside of all tensors is an illegal memory access only if the memory there is not mapped; in the
interpreter it reads or overwrites the memory of the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter
from torch import Tensor


class Extents:
    """The addresses of the tensors of one launch."""

    def __init__(self, kernel: str, arguments: Any) -> None:
        extents = sorted(set(_extents(arguments)))
        self.kernel = kernel
        self.starts = np.array([start for start, _ in extents], dtype=np.uint64)
        ends = np.array([end for _, end in extents], dtype=np.uint64)
        self.ends = np.maximum.accumulate(ends) if extents else ends

    def check(self, pointers: interpreter.TensorHandle, mask: np.ndarray | None, access: str) -> None:
        """Raise IndexError if an active lane accesses memory outside of all tensors."""
        addresses = pointers.data.ravel() if mask is None else pointers.data[mask.astype(bool)]
        if not addresses.size:
            return
        size = np.uint64(max(pointers.get_element_ty().primitive_bitwidth // 8, 1))
        tensor = np.searchsorted(self.starts, addresses.astype(np.uint64), side="right") - 1
        outside = (tensor < 0) | (addresses.astype(np.uint64) + size > self.ends[np.maximum(tensor, 0)])
        if outside.any():
            raise IndexError(f"`{self.kernel}` {access} outside of its tensors in {outside.sum()} lanes")


def _extents(argument: Any) -> Iterator[tuple[int, int]]:
    if isinstance(argument, tuple | list):
        for member in argument:
            yield from _extents(member)
    elif isinstance(argument, Tensor) and argument.numel():
        last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
        yield argument.data_ptr(), argument.data_ptr() + (last + 1) * argument.element_size()


def install() -> None:
    """Check every access of the kernels that the interpreter runs from now on."""
    builder, launch = interpreter.InterpreterBuilder, interpreter.GridExecutor
    to_host = launch._init_args_hst
    load, store = builder.create_masked_load, builder.create_masked_store
    read_modify_write, compare_and_swap = builder.create_atomic_rmw, builder.create_atomic_cas
    extents = Extents("", ())

    def checked_arguments(self: Any, arguments: Any, options: Any) -> Any:
        nonlocal extents
        positional, named = to_host(self, arguments, options)
        extents = Extents(self.fn.__name__, [*positional, *named.values()])
        return positional, named

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        extents.check(pointers, mask.data, "reads")
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        extents.check(pointers, mask.data, "writes")
        return store(self, pointers, value, mask, *rest)

    def checked_read_modify_write(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        extents.check(pointers, mask.data, "updates")
        return read_modify_write(self, operation, pointers, value, mask, *rest)

    def checked_compare_and_swap(self: Any, pointers: Any, *rest: Any) -> Any:
        extents.check(pointers, None, "updates")
        return compare_and_swap(self, pointers, *rest)

    launch._init_args_hst = checked_arguments
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw, builder.create_atomic_cas = checked_read_modify_write, checked_compare_and_swap
