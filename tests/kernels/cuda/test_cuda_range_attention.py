"""Range attention: outputs and gradients equal those of the plain version under autograd."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels.cuda.device import DEVICE
from outrider.kernels.structures import AttentionRanges, OwnKeys
from outrider.train.heads import layers as modules

ranges = import_module("outrider.kernels.cuda.range_attention")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    """So that a row has several."""
    for name in ("FORWARD", "BY_QUERIES", "BY_KEYS"):
        monkeypatch.setattr(ranges, name, ranges.AttentionTiling(16, 32, 2, 1))
    monkeypatch.setattr(ranges, "BY_OWN_KEYS", ranges.AttentionTiling(16, 16, 2, 1))
    monkeypatch.setattr(ranges, "SCAN", 32)


class Case:
    """Random numbers for one attention: leaves with gradients, and who sees what."""

    def __init__(
        self,
        count: int,
        length: int,
        seen: tuple[Tensor, Tensor],
        heads: tuple[int, int, int] = (3, 1, 16),
        own: tuple[int, int] | None = None,
        counts: Tensor | None = None,
    ) -> None:
        (number, groups, size), rows = heads, len(seen[0])
        generator = torch.Generator().manual_seed(count + length)
        shapes = [(rows, count, number, size), *[(rows, length, groups, size)] * 2]
        if own is not None:
            per, each = own
            shapes += [(rows, count // per, each, groups, size)] * 2
        self.leaves = [1.5 * torch.randn(shape, generator=generator) for shape in shapes]
        self.change = torch.randn(rows, count, number * size, generator=generator)
        self.seen, self.counts = seen, counts

    def run(self, attend: Any, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """The output and the gradients, in their order."""
        leaves = [each.to(device, dtype).requires_grad_() for each in self.leaves]
        query, keys, values, *own = leaves
        counts = None if self.counts is None else self.counts.to(device)
        begins, ends = (each.to(device) for each in self.seen)
        out = attend(query, AttentionRanges(keys, values, begins, ends, OwnKeys(*own, counts) if own else None))
        assert out.dtype == dtype
        found = torch.autograd.grad(out, leaves, self.change.to(device, dtype))
        return [each.detach().cpu() for each in (out, *found)]

    def check(self, dtype: torch.dtype = torch.float32, tolerance: float = 1e-5) -> list[Tensor]:
        found = self.run(ranges.attend, DEVICE, dtype)
        right = self.run(modules.attend_reference, torch.device("cpu"), torch.float64)
        names = "out", "query", "keys", "values", "own keys", "own values"
        for name, one, other in zip(names, found, right, strict=False):
            assert one.isfinite().all() and one.dtype == dtype
            away = float((one.double() - other).abs().max())
            assert away <= tolerance * max(float(other.abs().max()), 1e-3), (name, away)
        return found


def documents(*rows: tuple[int, ...], length: int = 45) -> Tensor:
    """Lengths of documents, row by row, padded."""
    made = torch.full((len(rows), length), -1)
    for row, sizes in enumerate(rows):
        numbers = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        made[row, : len(numbers)] = numbers
    return made


PACKED = modules.causal_ranges(documents((20, 25), (1, 16, 13)))


def drawn(rows: int, count: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Any ranges, some of them empty, some the wrong way round."""
    two = torch.randint(0, length + 1, (2, rows, count), generator=torch.Generator().manual_seed(seed)).int()
    begins, ends = two.sort(0).values
    ends[:, ::7] = begins[:, ::7]
    begins[:, 3], ends[:, 3] = length, 0
    begins[:, 4], ends[:, 4] = 0, length
    return begins, ends


@pytest.mark.parametrize("own", [0, 1, 6])
def test_queries_with_own_keys(own: int) -> None:
    Case(45, 45, PACKED, own=(1, own) if own else None).check()


@pytest.mark.parametrize("heads", [(4, 2, 16), (2, 2, 16), (2, 1, 24), (3, 1, 64), (1, 1, 8)])
def test_heads_of_any_shape(heads: tuple[int, int, int]) -> None:
    Case(45, 45, (PACKED[0][1:], PACKED[1][1:]), heads, (1, 2)).check()


