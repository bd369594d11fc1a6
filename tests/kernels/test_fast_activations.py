"""Activations in 8 bits, with more bits for groups of 32 inputs that hold large values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.kernels import cpu, reference
from outrider.kernels.cases import CASES, Case, difference, inputs
from outrider.kernels.cpu import fast_activations
from outrider.kernels.quantization import FORMATS

KINDS = [kind for kind, block in FORMATS.items() if block.dtype is None]
QUANTIZED = [case for case in CASES if case.op in ("linear", "mlp", "project_qkv") and case.name.split()[0] in KINDS]
ROWS, OUTPUTS, INPUTS = 17, 52, 2304  # more rows than a panel or tile has, and more inputs than are multiplied at once


def states(seed: int, factor: float) -> Tensor:
    """Return rows [T, K] in which one group of 32 inputs in six, drawn for each row, is larger by `factor`."""
    random = inputs.generator(seed)
    groups = inputs.normal(random, ROWS, INPUTS // 32, 32)
    large = torch.rand(ROWS, INPUTS // 32, generator=random) < 1 / 6
    return (groups * torch.where(large, factor, 1.0)[..., None]).view(ROWS, INPUTS)


def product(kind: str) -> Callable[[Tensor], Tensor]:
    weight = inputs.random_weight(inputs.generator(7), kind, OUTPUTS, INPUTS)
    matrix = fast_activations.matrix(weight)
    return lambda x: fast_activations.linear(x.contiguous(), matrix)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_large_values_of_others(kind: str, level: str) -> None:
    multiply, x = product(kind), states(1, 10.0)
    whole = multiply(x)
    for first in range(ROWS):
        for count in (1, 2, 3, 4, 5, 7, 8, 16):
            assert torch.equal(multiply(x[first : first + count]), whole[first : first + count]), (first, count)


@pytest.mark.parametrize("case", QUANTIZED, ids=[f"{case.op}: {case.name}" for case in QUANTIZED])
def test_results_are_close_to_the_reference(case: Case, level: str) -> None:
    for found, meant in zip(case.build(fast_activations, 1)(None), case.build(reference, 1)(None), strict=True):
        assert difference(found, meant) <= 5e-2  # the largest of 10,000 outputs; typical errors are a fifth of it


@pytest.mark.parametrize("kind", KINDS)
def test_large_values_keep_their_bits(kind: str, level: str) -> None:
    weight = inputs.random_weight(inputs.generator(7), kind, OUTPUTS, INPUTS)
    x = states(2, 100.0)
    expected = reference.linear(x, reference.matrix(weight))
    # 8 bits for all groups would give 1.5e-2; one that is not enlarged adds a hundredth of that.
    assert difference(product(kind)(x), expected) <= 7e-3
    assert difference(cpu.linear(x, cpu.matrix(weight)), expected) <= 7e-3


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0", "q6_k"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_stay_in_their_row(kind: str, value: float, level: str) -> None:
    multiply, x = product(kind), states(3, 10.0)
    clean = multiply(x)
    x[5, 40] = value
    found = multiply(x)
    assert found[5].isnan().all()
    others = [row for row in range(ROWS) if row != 5]
    assert torch.equal(found[others], clean[others])


def test_rows_of_zeros_give_zeros(level: str) -> None:
    assert torch.equal(product("q4_1")(torch.zeros(3, INPUTS)), torch.zeros(3, OUTPUTS))
