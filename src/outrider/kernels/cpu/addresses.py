"""Addresses of tensors for the native library, after a check of dtype, layout and (if given) shape.

The checks are inlined in each function: a function call more costs about a microsecond in every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT, INTEGER, LONG, FLAG = torch.float32, torch.int32, torch.int64, torch.uint8


def floats(tensor: Tensor, *shape: int) -> int:
    assert tensor.dtype is FLOAT and tensor.is_contiguous() and (not shape or tensor.shape == shape)
    return tensor.data_ptr()


def integers(tensor: Tensor, *shape: int) -> int:
    assert tensor.dtype is INTEGER and tensor.is_contiguous() and (not shape or tensor.shape == shape)
    return tensor.data_ptr()


def address(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    assert tensor.dtype is dtype and tensor.is_contiguous() and (not shape or tensor.shape == shape)
    return tensor.data_ptr()
