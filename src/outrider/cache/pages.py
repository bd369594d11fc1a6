"""Storage of keys and values: pages of `page_size` tokens, with the same page numbers in every layer.

Layers with a sliding window have fewer pages, the window pages. A map on the device leads from a page to its window
page, which the scheduler assigns (window_pages.py).

Recurrent layers have a state for each running request instead, in a slot of its own (StateShape). The prefix cache
keeps snapshots of states in further slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..device import HOST, Device
from ..kernels import LayerPages, LayerStates, WindowMap
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


@dataclass(frozen=True)
class StateShape:
    """The states of the recurrent layers of a model. The scheduler decides what a slot holds."""

    layers: tuple[bool, ...]  # which layers are recurrent; the others have attention
    heads: int
    head_dim: int
    state_dim: int
    inputs: int  # numbers of a token that a layer keeps until its state reads the token
    requests: int  # slots for requests
    lines: int  # tokens whose inputs are kept in each slot
    snapshots: int = 0  # slots for snapshots

    @property
    def slots(self) -> int:
        return self.requests + self.snapshots

    @property
    def padding(self) -> int:
        """Return the slot of rows that pad a batch."""
        return self.slots

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a slot in all layers."""
        numbers = self.heads * self.head_dim * self.state_dim + self.lines * self.inputs
        return torch.float32.itemsize * numbers * sum(self.layers)

    @property
    def bytes(self) -> int:
        """Return the bytes of all slots, the one for padding included."""
        return self.slot_bytes * (self.slots + 1)

    @property
    def memory(self) -> str:
        """Describe the memory of all slots."""
        return (
            f"{self.requests} slots for requests and {self.snapshots} for snapshots of the prefix cache, "
            f"{self.slot_bytes / 1e6:.1f} MB each, {self.bytes / 1e9:.2f} GB in all"
        )

    def allocate(self, device: Device) -> LayerStates:
        """Allocate the states of one layer: a slot more than requests have, for padding."""
        count = self.slots + 1
        return LayerStates(
            device.zeros((count, self.heads, self.head_dim, self.state_dim), torch.float32),
            device.zeros((count, self.lines, self.inputs), torch.float32),
            device.zeros((count,), torch.int32),
        )


class Pages:
    """Key and value tensors of every layer. The scheduler decides which request owns a page.

    `allocate` comes later than the constructor: the number of pages depends on `bytes_per_token` of all storages.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: str,
        states: int = 0,
        recurrent: StateShape | None = None,
        has_window: Sequence[bool] = (),
    ) -> None:
        """states: floats to store with each page. recurrent: of the layers that have states instead of pages.

        has_window: which layers have window pages; empty: none.
        """
        self.page_size = page_size
        self.recurrent = recurrent
        self._has_pages = [recurrent is None or not recurrent.layers[layer] for layer in range(layers)]
        self._has_window = list(has_window) or [False] * layers
        self.window_bytes_per_token = bytes_per_token(sum(self._has_window), kv_heads, head_dim, dtype)
        self.bytes_per_token = bytes_per_token(sum(self._has_pages), kv_heads, head_dim, dtype)
        self.bytes_per_token += -(-states * 4 // page_size) - self.window_bytes_per_token
        self.count = 0
        self.window_map: WindowMap | None = None
        self.layers: list[LayerPages] = []  # of the layers with attention
        self.state_layers: list[LayerStates] = []  # of the recurrent layers
        self.storages: list[LayerPages | LayerStates] = []  # of all layers
        self.states = torch.empty(0, states)  # [pages + 1, states] f32, one row per page; padding uses the last
        self._shape = (kv_heads, page_size, head_dim)  # G, S, D
        self._dtype = dtype

    def allocate(self, count: int, device: Device = HOST, window_count: int = 0) -> None:
        self.count, self._device = count, device
        self.window_map = _window_map(count, window_count, self.page_size, device) if any(self._has_window) else None
        self.layers = [
            self._allocate_layer(window_count, device, self.window_map)
            if has_window
            else self._allocate_layer(count, device)
            for has_pages, has_window in zip(self._has_pages, self._has_window, strict=True)
            if has_pages
        ]
        recurrent = self.recurrent
        self.state_layers = (
            [] if recurrent is None else [recurrent.allocate(device) for _ in range(sum(recurrent.layers))]
        )
        pages, states = iter(self.layers), iter(self.state_layers)
        self.storages = [next(pages) if has_pages else next(states) for has_pages in self._has_pages]
        self.states = device.zeros((count + 1, self.states.shape[1]), torch.float32)

    def _allocate_layer(self, count: int, device: Device, window_map: WindowMap | None = None) -> LayerPages:
        shape, dtype = (count, *self._shape), DTYPES[self._dtype]  # [pages, G, S, D]
        keys, values = (device.zeros(shape, dtype) for _ in range(2))
        scales = [device.zeros(shape[:3], torch.float32) if dtype in LARGEST else None for _ in range(2)]
        return LayerPages(keys, values, *scales, window_map=window_map)

    def assign(self, window_pages: Mapping[int, int]) -> None:
        """Store the window pages of these pages, for the steps to come."""
        if window_pages:
            assert self.window_map is not None, "no layer has a sliding window"
            packed = self._device.upload([*window_pages, *window_pages.values()], torch.int32)
            pages, assigned = torch.split(packed, len(window_pages))
            self.window_map.assign(pages.long(), assigned)


def _window_map(count: int, window_count: int, page_size: int, device: Device) -> WindowMap:
    """Return a map that leads all pages to some window page: profile runs take pages without the scheduler."""
    maps = [device.zeros((1 + size,), torch.int32) - 1 for size in (count, count * page_size)]
    pages = torch.arange(count, device=device.torch_device)
    window_map = WindowMap(*maps)
    window_map.assign(pages, (pages % window_count).int())
    return window_map
