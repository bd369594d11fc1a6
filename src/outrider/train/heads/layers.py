"""Layers with gradients, their shape, and the config.json keys for it. Parameters are named as in checkpoints.

Shapes: H attention heads, G key/value heads, D the size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.structures import AttentionRanges
from ...models import ModelConfig
from ...models.rope import Rope, cos_sin_tables, rotary_order

HeadMatrix = Literal[
    "target", "copied", "trained"
]  # lm_head: the target's, a frozen copy of its rows, or a trained one

PLAIN_ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class LayerShape:
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    eps: float
    rope: Rope
    context: int  # positions of the target, by which LongRoPE chooses its factors
    head_norms: bool = False


def layer_shape(config: ModelConfig, mlp_width: int, head_norms: bool) -> LayerShape:
    """Return the shape of a layer as wide as the target's, with the rope of its first layer that has one."""
    return LayerShape(
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        mlp_width=mlp_width or config.mlp_width,
        eps=config.eps,
        rope=first_rope(config),
        context=config.context,
        head_norms=head_norms,
    )


def first_rope(config: ModelConfig) -> Rope:
    """Return the target's rope."""
    return next((rope for rope in config.ropes if rope is not None), Rope(10_000.0))


def plain_rope(config: ModelConfig) -> Rope:
    """Return the target's rope for a model that rotates whole heads, without YaRN and LongRoPE."""
    rope = first_rope(config)
    return replace(rope, dims=0) if rope.kind in PLAIN_ROPES else Rope(rope.theta)


