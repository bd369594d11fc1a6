"""Storage for keys and values."""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from outrider.cache.pages import Pages, bytes_per_token


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_layer_has_zeroed_pages_of_its_own(dtype: str) -> None:
    pages = Pages(layers=2, kv_heads=3, page_size=4, head_dim=8, dtype=dtype)
    pages.allocate(5)
    tensors = [tensor for layer in pages.layers for tensor in (layer.keys, layer.values)]
    assert len({tensor.data_ptr() for tensor in tensors}) == 4
    for tensor in tensors:
        assert tensor.shape == (5, 3, 4, 8)
        assert tensor.dtype == getattr(torch, dtype)
        assert tensor.is_contiguous()
        assert not tensor.any()
    tensors[0].fill_(1)
    assert not tensors[1].any()


def test_bytes_per_token_is_what_the_storage_takes() -> None:
    pages = Pages(layers=3, kv_heads=2, page_size=4, head_dim=8, dtype="float16")
    pages.allocate(5)
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in pages.layers)
    assert bytes_per_token(3, 2, 8, "float16") * 5 * 4 == stored


def test_memory_is_taken_only_when_written() -> None:
    # In a new process: one that freed as much before may get that memory again, which is in use already.
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        stored, untouched, written = process.submit(measure_memory).result()
    assert stored > 100 << 20
    assert untouched < 1 << 20
    assert written >= stored // 10


def measure_memory() -> tuple[int, int, int]:
    """Return the bytes of a tensor of keys, and how many of them are in memory before and after a tenth is written."""
    pages = Pages(layers=1, kv_heads=8, page_size=16, head_dim=256, dtype="float32")
    pages.allocate(1000)
    keys = pages.layers[0].keys
    untouched = resident_bytes(keys)
    keys[:100] = 1
    return keys.nbytes, untouched, resident_bytes(keys)


def resident_bytes(tensor: torch.Tensor) -> int:
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    count = (tensor.data_ptr() + tensor.nbytes - first) // page
    resident = (ctypes.c_ubyte * count)()
    call = ctypes.CDLL(None, use_errno=True).mincore
    assert call(ctypes.c_void_p(first), ctypes.c_size_t(count * page), resident) == 0, ctypes.get_errno()
    return page * sum(byte & 1 for byte in resident) + 2 * page  # and the parts of pages at both ends
