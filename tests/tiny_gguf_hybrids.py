"""Tiny hybrid models as llama.cpp's converters write them: their tensors and metadata of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np

import tiny_hybrids

ARCHITECTURES = {
    "qwen3-next-moe": "qwen3next",
    "qwen3.5": "qwen35",
    "qwen3.5-moe": "qwen35moe",
    "granite4": "granitehybrid",
    "granite4-moe": "granitehybrid",
}
MODULE_PARTS = {  # of an MTP module, outside of its layer
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
NAKED = (".A_log", ".D")  # tensors without a suffix in files


def tiled(rows: np.ndarray, axis: int, config: dict[str, Any], size: int) -> np.ndarray:
    """Put the value heads of each key head apart: first of all key heads, then second of all."""
    groups = config["linear_num_key_heads"]
    split = (groups, config["linear_num_value_heads"] // groups, size)
    whole = rows.reshape(*rows.shape[:axis], *split, *rows.shape[axis + 1 :])
    return np.ascontiguousarray(whole.swapaxes(axis, axis + 1)).reshape(rows.shape)


def delta(full: str, data: np.ndarray, kind: str, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a tensor of Qwen3-Next or Qwen3.5."""
    if full.endswith("norm.weight") and not full.endswith("linear_attn.norm.weight"):
        data = data + 1
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    size = config["linear_value_head_dim"]
    if kind != "qwen3next" and ".linear_attn." in full:
        part = full.rpartition(".linear_attn.")[2]
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            data = np.concatenate([data[: 2 * keys], tiled(data[2 * keys :], 0, config, size)])
        elif part == "in_proj_z.weight":
            data = tiled(data, 0, config, size)
        elif part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            data = tiled(data, 0, config, 1)
        elif part == "out_proj.weight":
            data = tiled(data, 1, config, size)
    if full.endswith("in_proj_qkvz.weight"):
        groups = config["linear_num_key_heads"]
        values = config["linear_num_value_heads"] // groups * size
        cuts = np.cumsum([config["linear_key_head_dim"]] * 2 + [values])
        parts = np.split(data.reshape(groups, -1, data.shape[1]), cuts, 1)
        query, key, value, gate = (part.reshape(-1, data.shape[1]) for part in parts)
        yield full.replace("qkvz", "qkv"), np.concatenate([query, key, value])
        yield full.replace("qkvz", "z"), gate
    else:
        yield full, data


def mamba(full: str, data: np.ndarray, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a tensor of Granite 4."""
    shared = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
    if full.endswith("shared_mlp.input_linear.weight"):
        for part, rows in zip(("gate", "up"), np.split(data, 2), strict=True):
            yield full.replace("shared_mlp.input_linear", f"{shared}.{part}_proj"), rows
    elif full.endswith("shared_mlp.output_linear.weight"):
        yield full.replace("shared_mlp.output_linear", f"{shared}.down_proj"), data
    elif full.endswith(NAKED):
        yield full, data[:, None]
    elif full.endswith("mamba.norm.weight"):
        yield full, data.reshape(config["mamba_n_groups"], -1)
    elif ".block_sparse_moe." in full:
        yield (
            full.replace("router.weight", "router.layer.weight").replace("block_sparse_moe.experts", "mlp.experts"),
            data,
        )
    else:
        yield full, data


def convert(full: str, data: np.ndarray, kind: str, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    own = mamba(full, data, config) if kind == "granitehybrid" else delta(full, data, kind, config)
    for name, tensor in own:
        if name.endswith("A_log"):
            tensor = -np.exp(tensor)
        if name.endswith("conv1d.weight"):
            tensor = tensor.squeeze(1)
        yield name.replace(".dt_bias", ".dt_proj.bias"), np.ascontiguousarray(tensor)


def module(name: str, kind: str, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of the MTP module of a model: a layer after the last, with parts of its own."""
    prefix = f"model.layers.{config['num_hidden_layers']}."
    for full, tensor in tiny_hybrids.tensors(name, merged=True).items():
        part = full.removeprefix("mtp.")
        if part.startswith("layers.0."):
            part = part.removeprefix("layers.0.")
        else:
            stem, _, leaf = part.rpartition(".")
            part = f"{MODULE_PARTS[stem]}.{leaf}"
        yield from convert(prefix + part, tensor.numpy(), kind, config)


def describe(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any]) -> None:
    if kind == "granitehybrid":
        kinds = [layer in ("full_attention", "attention") for layer in config["layer_types"]]
        writer.add_head_count_kv([config["num_key_value_heads"] if attention else 0 for attention in kinds])
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
        writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    if kind != "qwen3next":
        writer.add_rope_dimension_sections([2, 1, 1, 0])
