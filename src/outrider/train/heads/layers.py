"""Layers with gradients. Their parameters have the names of checkpoints. Letters: H heads, G key/value heads, D."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.attention_ranges import AttentionRanges
from ...models import ModelConfig
from ...models.rope import Rope, tables


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


HeadMatrix = Literal["target", "copied", "trained"]  # the target's; its rows as a part of this one; or learnt


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


class DecoderLayer(nn.Module):
    """The parts of a layer; how the text passes through them is up to the student."""

    def __init__(self, shape: LayerShape, inputs: int | None = None) -> None:
        """inputs: what its attention reads, if not the width."""
        super().__init__()
        self.input_layernorm = Norm(shape.width, shape.eps)
        self.self_attn = Attention(shape, inputs)
        self.post_attention_layernorm = Norm(shape.width, shape.eps)
        self.mlp = Mlp(shape)


def own_head(kind: HeadMatrix, rows: Tensor) -> nn.Linear | None:
    """A matrix of its own to the logits, which begins as the target's rows [U, E]; None: those themselves do."""
    if kind == "target":
        return None
    head = nn.Linear(rows.shape[1], len(rows), bias=False)
    head.weight = nn.Parameter(rows.float().cpu().clone(), kind == "trained")
    return head


def narrow(x: Tensor) -> Tensor:
    """Under autocast, cast once what several matrices read."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _heads(x: Tensor, count: int) -> Tensor:
    return x.view(*x.shape[:-1], count, -1)


def attend(query: Tensor, sight: AttentionRanges) -> Tensor:
    """Queries [B, N, H, D] over what they see: [B, N, H * D]. Whoever sees nothing gets zeros."""
    if query.is_cuda:
        from ...kernels.cuda.range_attention import attend as fused  # needs Triton, which is where the GPUs are

        return fused(query, sight)
    return attend_plainly(query, sight)


def attend_plainly(query: Tensor, sight: AttentionRanges) -> Tensor:
    """The same, with all scores written down."""
    (rows, count, _, size), keys, values, own = query.shape, sight.keys, sight.values, sight.own
    query = query.reshape(rows, count, keys.shape[2], -1, size) * size**-0.5  # [B, N, G, H / G, D]
    scores = torch.einsum("bngjd,bmgd->bngjm", query, keys)
    index = torch.arange(keys.shape[1], device=query.device)
    seen = (index >= sight.begins[..., None]) & (index < sight.ends[..., None])  # [B, N, M]
    if own is None:
        return torch.einsum("bngjm,bmgd->bngjd", _shares(scores, seen).to(values.dtype), values).flatten(2)
    groups, each = own.keys.shape[1:3]
    query = query.view(rows, groups, -1, *query.shape[2:])  # [B, A, N / A, G, H / G, D]
    own_scores = torch.einsum("bapgjd,basgd->bapgjs", query, own.keys).flatten(1, 2)  # [B, N, G, H / G, S]
    within = torch.arange(each, device=query.device).expand(rows, count, -1)
    own_seen = within < (each if own.counts is None else own.counts[..., None])  # [B, N, S]
    weights = _shares(torch.cat([scores, own_scores], -1), torch.cat([seen, own_seen], -1)).to(values.dtype)
    common, mine = torch.split(weights, [keys.shape[1], each], -1)
    mine = mine.reshape(rows, groups, -1, *mine.shape[2:])  # [B, A, N / A, G, H / G, S]
    mixed = torch.einsum("bapgjs,basgd->bapgjd", mine, own.values).flatten(1, 2)
    return (torch.einsum("bngjm,bmgd->bngjd", common, values) + mixed).flatten(2)


def _shares(scores: Tensor, seen: Tensor) -> Tensor:
    """Scores [B, N, G, H / G, M] to weights f32; all are 0 for who sees nothing."""
    unseen = ~seen[:, :, None, None]
    return scores.masked_fill(unseen, -30_000.0).softmax(-1, dtype=torch.float32).masked_fill(unseen, 0.0)


def causal(documents: Tensor) -> tuple[Tensor, Tensor]:
    """[B, L] numbers of documents, -1: none, to what each token sees of the row: begins and ends, [B, L] int32 each."""
    index = torch.arange(documents.shape[1], dtype=torch.int32, device=documents.device).expand_as(documents)
    starts = functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    begins = torch.where(starts, index, 0).cummax(1).values
    inside = documents >= 0
    return torch.where(inside, begins, 0), torch.where(inside, index + 1, 0)
