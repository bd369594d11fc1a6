"""Tensors in memory of the C library's allocator, where AddressSanitizer watches both ends of each.

Torch has an allocator of its own on some machines, which a sanitizer does not know.
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
    """[size] uint8, not a byte more."""
    place = ctypes.c_void_p()
    if _library.posix_memalign(ctypes.byref(place), ALIGNMENT, ctypes.c_size_t(size)) or place.value is None:
        raise MemoryError(f"{size} bytes")
    held = (ctypes.c_char * size).from_address(place.value)
    weakref.finalize(held, _library.free, place.value)
    return torch.frombuffer(held, dtype=torch.uint8)


def move(tensor: Tensor) -> Tensor:
    """The same numbers in the same layout, elsewhere."""
    old = tensor.untyped_storage()
    fresh = storage(old.nbytes())
    fresh.untyped_storage().copy_(old)
    layout = (tensor.storage_offset(), tensor.size(), tensor.stride())
    return torch.empty(0, dtype=tensor.dtype).set_(fresh.untyped_storage(), *layout)


class Guard(TorchDispatchMode):
    """Whatever is made inside lies in guarded memory; views and what is changed in place stay where they are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}

        def guarded(each: Any) -> Any:
            fresh = isinstance(each, Tensor) and each.numel() > 0 and each.untyped_storage().data_ptr() not in given
            return move(each) if fresh else each

        return tree_map(guarded, found)
