"""Pearson's statistic, and the value that it passes once in very many runs: what the laws of distribution share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALL = 5.0  # bins that expect fewer are merged


def statistic(counts: Tensor, expected: Tensor) -> tuple[float, float]:
    """Chi-square of `counts` against `expected`, and its threshold: ten standard deviations above the mean."""
    seen, meant = counts.flatten().double(), expected.flatten().double()
    if seen[meant == 0].any():
        return math.inf, 0.0
    small = meant < SMALL
    rest = torch.stack([seen[small].sum(), meant[small].sum()])
    seen, meant = torch.cat([seen[~small], rest[:1]]), torch.cat([meant[~small], rest[1:]])
    seen, meant = seen[meant > 0], meant[meant > 0]
    freedom = max(len(meant) - 1, 1)
    return float(((seen - meant).square() / meant).sum()), freedom + 10 * math.sqrt(2 * freedom)
