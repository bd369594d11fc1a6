"""Attention ranges of training: the argument of attention with gradients, in train and cuda/range_attention.py.

Letters: B rows, N queries of a row, M keys of a row, G key/value heads, D, A groups of N / A queries, S keys of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class OwnKeys:
    """Keys that only one group of queries attends to, for consecutive groups of queries."""

    keys: Tensor  # [B, A, S, G, D]
    values: Tensor  # [B, A, S, G, D]
    counts: Tensor | None = None  # [B, N] int32: keys of its group that each query attends to; None: all


@dataclass(frozen=True)
class AttentionRanges:
    """Each query attends to keys begins .. ends - 1 of its row, and to those of its group."""

    keys: Tensor  # [B, M, G, D]
    values: Tensor  # [B, M, G, D]
    begins: Tensor  # [B, N] int32
    ends: Tensor  # [B, N] int32
    own: OwnKeys | None = None
