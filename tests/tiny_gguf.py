"""Tiny models as GGUF files, written by the `gguf` package with the names and metadata of llama.cpp's converters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tiny
import tiny_gguf_hybrids
from outrider.weights.random import byte_tokens

# Architecture in GGUF of each model of tiny.CASES whose file llama.cpp would write.
ARCHITECTURES = {
    "llama": "llama",
    "llama3-rope": "llama",
    "llama-bias": "llama",
    "mistral": "llama",
    "qwen2-yarn": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
    "phi3": "phi3",
    "phi3-long": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "qwen2-moe": "qwen2moe",
    "qwen3-moe": "qwen3moe",
    "gpt-oss": "gpt-oss",
    **tiny_gguf_hybrids.ARCHITECTURES,
}
HYBRIDS = set(tiny_gguf_hybrids.ARCHITECTURES.values())
INTERLEAVED = ("llama", "smollm3", "granite", "granitehybrid")  # rotary pairs are adjacent rows


def write(
    name: str,
    path: Path,
    experts: str = "F32",
    dequantized: bool = False,
    parts: tuple[str, ...] = ("_exps",),
    module: Literal["none", "inside", "alone"] = "none",
    rope: Mapping[str, float] | None = None,
) -> Path:
    """Write a model of tiny.CASES as a GGUF file of 32-bit floats.

    experts: the format of their matrices; dequantized: as floats, after rounding to that format. parts: ends of
    the names of matrices that have it. module: the MTP module of a hybrid model is in the file too, or takes the
    place of the layers. rope: further keys of its scaling.
    """
    kind = ARCHITECTURES[name]
    config = json.loads(tiny.original(name).config.to_json_string())
    writer = gguf.GGUFWriter(path, kind)
    blocks = config["num_hidden_layers"] + (module != "none")
    describe(writer, kind, config | {"num_hidden_layers": blocks})
    if module != "none":
        writer.add_nextn_predict_layers(1)
    for key, value in (rope or {}).items():
        writer.add_float32(f"{kind}.rope.scaling.{key}", value)
    add_tokens(writer)
    architecture = next(each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == kind)
    names = gguf.get_tensor_name_map(architecture, blocks)
    # llama.cpp has no dense layers in `qwen2moe`, and this version of `gguf` no modules in Qwen's architectures.
    others = [gguf.get_tensor_name_map(each, blocks) for each in (gguf.MODEL_ARCH.QWEN2, gguf.MODEL_ARCH.GLM4_MOE)]
    for full, data in tensors(name, module):
        stem, _, leaf = full.rpartition(".")
        if kind.startswith("gemma") and full.endswith("norm.weight"):
            data = data + 1
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(stem.rpartition(".")[2])
        if heads and kind in INTERLEAVED:
            data = interleave(data, config[heads])
        found = next((text for each in (names, *others) if (text := each.get_name(stem))), None)
        if full.endswith(tiny_gguf_hybrids.NAKED):
            writer.add_tensor(names.get_name(full), data)
            continue
        assert found is not None, f"{kind} has no tensor {stem}"
        stored = None
        if found.endswith(parts) and leaf == "weight" and experts != "F32":
            stored = gguf.GGMLQuantizationType[experts]
            data = gguf.quantize(data, stored)
            if dequantized:
                data, stored = gguf.dequantize(data, stored), None
        writer.add_tensor(f"{found}.{leaf}", data, raw_dtype=stored)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokens(writer: gguf.GGUFWriter) -> None:
    """Add a vocabulary of bytes."""
    for key, value in byte_tokens("", tiny.VOCABULARY).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif key.startswith("tokenizer."):
            writer.add_string(key, value)


def tensors(name: str, module: str = "none") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a model as the converters have them: gate and up of experts apart, [experts, N, K]."""
    interleaved = name == "gpt-oss"  # rows of gate and up; its matrices are transposed
    for full, data in renamed(name, module):
        parent, _, leaf = full.rpartition(".experts.")
        if leaf.startswith("gate_up_proj"):
            suffix = "bias" if leaf.endswith("_bias") else "weight"
            data = data.swapaxes(1, 2) if interleaved and suffix == "weight" else data
            halves = (data[:, ::2], data[:, 1::2]) if interleaved else np.split(data, 2, 1)
            for part, rows in zip(("gate", "up"), halves, strict=True):
                yield f"{parent}.experts.{part}_proj.{suffix}", np.ascontiguousarray(rows)
        elif leaf == "down_proj":
            yield f"{full}.weight", np.ascontiguousarray(data.swapaxes(1, 2)) if interleaved else data
        elif leaf == "down_proj_bias":
            yield f"{parent}.experts.down_proj.bias", data
        elif full.endswith("sinks"):
            yield f"{full}.weight", data
        else:
            yield full, data.reshape(-1) if full.endswith("shared_expert_gate.weight") else data


def renamed(name: str, module: str) -> Iterator[tuple[str, np.ndarray]]:
    config = json.loads(tiny.original(name).config.to_json_string())
    if module != "none":
        yield from tiny_gguf_hybrids.module(name, ARCHITECTURES[name], config)
    for full, tensor in tiny.checkpoint(name).tensors.items():
        if module == "alone" and ".layers." in full:
            continue
        if ARCHITECTURES[name] in HYBRIDS:
            yield from tiny_gguf_hybrids.convert(full, tensor.numpy(), ARCHITECTURES[name], config)
        else:
            yield full, tensor.numpy()


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of q and k as llama.cpp's converter does."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def describe(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    ropes = config.get("rope_parameters") or {}
    rope = ropes.get("full_attention", ropes)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if kind != "qwen35moe":
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    if kind in HYBRIDS:
        tiny_gguf_hybrids.describe(writer, kind, config)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    describe_rope(writer, kind, config, rope)
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if config.get("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if config.get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if kind == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if kind.startswith("granite"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if kind == "gemma3":
        writer.add_array("gemma3.attention.sliding_window_pattern", [t[0] == "s" for t in config["layer_types"]])
        writer.add_float32("gemma3.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
        # llama.cpp knows the published sizes alone.
        writer.add_uint32("outrider.query_pre_attn_scalar", config["query_pre_attn_scalar"])


def describe_rope(writer: gguf.GGUFWriter, kind: str, config: dict[str, Any], rope: dict[str, Any]) -> None:
    scaling = rope.get("rope_type", "default")
    if scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(rope["factor"])
    if scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if scaling == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config, rope))
    if scaling == "longrope":
        original = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        growth = np.log(config["max_position_embeddings"] / original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + growth / np.log(original))))
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


def llama3_factors(config: dict[str, Any], rope: dict[str, Any]) -> np.ndarray:
    """Return the divisors of the frequencies as transformers has them: [D / 2]."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    plain = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](transformers.LlamaConfig(**config), torch.device("cpu"))
    return (plain / scaled).numpy()
