"""Attention in training, against one query at a time over its range."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.kernels.structures import AttentionRanges, OwnKeys
from outrider.train.heads.layers import attend, causal_ranges


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_tokens_see_their_document_up_to_themselves() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 2, 2, -1, -1], [0] * 8, [-1] * 8, [0, 1, 2, 3, 4, 5, 5, -1]])
    begins, ends = causal_ranges(documents)
    assert begins.dtype == ends.dtype == torch.int32
    for row, numbers in enumerate(documents.tolist()):
        for at, number in enumerate(numbers):
            seen = list(range(int(begins[row, at]), int(ends[row, at])))
            assert seen == [one for one in range(at + 1) if number >= 0 and numbers[one] == number]


@pytest.mark.parametrize("per", [1, 4])
@pytest.mark.parametrize("counted", [True, False])
def test_queries_see_their_range_and_their_own(per: int, counted: bool) -> None:
    query, keys, values = draw(2, 8, 6, 4, seed=0), draw(2, 9, 2, 4, seed=1), draw(2, 9, 2, 4, seed=2)
    own_keys, own_values = draw(2, 8 // per, 3, 2, 4, seed=3), draw(2, 8 // per, 3, 2, 4, seed=4)
    begins, ends = torch.randint(0, 10, (2, 2, 8), generator=torch.Generator().manual_seed(5)).int().sort(0).values
    counts = torch.arange(16).view(2, 8).int() % 4 if counted else None
    ranges = AttentionRanges(keys, values, begins, ends, OwnKeys(own_keys, own_values, counts))
    found = attend(query, ranges).view(2, 8, 6, 4)
    for row in range(2):
        for at in range(8):
            first = slice(int(begins[row, at]), int(ends[row, at]))
            last = slice(0, 3 if counts is None else int(counts[row, at]))
            for head in range(6):
                k = torch.cat([keys[row, first, head // 3], own_keys[row, at // per, last, head // 3]])
                v = torch.cat([values[row, first, head // 3], own_values[row, at // per, last, head // 3]])
                expected = (k @ query[row, at, head] / 2).softmax(0) @ v
                torch.testing.assert_close(found[row, at, head], expected)


def test_an_empty_range_gives_zeros_and_no_gradient() -> None:
    leaves = [draw(1, 3, 2, 4, seed=seed).requires_grad_() for seed in range(3)]
    none = torch.tensor([[0, 2, 3]], dtype=torch.int32)
    query, keys, values = leaves
    found = attend(query, AttentionRanges(keys, values, none, none))
    found.sum().backward()
    assert not found.any() and all(each.grad is not None and not each.grad.any() for each in leaves)
