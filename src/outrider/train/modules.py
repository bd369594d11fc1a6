"""Layers with gradients. Their parameters have the names of checkpoints. Letters: H heads, G key/value heads, D."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..models.rope import Rope, tables


@dataclass(frozen=True)
class LayerShape:
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    eps: float
    rope: Rope
    head_norms: bool = False


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), (len(self.weight),), self.weight, self.eps)


class Turning(nn.Module):
    """Rotary tables of a head's layers; no part of its checkpoint."""

    cos: Tensor  # [positions, D / 2]
    sin: Tensor

    def __init__(self, rope: Rope, head_dim: int, positions: int) -> None:
        super().__init__()
        cos, sin = tables(rope, head_dim, positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """x [..., N, heads, D] turned by its positions [..., N]."""
        cos, sin = self.cos[places][..., None, :].to(x.dtype), self.sin[places][..., None, :].to(x.dtype)
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Attention(nn.Module):
    def __init__(self, shape: LayerShape, inputs: int | None = None) -> None:
        super().__init__()
        self.shape, inputs = shape, inputs or shape.width
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=False)
        self.k_proj = nn.Linear(inputs, keys, bias=False)
        self.v_proj = nn.Linear(inputs, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.width, bias=False)
        if shape.head_norms:
            self.q_norm = Norm(shape.head_dim, shape.eps)
            self.k_norm = Norm(shape.head_dim, shape.eps)

    def queries(self, x: Tensor, places: Tensor, turning: Turning) -> Tensor:
        """x [..., N, inputs] to [..., N, H, D]."""
        found = _heads(self.q_proj(x), self.shape.heads)
        if self.shape.head_norms:
            found = self.q_norm(found).to(found.dtype)
        turned: Tensor = turning(found, places)
        return turned

    def entries(self, x: Tensor, places: Tensor, turning: Turning) -> tuple[Tensor, Tensor]:
        """Keys and values [..., N, G, D] each."""
        keys = _heads(self.k_proj(x), self.shape.kv_heads)
        if self.shape.head_norms:
            keys = self.k_norm(keys).to(keys.dtype)
        return turning(keys, places), _heads(self.v_proj(x), self.shape.kv_heads)


class Mlp(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


def _heads(x: Tensor, count: int) -> Tensor:
    return x.view(*x.shape[:-1], count, -1)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    own_keys: Tensor | None = None,
    own_values: Tensor | None = None,
    own_seen: Tensor | None = None,
) -> Tensor:
    """Queries [B, N, H, D] over keys and values [B, M, G, D], where `seen` [B, N, M] says so: [B, N, H * D].

    Each query may have keys and values of its own beside them, [B, N, S, G, D], seen where `own_seen` [B, N, S] says
    so; None: all. Whoever sees nothing gets the mean of everything, finite.
    """
    rows, count, heads, size = query.shape
    groups = keys.shape[2]
    query = query.view(rows, count, groups, -1, size) * size**-0.5  # [B, N, G, H / G, D]
    lines = query.permute(0, 2, 3, 1, 4).reshape(rows, groups, -1, size)  # [B, G, H / G * N, D]
    scores = (lines @ keys.permute(0, 2, 3, 1)).view(rows, groups, -1, count, keys.shape[1])  # [B, G, H / G, N, M]
    scores = scores.masked_fill(~seen[:, None, None], -30_000.0)
    if own_keys is None or own_values is None:
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype).flatten(2, 3)
        return _lined(weights @ values.permute(0, 2, 1, 3), rows, count, heads, size)
    own = torch.einsum("bngjd,bnsgd->bgjns", query, own_keys)  # [B, G, H / G, N, S]
    if own_seen is not None:
        own = own.masked_fill(~own_seen[:, None, None], -30_000.0)
    weights = torch.cat([scores, own], -1).softmax(-1, dtype=torch.float32).to(values.dtype)
    common, mine = torch.split(weights, [keys.shape[1], own_keys.shape[2]], -1)
    mixed = _lined(common.flatten(2, 3) @ values.permute(0, 2, 1, 3), rows, count, heads, size)
    return mixed + torch.einsum("bgjns,bnsgd->bngjd", mine, own_values).reshape(rows, count, heads * size)


def _lined(mixed: Tensor, rows: int, count: int, heads: int, size: int) -> Tensor:
    """[B, G, H / G * N, D] to [B, N, H * D]."""
    return mixed.view(rows, mixed.shape[1], -1, count, size).permute(0, 3, 1, 2, 4).reshape(rows, count, heads * size)


def causal(documents: Tensor) -> Tensor:
    """[B, L] numbers of documents, -1: none, to [B, L, L]: who sees whom."""
    length = documents.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    same = documents[:, :, None] == documents[:, None, :]
    return same & (documents >= 0)[:, :, None] & before
