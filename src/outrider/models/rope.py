"""Rotary embedding tables, equal to those of transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a layer. Layers with equal ones share their tables."""

    theta: float
    kind: str = "default"  # one of KINDS
    factor: float = 1.0  # linear and llama3: divides low frequencies
    low: float = 1.0  # llama3: frequencies with fewer periods in the original context are divided
    high: float = 4.0  # llama3: frequencies with more periods in the original context stay unchanged
    original_context: int = 0  # llama3: the context before it was extended


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the radians per position of each pair of dimensions: [D / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return plain


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Divide the low frequencies, keep the high ones, and interpolate in between."""
    wavelength = 2 * math.pi / plain
    blend = (rope.original_context / wavelength - rope.low) / (rope.high - rope.low)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    slow = wavelength > rope.original_context / rope.low
    fast = wavelength < rope.original_context / rope.high
    return torch.where(slow, plain / rope.factor, torch.where(fast, plain, blended))


def tables(rope: Rope, head_dim: int, positions: int, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, [positions, D / 2] f32 each.

    factors [D / 2] divide the frequencies (rope_freqs of GGUF).
    """
    rates = frequencies(rope, head_dim)
    if factors is not None:
        rates = rates / factors
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * rates
    return angles.cos(), angles.sin_()
