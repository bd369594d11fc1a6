"""Rotary position tables, equal to transformers'."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """How one layer turns positions into angles. Equal ropes share their tables."""

    theta: float
    kind: str = "default"  # one of KINDS
    factor: float = 1.0  # linear and llama3: slow frequencies are divided by it
    low: float = 1.0  # llama3: at most this many turns in the original context make a frequency slow
    high: float = 4.0  # llama3: at least this many turns leave a frequency as it is
    original_context: int = 0  # llama3: the context before it was stretched


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions: [D / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return plain


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Divide the slow frequencies, keep the fast ones, and blend in between."""
    wavelength = 2 * math.pi / plain
    blend = (rope.original_context / wavelength - rope.low) / (rope.high - rope.low)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    slow = wavelength > rope.original_context / rope.low
    fast = wavelength < rope.original_context / rope.high
    return torch.where(slow, plain / rope.factor, torch.where(fast, plain, blended))


def tables(rope: Rope, head_dim: int, positions: int, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [positions, D / 2] f32 each. `factors` [D / 2] divide the frequencies (GGUF's rope_freqs)."""
    turns = frequencies(rope, head_dim)
    if factors is not None:
        turns = turns / factors
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * turns
    return angles.cos(), angles.sin_()
