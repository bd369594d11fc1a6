"""What the readers of all kinds of heads share."""

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
NORM = "model.hidden_norm.weight"  # outside a layer: of heads that read the target's states as a context


def ends(folder: Folder, width: int, under: str = "") -> dict[str, Any]:
    """Fields of a HeadShape: embedding and head, its own where the tensors are, whatever the flags say.

    under: what stands before both names; by default they are named as a decoder's.
    """
    embedding = folder.tensors.get(f"{under or 'model.'}embed_tokens.weight")
    return {
        "width": width,
        "own_embedding": 0 if embedding is None else embedding.shape[0],
        "own_head": f"{under}lm_head.weight" in folder.tensors,
        "logit_scale": logit_scale(folder),
    }


def logit_scale(folder: Folder) -> float:
    scale = folder.stated("logit_scale")
    return 1.0 if scale is None else positive(scale, "logit_scale")


def layer_count(folder: Folder) -> int:
    """As the tensors say."""
    last = max(int(found[1]) for name in folder.tensors if (found := LAYER.match(name)))
    return ConfigFields({"num_hidden_layers": last + 1}, {}).count("num_hidden_layers", most=MAX_LAYERS)


def decoder(folder: Folder, kind: str) -> ModelConfig:
    """The layers, read as Llama's; biases and head norms are where their tensors are."""
    tensors, first = folder.tensors, "model.layers.0."
    count = layer_count(folder)
    config = {"max_position_embeddings": 1, "vocab_size": 1} | folder.config
    config |= {"model_type": "llama", "num_hidden_layers": count, "tie_word_embeddings": False}
    heads = config.get("num_attention_heads")
    if config.get("head_dim") is None and isinstance(heads, int) and heads > 0:
        config["head_dim"] = tensors[QUERY].shape[0] // heads
    layers = read_config(config)
    # Checked before anyone makes tables of that size.
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
    kinds = config.get("layer_types") or ["full_attention"] * count
    if not isinstance(kinds, list) or len(kinds) != count:
        raise UserError(
            f"the head's configuration says `layer_types` is {kinds}, but it has {count} layers: "
            "config and weights are not of the same head"
        )
    fields = ConfigFields(config, {})
    return tuple(fields.count("sliding_window") if kind == "sliding_attention" else 0 for kind in kinds)


def whole_numbers(folder: Folder, name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise UserError(f"`{folder.path}` says `{name}` is {value}: expected a list of layers")
    return tuple(value)


def fused_states(folder: Folder, target_width: int, called: str) -> int:
    """How many states of the target `fc.weight` reads side by side."""
    if FC not in folder.tensors:
        raise UserError(f"`{folder.path}` lacks the tensor `fc.weight` of {called} head: fetch it again")
    count, rest = divmod(folder.columns(FC), target_width)
    if rest or not count:
        raise UserError(
            f"`fc.weight` of `{folder.path}` reads {folder.columns(FC)} floats, no multiple of the target's width "
            f"{target_width}: state `target_hidden_size` in its config.json"
        )
    return count
