"""Quantized keys and values: int8 or e4m3 numbers, and one fp32 scale for each token and KV head.

A head of a token is quantized by itself, when it is stored. So its bits depend on no other token, and a draft that is
verified leaves the same keys and values as plain decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # stored number of a head's largest value
SMALLEST = 1e-30  # a head without a larger value is stored as zeros: its scale would lose bits


def quantize_heads(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize heads [..., D] f32: return the numbers [..., D] of `dtype`, and the scales [...] f32.

    A head with a value that is not finite becomes zeros with the scale NaN.
    """
    top = heads.abs().amax(-1)  # [...]
    scales = torch.where(top.isfinite(), top / LARGEST[dtype], torch.nan)
    usable = (top >= SMALLEST) & top.isfinite()
    factors = torch.where(usable, LARGEST[dtype] / torch.where(usable, top, 1.0), 0.0)
    numbers = torch.where(usable[..., None], heads * factors[..., None], 0.0)
    return (numbers.round() if dtype is torch.int8 else numbers).to(dtype), scales


def key_factors(key_bias: Tensor | None, kv_heads: int) -> Tensor | None:
    """Return [G, D] powers of two that int8 keys are divided by before they are quantized; None: by nothing.

    Large biases in few dimensions would set the scale of all others (Qwen2.5). Queries are multiplied instead: powers
    of two leave their products the same, also after rope, since both dimensions of a pair get one factor.
    """
    if key_bias is None:
        return None
    pairs = key_bias.float().view(kv_heads, 2, -1)  # dimensions i and i + D / 2 are rotated together
    factors = torch.exp2(pairs.square().sum(1, keepdim=True).sqrt().clamp(min=1).log2().round())
    return factors.expand(pairs.shape).flatten(1).contiguous()


def dequantize_heads(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return heads [..., D] f32."""
    return numbers.float() * scales[..., None]
