"""What Gemma 3 does differently from Llama; the rest of it is data in `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def layer_types(pattern: int, layers: int) -> list[str]:
    """Each layer whose number is a multiple of `pattern` sees everything."""
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]


def rope_parameters(
    config: Mapping[str, Any], scaling: Mapping[str, Any], given: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Two bases: short-sighted layers turn faster. Scaling concerns only the layers that see everything.

    given: what newer configurations say of each kind of layer.
    """
    full = {"rope_theta": config.get("rope_theta", 1_000_000.0), **scaling}
    sliding = {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
    return {
        "full_attention": {**full, **given["full_attention"]},
        "sliding_attention": {**sliding, **given["sliding_attention"]},
    }


def embedding_scale(scale: float, stored: torch.dtype) -> float:
    """The factor as the trained model had it.

    It was trained with sqrt(width) rounded to the dtype of the embedding, and transformers rounds likewise, so half
    precision checkpoints get the rounded factor. Quantised files (uint8 blocks) follow llama.cpp: not rounded.
    """
    if stored not in (torch.bfloat16, torch.float16):
        return scale
    return float(torch.tensor(scale).to(stored))
