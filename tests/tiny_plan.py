"""The plan of a tiny head: fields that all kinds share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import tiny


@dataclass(frozen=True)
class HeadPlan:
    """The configuration of a head, which determines its tensors in every layout."""

    method: str
    target: str = "llama"
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 96
    layers: int = 1
    aux_layers: tuple[int, ...] = (1, 2, 3)  # states entering these layers
    head_norms: bool = False
    bias: bool = False  # in attention and MLP
    theta: float = 10_000.0
    draft_vocabulary: int | None = 60
    own_embedding: bool = False
    own_head: bool = True
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def target_width(self) -> int:
        return int(tiny.original(self.target).config.hidden_size)

    @property
    def ids(self) -> Tensor | None:
        """Return the ids of the draft vocabulary, rising; None: all tokens."""
        if self.draft_vocabulary is None:
            return None
        order = torch.randperm(tiny.VOCABULARY, generator=torch.Generator().manual_seed(self.seed))
        return order[: self.draft_vocabulary].sort().values
