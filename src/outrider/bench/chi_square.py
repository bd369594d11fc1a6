"""Pearson's chi-square: whether counts follow a law, and how large a departure would have been seen.

What the tests of distribution and `outrider verify` share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

SMALL = 5.0  # bins that expect fewer are merged
FALSE_ALARM = 1e-6  # how often counts that follow the law pass the threshold
POWER = 0.9  # how often a departure of the size that `detectable` names passes it


@dataclass(frozen=True)
class Comparison:
    statistic: float  # infinite where something came that cannot come
    freedom: int
    samples: float

    @property
    def threshold(self) -> float:
        return quantile(self.freedom)

    @property
    def excess(self) -> float:
        """Above 1 the law is broken."""
        return self.statistic / self.threshold

    @property
    def holds(self) -> bool:
        return self.excess < 1

    @property
    def detectable(self) -> float:
        """The total variation from which on any bias, however it is spread over the bins, fails with chance POWER.

        A law q with sum |q - p| = 2 d has sum (q - p)^2 / p >= (2 d)^2, by Cauchy and Schwarz, so the statistic's
        noncentrality is at least 4 d^2 samples. Moves within a merged bin are not seen. 1: nothing surely is.
        """
        return min(math.sqrt(noncentrality(self.freedom) / max(self.samples, 1)) / 2, 1.0)


def compare(counts: Tensor, expected: Tensor) -> Comparison:
    """Of any shape; both have the same total."""
    seen, meant = counts.flatten().double(), expected.flatten().double()
    samples = float(seen.sum())
    impossible = bool(seen[meant == 0].any())
    small = meant < SMALL
    rest = torch.stack([seen[small].sum(), meant[small].sum()])
    seen, meant = torch.cat([seen[~small], rest[:1]]), torch.cat([meant[~small], rest[1:]])
    seen, meant = seen[meant > 0], meant[meant > 0]
    found = math.inf if impossible else float(((seen - meant).square() / meant).sum())
    return Comparison(found, max(len(meant) - 1, 1), samples)


@cache
def quantile(freedom: int) -> float:
    """What the statistic passes with the chance of a false alarm."""
    return _root(lambda value: FALSE_ALARM - passing(freedom, 0.0, value), freedom)


@cache
def noncentrality(freedom: int) -> float:
    """samples * sum (q - p)^2 / p, from which on the statistic passes the threshold with chance POWER."""
    threshold = quantile(freedom)
    return _root(lambda value: passing(freedom, value, threshold) - POWER, threshold)


def passing(freedom: int, noncentrality: float, value: float) -> float:
    """The chance that a noncentral chi-square passes a value: a Poisson mixture of central ones."""
    mean = noncentrality / 2
    terms = torch.arange(int(mean + 12 * math.sqrt(mean) + 30), dtype=torch.float64)
    weights = torch.exp(terms * math.log(mean) - mean - torch.lgamma(terms + 1)) if mean else (terms == 0).double()
    tails = torch.special.gammaincc(terms + freedom / 2, torch.full_like(terms, value / 2))
    return float((weights * tails).sum())


def _root(rising: Callable[[float], float], start: float) -> float:
    """Where a function that rises from below 0 reaches it."""
    low, high = 0.0, max(start, 1.0)
    while rising(high) < 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
