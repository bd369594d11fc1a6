"""The storage of keys and values: pages of `page_size` tokens, the same page number in every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..device import HOST, Device
from ..kernels import LayerPages

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: str) -> int:
    """What one token's keys and values take, all layers together."""
    return 2 * layers * kv_heads * head_dim * DTYPES[dtype].itemsize


def slots_of(pages: Sequence[int], positions: Iterable[int], page_size: int) -> list[int]:
    """Where a text that has these pages keeps what belongs to these positions."""
    return [pages[at // page_size] * page_size + at % page_size for at in positions]


class Pages:
    """Key and value tensors of every layer. Who owns which page is the scheduler's business.

    Storage comes with `allocate`: how many pages there are is known once everyone has said what a page takes.
    """

    def __init__(self, layers: int, kv_heads: int, page_size: int, head_dim: int, dtype: str, states: int = 0) -> None:
        self.page_size = page_size
        self.bytes_per_token = bytes_per_token(layers, kv_heads, head_dim, dtype) + -(-states * 4 // page_size)
        self.count = 0
        self.layers: list[LayerPages] = []
        self.states = torch.empty(0, states)  # [pages + 1, states] f32, kept beside each page; the last is for waste
        self._shape = (kv_heads, page_size, head_dim)  # G, S, D
        self._depth, self._dtype = layers, dtype

    def allocate(self, count: int, device: Device = HOST) -> None:
        shape, dtype = (count, *self._shape), DTYPES[self._dtype]  # [pages, G, S, D]
        self.count = count
        self.layers = [LayerPages(device.zeros(shape, dtype), device.zeros(shape, dtype)) for _ in range(self._depth)]
        self.states = device.zeros((count + 1, self.states.shape[1]), torch.float32)
