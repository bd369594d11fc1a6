"""Functions shared by the readers of all kinds of heads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import UserError
from ...models import ModelConfig, read_config
from ...models.config import MAX_LAYERS, ConfigFields, positive
from .folder import Folder

LAYER = re.compile(r"model\.layers\.(\d+)\.")
QUERY = "model.layers.0.self_attn.q_proj.weight"
FC = "model.fc.weight"
NORM = "model.hidden_norm.weight"  # only in heads that read the aux hidden states as context


def ends(folder: Folder, width: int, under: str = "") -> dict[str, Any]:
    """Return the HeadShape fields of embedding and head matrix: the head's own if their tensors exist.

    Flags of the configuration are ignored. under: prefix of both names; default: the names of a decoder.
    """
    embedding = folder.tensors.get(f"{under or 'model.'}embed_tokens.weight")
    return {
        "width": width,
        "own_embedding": 0 if embedding is None else embedding.shape[0],
        "own_head": f"{under}lm_head.weight" in folder.tensors,
        "logit_scale": logit_scale(folder),
    }


def logit_scale(folder: Folder) -> float:
    """Return the factor of the logits, 1 by default."""
    scale = folder.stated("logit_scale")
    return 1.0 if scale is None else positive(scale, "logit_scale")


def layer_count(folder: Folder) -> int:
    """Count the layers by the names of the tensors."""
    last = max(int(found[1]) for name in folder.tensors if (found := LAYER.match(name)))
    return ConfigFields({"num_hidden_layers": last + 1}, {}).count("num_hidden_layers", most=MAX_LAYERS)


def decoder(folder: Folder, kind: str) -> ModelConfig:
    """Read the layers as Llama's; they have biases and head norms if the tensors exist."""
    tensors, first = folder.tensors, "model.layers.0."
    count = layer_count(folder)
    config = {"max_position_embeddings": 1, "vocab_size": 1} | folder.config
    config |= {"model_type": "llama", "num_hidden_layers": count, "tie_word_embeddings": False}
    heads = config.get("num_attention_heads")
    if config.get("head_dim") is None and isinstance(heads, int) and heads > 0:
        config["head_dim"] = tensors[QUERY].shape[0] // heads
    layers = read_config(config)
    # Checked before rope tables of that size are allocated.
    if layers.heads * layers.head_dim != tensors[QUERY].shape[0]:
        raise UserError(
            f"the queries of `{folder.path}` have {tensors[QUERY].shape[0]} rows, but its configuration says "
            f"{layers.heads} heads of {layers.head_dim}: config and weights are not of the same head"
        )
    return replace(
        layers,
        architecture=kind,
        windows=windows(config, count),
        head_norms=first + "self_attn.q_norm.weight" in tensors,
        qkv_bias=first + "self_attn.q_proj.bias" in tensors,
        output_bias=first + "self_attn.o_proj.bias" in tensors,
        mlp_bias=first + "mlp.gate_proj.bias" in tensors,
    )


def windows(config: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the attention window of each layer in tokens; 0: full attention."""
    kinds = config.get("layer_types") or ["full_attention"] * count
    if not isinstance(kinds, list) or len(kinds) != count:
        raise UserError(
            f"the head's configuration says `layer_types` is {kinds}, but it has {count} layers: "
            "config and weights are not of the same head"
        )
    fields = ConfigFields(config, {})
    return tuple(fields.count("sliding_window") if kind == "sliding_attention" else 0 for kind in kinds)


def whole_numbers(folder: Folder, name: str, value: Any) -> tuple[int, ...]:
    """Check that a value of the configuration is a list of layers."""
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise UserError(f"`{folder.path}` says `{name}` is {value}: expected a list of layers")
    return tuple(value)


def fused_states(folder: Folder, target_width: int, called: str) -> int:
    """Return the number of aux hidden states that `fc.weight` reads side by side."""
    if FC not in folder.tensors:
        raise UserError(f"`{folder.path}` lacks the tensor `fc.weight` of {called} head: fetch it again")
    count, rest = divmod(folder.columns(FC), target_width)
    if rest or not count:
        raise UserError(
            f"`fc.weight` of `{folder.path}` reads {folder.columns(FC)} floats, no multiple of the target's width "
            f"{target_width}: state `target_hidden_size` in its config.json"
        )
    return count
