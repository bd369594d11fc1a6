"""The bounds checks of the interpreter find accesses outside of a kernel's tensors."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="only the interpreter checks bounds")


class Pair(NamedTuple):
    source: Tensor
    target: Tensor


@triton.jit
def copy(source, target, read, write, block: tl.constexpr):
    lane = tl.arange(0, block)
    tl.store(target + lane, tl.load(source + lane, mask=lane < read, other=0.0), mask=lane < write)


@triton.jit
def copy_pair(pair, read, write, block: tl.constexpr):
    lane = tl.arange(0, block)
    tl.store(pair.target + lane, tl.load(pair.source + lane, mask=lane < read, other=0.0), mask=lane < write)


@triton.jit
def count(counters, index):
    tl.atomic_add(counters + index, 1)


@pytest.mark.parametrize("grouped", [False, True], ids=["flat", "tuple"])
@pytest.mark.parametrize(("read", "write", "found"), [(6, 6, None), (7, 6, "reads"), (6, 8, "writes")])
def test_accesses_beyond_a_view_are_found(grouped: bool, read: int, write: int, found: str | None) -> None:
    """The memory around the views is mapped: only their extents tell."""
    storage = torch.arange(64.0)
    source, target = storage[10:16], storage[40:46]

    def run() -> None:
        if grouped:
            copy_pair[(1,)](Pair(source, target), read, write, block=8)
        else:
            copy[(1,)](source, target, read, write, block=8)

    if found is None:
        run()
        assert torch.equal(source, target)
        return
    with pytest.raises(Exception, match=f"{found} outside of its tensors in {max(read, write) - 6} lanes"):
        run()


def test_atomics_beyond_a_view_are_found() -> None:
    storage = torch.zeros(8, dtype=torch.int32)
    count[(1,)](storage[2:4], 1)
    assert storage.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    with pytest.raises(Exception, match="updates outside of its tensors in 1 lanes"):
        count[(1,)](storage[2:4], -1)
