"""The shape of a student's layers, and what config.json says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..models import ModelConfig
from ..models.rope import Rope


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


def layer_shape(config: ModelConfig, mlp_width: int, head_norms: bool) -> LayerShape:
    """A layer as wide as the target's, that turns as the first of them that turns."""
    return LayerShape(
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        mlp_width=mlp_width or config.mlp_width,
        eps=config.eps,
        rope=first_rope(config),
        head_norms=head_norms,
    )


def first_rope(config: ModelConfig) -> Rope:
    return next((rope for rope in config.ropes if rope is not None), Rope(10_000.0))


def layer_keys(shape: LayerShape, layers: int, target: ModelConfig) -> dict[str, Any]:
    """What config.json says of the layers."""
    return {
        "model_type": "llama",
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": target.context,
        "vocab_size": target.vocabulary,
        "tie_word_embeddings": False,
        **rope_keys(shape.rope),
    }


def rope_keys(rope: Rope) -> dict[str, Any]:
    if rope.kind == "default":
        return {"rope_theta": rope.theta}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low,
            "high_freq_factor": rope.high,
            "original_max_position_embeddings": rope.original_context,
        }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
