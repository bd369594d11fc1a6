"""The test of distribution: its threshold, and that it catches what it says that it catches."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.diagnostics.distribution import FALSE_ALARM, POWER, Comparison, compare, noncentrality, passing, quantile


# Values of the chi-square distribution that are passed once in a million.
@pytest.mark.parametrize(("freedom", "value"), [(1, 23.928127), (2, 27.631021), (3, 30.664849)])
def test_the_threshold_is_the_quantile(freedom: int, value: float) -> None:
    assert quantile(freedom) == pytest.approx(value, abs=1e-4)
    assert passing(freedom, 0.0, quantile(freedom)) == pytest.approx(FALSE_ALARM, rel=1e-6)


def test_a_noncentral_statistic_exceeds_a_value_with_the_computed_probability() -> None:
    random = torch.Generator().manual_seed(0)
    normal = torch.randn(200_000, 5, generator=random, dtype=torch.float64)
    normal[:, 0] += 3.0  # a noncentrality of 9
    seen = float((normal.square().sum(1) > 20).double().mean())
    assert passing(5, 9.0, 20.0) == pytest.approx(seen, abs=0.004)


def test_a_bias_of_the_detectable_size_fails_with_the_stated_power() -> None:
    """The least visible bias of its total variation: half of the bins grow, half shrink, each by the same share."""
    law = torch.full((16,), 1 / 16, dtype=torch.float64)
    samples, runs = 1500, 400
    size = Comparison(0.0, 15, samples).detectable
    biased = law * torch.tensor([1 + 2 * size, 1 - 2 * size] * 8, dtype=torch.float64)
    assert float((biased - law).abs().sum()) / 2 == pytest.approx(size)
    random = torch.Generator().manual_seed(1)
    caught = {}
    for name, drawn in (("biased", biased), ("sound", law)):
        drawn = torch.multinomial(
            drawn.expand(runs, -1), samples, replacement=True, generator=random
        )  # [runs, samples]
        caught[name] = sum(not compare(torch.bincount(one, minlength=16), samples * law).holds for one in drawn)
    assert caught["sound"] == 0
    assert caught["biased"] / runs == pytest.approx(POWER, abs=0.06)


def test_an_impossible_answer_fails_the_test() -> None:
    found = compare(torch.tensor([50, 49, 1]), torch.tensor([50.0, 50.0, 0.0]))
    assert found.statistic == math.inf and not found.holds


def test_small_bins_are_merged() -> None:
    found = compare(torch.tensor([96, 1, 1, 1, 1]), torch.tensor([96.0, 1.0, 1.0, 1.0, 1.0]))
    assert (found.statistic, found.freedom, found.samples) == (0, 1, 100)
    assert noncentrality(1) / 100 == pytest.approx((2 * found.detectable) ** 2)
    assert Comparison(0.0, 3, 4).detectable == 1
