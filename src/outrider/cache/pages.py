"""Storage of keys and values: pages of `page_size` tokens, with the same page numbers in every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..device import HOST, Device
from ..kernels import LayerPages
from ..kernels.kv_quantization import LARGEST

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: str) -> int:
    """Return the bytes of one token's keys and values in all layers, with their scales."""
    scale = torch.float32.itemsize if DTYPES[dtype] in LARGEST else 0
    return 2 * layers * kv_heads * (head_dim * DTYPES[dtype].itemsize + scale)


def slots_of(pages: Sequence[int], positions: Iterable[int], page_size: int) -> list[int]:
    """Return the cache slots of these positions of a sequence that holds `pages`."""
    return [pages[position // page_size] * page_size + position % page_size for position in positions]


class Pages:
    """Key and value tensors of every layer. The scheduler decides which request owns a page.

    `allocate` comes later than the constructor: the number of pages depends on `bytes_per_token` of all storages.
    """

    def __init__(self, layers: int, kv_heads: int, page_size: int, head_dim: int, dtype: str, states: int = 0) -> None:
        self.page_size = page_size
        self.bytes_per_token = bytes_per_token(layers, kv_heads, head_dim, dtype) + -(-states * 4 // page_size)
        self.count = 0
        self.layers: list[LayerPages] = []
        self.states = torch.empty(0, states)  # [pages + 1, states] f32, one row per page; padding uses the last
        self._shape = (kv_heads, page_size, head_dim)  # G, S, D
        self._num_layers, self._dtype = layers, dtype

    def allocate(self, count: int, device: Device = HOST) -> None:
        shape, dtype = (count, *self._shape), DTYPES[self._dtype]  # [pages, G, S, D]
        self.count = count
        tensors = [(shape, dtype)] * 2 + [(shape[:3], torch.float32)] * (2 if dtype in LARGEST else 0)
        self.layers = [LayerPages(*(device.zeros(*each) for each in tensors)) for _ in range(self._num_layers)]
        self.states = device.zeros((count + 1, self.states.shape[1]), torch.float32)
