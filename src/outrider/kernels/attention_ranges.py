"""What the queries of training see: the argument of attention with gradients, in train and in cuda/ranges.py.

Letters: B rows, N queries of a row, M keys of a row, G key/value heads, D, A groups of N / A queries, S keys of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class OwnKeys:
    """Keys of their own for groups of queries, one group after the other."""

    keys: Tensor  # [B, A, S, G, D]
    values: Tensor  # [B, A, S, G, D]
    counts: Tensor | None = None  # [B, N] int32: each query sees the first so many of its group's; None: all


@dataclass(frozen=True)
class AttentionRanges:
    """Each query sees the keys of its row from `begins` to before `ends`, and those of its own."""

    keys: Tensor  # [B, M, G, D]
    values: Tensor  # [B, M, G, D]
    begins: Tensor  # [B, N] int32
    ends: Tensor  # [B, N] int32
    own: OwnKeys | None = None