@pytest.mark.parametrize("block", [8, 5])
def test_blocks_that_attend_to_a_part_of_themselves(block: int) -> None:
    anchors, count = torch.tensor([[3, 19, 20, 44], [0, 1, 29, 35]]), 4 * block
    begins, ends = (each.gather(1, anchors).repeat_interleave(block, 1) for each in PACKED)
    sizes = torch.randint(1, block + 1, (2, 4), generator=torch.Generator().manual_seed(1)).int()
    sizes[0, 0] = block
    case = Case(count, 45, (begins, ends - 1), own=(block, block), counts=sizes.repeat_interleave(block, 1))
    found = case.check()
    by_own = found[4].view(2, 4, block, -1)
    assert all(not by_own[row, at, size:].any() for row in range(2) for at, size in enumerate(sizes[row].tolist()))


@pytest.mark.parametrize(("count", "length"), [(1, 1), (16, 32), (17, 33), (20, 70), (70, 20)])
def test_any_ranges(count: int, length: int) -> None:
    seen = drawn(2, max(count, 5), length)
    Case(count, length, (seen[0][:, :count], seen[1][:, :count])).check()


@pytest.mark.parametrize("counts", [None, 0])
def test_queries_without_keys_get_zeros(counts: int | None) -> None:
    none = torch.full((2, 20), 5, dtype=torch.int32)
    own = None if counts is None else (4, 3)
    case = Case(20, 40, (none, none), own=own, counts=None if counts is None else torch.zeros_like(none))
    for found in (case.run(ranges.attend, DEVICE, torch.float32), case.check()):
        assert all(not each.any() for each in found)


def test_own_keys_alone() -> None:
    none = torch.zeros(2, 24, dtype=torch.int32)
    found = Case(24, 40, (none, none), own=(3, 4)).check()
    assert not found[2].any() and found[4].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
def test_16_bit_floats(dtype: torch.dtype, tolerance: float) -> None:
    Case(45, 45, (PACKED[0][:1], PACKED[1][:1]), own=(1, 3)).check(dtype, tolerance)


def test_tile_sizes_of_the_gpu() -> None:
    """The sizes that the GPU is given, over rows of several tiles; whatever the order of the queries."""
    for name in ("FORWARD", "BY_QUERIES", "BY_KEYS", "BY_OWN_KEYS"):
        setattr(ranges, name, TRAINING[name])  # small_tiles puts them back
    Case(136, 150, drawn(1, 136, 150), (2, 1, 64), (8, 8)).check()


TRAINING = {name: getattr(ranges, name) for name in ("FORWARD", "BY_QUERIES", "BY_KEYS", "BY_OWN_KEYS")}


def test_large_scores_stay_finite() -> None:
    case = Case(40, 40, modules.causal_ranges(torch.zeros(1, 40)))
    case.leaves[0] *= 300
    case.check(tolerance=1e-3)


def test_same_bits_and_any_strides() -> None:
    case = Case(45, 45, (PACKED[0][1:], PACKED[1][1:]), own=(1, 2))
    expected = case.run(ranges.attend, DEVICE, torch.float32)

    def transposed(query: Tensor, key_ranges: AttentionRanges) -> Tensor:
        """The same numbers, the other way round in memory."""
        common = (key_ranges.keys, key_ranges.values, key_ranges.begins, key_ranges.ends)
        assert key_ranges.own is not None
        own = OwnKeys(*(each.mT.contiguous().mT for each in (key_ranges.own.keys, key_ranges.own.values)))
        found: Tensor = ranges.attend(
            query.mT.contiguous().mT, AttentionRanges(*(each.mT.contiguous().mT for each in common), own)
        )
        return found

    for attend in (ranges.attend, transposed):
        assert all(map(torch.equal, case.run(attend, DEVICE, torch.float32), expected))


def test_training_takes_the_kernel_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked without a GPU: the kernel gets the same arguments, and its result is returned."""
    calls: list[tuple[Any, ...]] = []

    class Elsewhere:
        is_cuda = True

    def recorded(*arguments: Any) -> str:
        calls.append(arguments)
        return "mixed"

    monkeypatch.setattr(ranges, "attend", recorded)
    query: Any = Elsewhere()
    key_ranges: Any = object()
    assert modules.attend(query, key_ranges) == "mixed"  # type: ignore[comparison-overlap]
    assert calls == [(query, key_ranges)]