def layer_keys(shape: LayerShape, layers: int, target: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json that describe the layers."""
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
        **rope_keys(shape.rope, shape.head_dim),
    }


def rope_keys(rope: Rope, head_dim: int) -> dict[str, Any]:
    """Return the keys of config.json that describe a rope."""
    found: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.dims:
        found["partial_rotary_factor"] = rope.dims / head_dim
    if rope.kind == "default":
        return found
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "linear":
        scaling["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        scaling |= {"factor": rope.factor, "low_freq_factor": rope.low, "high_freq_factor": rope.high}
    elif rope.kind == "yarn":
        scaling |= {"factor": rope.factor, "beta_slow": rope.low, "beta_fast": rope.high, "truncate": rope.truncate}
    elif rope.kind == "longrope":
        scaling |= {"short_factor": list(rope.short), "long_factor": list(rope.long)}
    else:
        scaling["factor"] = rope.factor
    if rope.kind in ("yarn", "longrope"):
        scaling["attention_factor"] = rope.attention_factor
    return found | {"rope_scaling": scaling}


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), (len(self.weight),), self.weight, self.eps)


class Rotary(nn.Module):
    """Rotary tables of a head's layers; not part of its checkpoint."""

    cos: Tensor  # [positions, D / 2]
    sin: Tensor

    def __init__(self, shape: LayerShape, positions: int) -> None:
        super().__init__()
        self.order = rotary_order(shape.rope, shape.head_dim)  # of dimensions, the same in queries and keys
        cos, sin = cos_sin_tables(shape.rope, shape.head_dim, positions, context=shape.context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [..., N, heads, D] by its positions [..., N]."""
        cos, sin = self.cos[positions][..., None, :].to(x.dtype), self.sin[positions][..., None, :].to(x.dtype)
        left, right = (x if self.order is None else x[..., self.order]).chunk(2, -1)
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

    def queries(self, x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
        """Project x [..., N, inputs] to queries [..., N, H, D]."""
        queries = _split_heads(self.q_proj(x), self.shape.heads)
        if self.shape.head_norms:
            queries = self.q_norm(queries).to(queries.dtype)
        rotated: Tensor = rotary(queries, positions)
        return rotated

    def keys_values(self, x: Tensor, positions: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Project x [..., N, inputs] to keys and values [..., N, G, D] each."""
        keys = _split_heads(self.k_proj(x), self.shape.kv_heads)
        if self.shape.head_norms:
            keys = self.k_norm(keys).to(keys.dtype)
        return rotary(keys, positions), _split_heads(self.v_proj(x), self.shape.kv_heads)


class Mlp(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """The modules of a layer. Each kind of head defines its own forward pass."""

    def __init__(self, shape: LayerShape, inputs: int | None = None) -> None:
        """Make the modules. inputs: the width that attention reads, if not that of the layer."""
        super().__init__()
        self.input_layernorm = Norm(shape.width, shape.eps)
        self.self_attn = Attention(shape, inputs)
        self.post_attention_layernorm = Norm(shape.width, shape.eps)
        self.mlp = Mlp(shape)


def make_lm_head(kind: HeadMatrix, rows: Tensor) -> nn.Linear | None:
    """Make the head's own lm_head, initialised with the target's rows [U, E]; None: the head uses the target's."""
    if kind == "target":
        return None
    head = nn.Linear(rows.shape[1], len(rows), bias=False)
    head.weight = nn.Parameter(rows.float().cpu().clone(), kind == "trained")
    return head


def to_autocast(x: Tensor) -> Tensor:
    """Cast to the autocast type, if it is enabled, once for all matrices that read x."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _split_heads(x: Tensor, count: int) -> Tensor:
    return x.view(*x.shape[:-1], count, -1)


def attend(query: Tensor, kv: AttentionRanges) -> Tensor:
    """Attend with queries [B, N, H, D] to their KV ranges: [B, N, H * D]. Queries with an empty range get zeros."""
    if query.is_cuda:
        from ...kernels.cuda.range_attention import attend as fused  # imported here: it needs Triton

        return fused(query, kv)
    return attend_reference(query, kv)


def attend_reference(query: Tensor, kv: AttentionRanges) -> Tensor:
    """Compute `attend` in plain torch, with all scores in memory."""
    (rows, count, _, size), keys, values, own = query.shape, kv.keys, kv.values, kv.own
    query = query.reshape(rows, count, keys.shape[2], -1, size) * size**-0.5  # [B, N, G, H / G, D]
    scores = torch.einsum("bngjd,bmgd->bngjm", query, keys)
    index = torch.arange(keys.shape[1], device=query.device)
    visible = (index >= kv.begins[..., None]) & (index < kv.ends[..., None])  # [B, N, M]
    if own is None:
        return torch.einsum("bngjm,bmgd->bngjd", _softmax(scores, visible).to(values.dtype), values).flatten(2)
    groups, per_group = own.keys.shape[1:3]
    query = query.view(rows, groups, -1, *query.shape[2:])  # [B, A, N / A, G, H / G, D]
    own_scores = torch.einsum("bapgjd,basgd->bapgjs", query, own.keys).flatten(1, 2)  # [B, N, G, H / G, S]
    within = torch.arange(per_group, device=query.device).expand(rows, count, -1)
    own_visible = within < (per_group if own.counts is None else own.counts[..., None])  # [B, N, S]
    weights = _softmax(torch.cat([scores, own_scores], -1), torch.cat([visible, own_visible], -1)).to(values.dtype)
    shared_weights, own_weights = torch.split(weights, [keys.shape[1], per_group], -1)
    own_weights = own_weights.reshape(rows, groups, -1, *own_weights.shape[2:])  # [B, A, N / A, G, H / G, S]
    mixed = torch.einsum("bapgjs,basgd->bapgjd", own_weights, own.values).flatten(1, 2)
    return (torch.einsum("bngjm,bmgd->bngjd", shared_weights, values) + mixed).flatten(2)


def _softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Turn scores [B, N, G, H / G, M] into weights f32; all 0 where nothing is visible."""
    masked = ~visible[:, :, None, None]
    return scores.masked_fill(masked, -30_000.0).softmax(-1, dtype=torch.float32).masked_fill(masked, 0.0)


def causal_ranges(documents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the range of its row that each token sees: begins and ends, [B, L] int32 each.

    documents [B, L]: the number of each token's document; -1: padding.
    """
    index = torch.arange(documents.shape[1], dtype=torch.int32, device=documents.device).expand_as(documents)
    starts = functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    begins = torch.where(starts, index, 0).cummax(1).values
    inside = documents >= 0
    return torch.where(inside, begins, 0), torch.where(inside, index + 1, 0)
