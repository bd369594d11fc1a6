"""GGUF files of hybrid models: the names, metadata and layouts that llama.cpp has for recurrent layers.

Gated DeltaNet (Qwen3-Next, Qwen3.5) and Mamba-2 (Granite 4) share the names `ssm_*`. A decay is stored as -exp(A_log),
vectors may have a dimension of size 1, and in Qwen3.5 the value heads of each key head are apart: head r of key head k
is head r * G + k, not k * R + r (G key heads, R value heads for each).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from ..kernels.quantization import FORMATS
from .checkpoint import Stored

if TYPE_CHECKING:
    from .gguf import GgufFields

TILED = ("qwen35", "qwen35moe")  # architectures with value heads apart
HYBRIDS = ("qwen3next", *TILED, "granitehybrid")
DELTA_NAMES = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_in.weight": "linear_attn.in_proj_qkvz.weight",  # of older files of Qwen3-Next, instead of the two above
    "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
MAMBA_NAMES = {
    "ssm_in.weight": "mamba.in_proj.weight",
    "ssm_conv1d.weight": "mamba.conv1d.weight",
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A",
    "ssm_d": "mamba.D",
    "ssm_norm.weight": "mamba.norm.weight",
    "ssm_out.weight": "mamba.out_proj.weight",
    "ffn_gate_shexp.weight": "shared_mlp.gate_proj.weight",
    "ffn_up_shexp.weight": "shared_mlp.up_proj.weight",
    "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
}
# Parts of an MTP module outside of its layer: the names of llama.cpp, and those of Qwen.
MODULE_PARTS = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "nextn.embed_tokens": "embed_tokens",
}
LAYER = re.compile(r"blk\.(\d+)\.(.+)")
FLAT = ("A", "D", "norm.weight")  # vectors that may be matrices in files
DEFAULT_INTERVAL = 4  # layers from one with attention to the next


def hybrid_name(name: str, architecture: str) -> str | None:
    """Translate the name of a tensor of a recurrent layer or of one beside it; None: other files have it too."""
    match = LAYER.fullmatch(name)
    names = MAMBA_NAMES if architecture == "granitehybrid" else DELTA_NAMES
    return f"model.layers.{match[1]}.{names[match[2]]}" if match and match[2] in names else None


def module_name(name: str, translated: str, layers: int) -> str:
    """Return the name of a tensor, as Qwen has it if it belongs to an MTP module. Modules follow the layers.

    translated: its name as a tensor of the model. All modules share the parts outside of their layers, which are with
    the first.
    """
    match = LAYER.fullmatch(name)
    if match is None or int(match[1]) < layers:
        return translated
    module = int(match[1]) - layers
    part, _, leaf = match[2].rpartition(".")
    if part in MODULE_PARTS and module == 0:
        return f"mtp.{MODULE_PARTS[part]}.{leaf}"
    prefix = f"model.layers.{match[1]}."
    return f"mtp.layers.{module}.{translated.removeprefix(prefix)}"


def hybrid_keys(fields: GgufFields, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json for the recurrent layers."""
    layers, heads = config["num_hidden_layers"], fields.count("ssm.time_step_rank")
    inner = fields.count("ssm.inner_size")
    conv, state, groups = (fields.count(f"ssm.{key}") for key in ("conv_kernel", "state_size", "group_count"))
    if inner % heads:
        raise UserError(f"`{fields.path}`: the metadata `{fields.name}.ssm.inner_size` is {inner}, for {heads} heads")
    if fields.name == "granitehybrid":
        return _mamba_keys(fields, config, inner) | {
            "mamba_n_heads": heads,
            "mamba_n_groups": groups,
            "mamba_d_state": state,
            "mamba_d_conv": conv,
        }
    interval = fields.count("full_attention_interval", default=DEFAULT_INTERVAL)
    return {
        "layer_types": ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)],
        "linear_num_value_heads": heads,
        "linear_num_key_heads": groups,
        "linear_key_head_dim": state,
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": conv,
        "num_experts": 0,  # unless the file states experts
    }


def _mamba_keys(fields: GgufFields, config: Mapping[str, Any], inner: int) -> dict[str, Any]:
    kv_heads, width = fields.get("attention.head_count_kv"), config["hidden_size"]
    if not isinstance(kv_heads, list) or len(kv_heads) != config["num_hidden_layers"]:
        raise UserError(
            f"`{fields.path}`: the metadata `{fields.name}.attention.head_count_kv` is `{str(kv_heads)[:40]}`, "
            "expected a number for each layer, 0 where it has no attention"
        )
    if inner % width:
        raise UserError(
            f"`{fields.path}`: the metadata `{fields.name}.ssm.inner_size` is {inner}, no multiple of the width {width}"
        )
    shared = fields.tensors.get("blk.0.ffn_gate_shexp.weight") or fields.tensors.get("blk.0.ffn_gate.weight")
    return {
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
        "mamba_expand": inner // width,
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in fields.tensors),
        "shared_intermediate_size": None if shared is None else shared.shape[0],
        "position_embedding_type": "rope" if fields.get("rope.scaling.finetuned") else "nope",
        "num_local_experts": fields.get("expert_count") or 0,
    }


def kv_head_count(fields: GgufFields, heads: int) -> int:
    """Return the key/value heads of the layers with attention; files of Granite 4 state them for each layer."""
    stated = fields.get("attention.head_count_kv")
    if isinstance(stated, list) and fields.name == "granitehybrid":
        stated = {count for count in stated if count}
        if len(stated) == 1 and type(only := stated.pop()) is int and only > 0:
            return only
    return fields.count("attention.head_count_kv", default=heads)


def restore(name: str, stored: Stored, architecture: str, config: Mapping[str, Any]) -> Stored:
    """Return a tensor in the shape and order of Hugging Face."""
    part = name.rpartition(".linear_attn.")[2] if ".linear_attn." in name else name.rpartition(".mamba.")[2]
    if part == name:
        return stored
    if part == "conv1d.weight" and len(stored.shape) == 2:
        stored = replace(stored, shape=(stored.shape[0], 1, stored.shape[1]), data=stored.data.unsqueeze(1))
    if part in FLAT and len(stored.shape) == 2:
        stored = replace(stored, shape=(stored.shape[0] * stored.shape[1],), data=stored.data.flatten())
    return _grouped(part, stored, config) if architecture in TILED else stored


def _grouped(part: str, stored: Stored, config: Mapping[str, Any]) -> Stored:
    """Order the value heads by their key heads."""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]
    if groups == heads or heads % groups:  # in order; or refused where the configuration is read
        return stored
    if len(stored.shape) == 1 and FORMATS[stored.kind].quantized:  # refused where it is read
        return stored
    before = 2 * groups * config["linear_key_head_dim"]  # queries and keys
    first, unit = {
        "in_proj_qkv.weight": (before, size),
        "conv1d.weight": (before, size),
        "in_proj_z.weight": (0, size),
        "in_proj_a.weight": (0, 1),
        "in_proj_b.weight": (0, 1),
        "A": (0, 1),
        "dt_bias": (0, 1),
        "out_proj.weight": (0, size),
    }.get(part, (0, 0))
    columns = part == "out_proj.weight"
    if not unit or stored.shape[-1 if columns else 0] != first + heads * unit:
        return stored  # no heads; or refused by its shape where it is read
    indices = np.arange(heads * unit).reshape(heads // groups, groups, unit).swapaxes(0, 1).ravel() + first
    order = np.concatenate([np.arange(first), indices])
    return replace(stored, columns=order) if columns else replace(stored, rows=order)
