"""Allocate tensors with the C library's allocator, where AddressSanitizer guards both ends of each.

On some machines torch has its own allocator, which a sanitizer does not know.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ALIGNMENT = 64
_library = ctypes.CDLL(None)
_library.free.argtypes = [ctypes.c_void_p]


def storage(size: int) -> Tensor:
    """Return a tensor [size] of uint8 in an allocation of exactly that size."""
    address = ctypes.c_void_p()
    if _library.posix_memalign(ctypes.byref(address), ALIGNMENT, ctypes.c_size_t(size)) or address.value is None:
        raise MemoryError(f"{size} bytes")
    held = (ctypes.c_char * size).from_address(address.value)
    weakref.finalize(held, _library.free, address.value)
    return torch.frombuffer(held, dtype=torch.uint8)


def move(tensor: Tensor) -> Tensor:
    """Copy a tensor with its layout into guarded memory."""
    old = tensor.untyped_storage()
    fresh = storage(old.nbytes())
    fresh.untyped_storage().copy_(old)
    layout = (tensor.storage_offset(), tensor.size(), tensor.stride())
    return torch.empty(0, dtype=tensor.dtype).set_(fresh.untyped_storage(), *layout)


class GuardedMemory(TorchDispatchMode):
    """Allocate tensors that are created in this context in guarded memory; views and in-place results stay."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}

        def guarded(each: Any) -> Any:
            fresh = isinstance(each, Tensor) and each.numel() > 0 and each.untyped_storage().data_ptr() not in given
            return move(each) if fresh else each

        return tree_map(guarded, found)
