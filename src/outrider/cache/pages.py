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
    """Key and value tensors of every layer. Who owns which page is the scheduler's business.

    Storage comes with `allocate`: how many pages there are is known once everyone has said what a page takes.
    """

    def __init__(self, layers: int, kv_heads: int, page_size: int, head_dim: int, dtype: str, states: int = 0) -> None:
        self.page_size = page_size
        self.bytes_per_token = bytes_per_token(layers, kv_heads, head_dim, dtype) + -(-states * 4 // page_size)
        self.count = 0
        self.layers: list[LayerPages] = []
        self.states = torch.empty(0, states)  # [pages, states] f32, what is kept beside each page
        self._shape = (kv_heads, page_size, head_dim)  # G, S, D
        self._depth, self._dtype = layers, dtype

    def allocate(self, count: int) -> None:
        shape = (count, *self._shape)  # [pages, G, S, D]
        self.count = count
        self.layers = [
            LayerPages(_lazy_zeros(shape, self._dtype), _lazy_zeros(shape, self._dtype)) for _ in range(self._depth)
        ]
        self.states = _lazy_zeros((count, self.states.shape[1]), "float32")


def _lazy_zeros(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Zeros that take memory only once they are written: torch.zeros would touch every byte at once."""
    kind = float_dtype(dtype)
    whole = np.int32 if kind.itemsize == 4 else np.int16  # as wide as `kind`: an empty array can be seen as no other
    return torch.from_numpy(np.zeros(math.prod(shape), dtype=whole)).view(kind).view(shape)
