"""The storage of keys and values: pages of `page_size` tokens, the same page number in every layer."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..kernels import LayerPages, float_dtype


def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: str) -> int:
    """What one token's keys and values take, all layers together."""
    return 2 * layers * kv_heads * head_dim * float_dtype(dtype).itemsize


class Pages:
    """Key and value tensors of every layer. Who owns which page is the scheduler's business."""

    def __init__(self, layers: int, pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: str) -> None:
        shape = (pages, kv_heads, page_size, head_dim)  # [pages, G, S, D]
        self.count = pages
        self.page_size = page_size
        self.layers = [LayerPages(_lazy_zeros(shape, dtype), _lazy_zeros(shape, dtype)) for _ in range(layers)]


def _lazy_zeros(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Zeros that take memory only once they are written: torch.zeros would touch every byte at once."""
    kind = float_dtype(dtype)
    return torch.from_numpy(np.zeros(math.prod(shape) * kind.itemsize, dtype=np.uint8)).view(kind).view(shape)
