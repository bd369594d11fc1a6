"""Random LoRA adapters of the tiny models, saved as PEFT saves them, and the models with such adapters merged in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MODULES = (*ATTENTION, "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
PREFIX = "base_model.model."


def save(
    name: str,
    to: Path,
    seed: int = 0,
    rank: int = 4,
    modules: tuple[str, ...] = MODULES,
    strength: float = 0.7,
    tensors: dict[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Save an adapter of a tiny model. strength: its size beside that of the weights. tensors: more of them."""
    alpha = 2 * rank
    random = torch.Generator().manual_seed(seed)
    saved = dict(tensors or {})
    for key, weight in tiny.original(name).state_dict().items():
        module = key.removesuffix(".weight").rpartition(".")[2]
        if module in modules and weight.dim() == 2:
            outputs, inputs = weight.shape
            prefix = PREFIX + key.removesuffix(".weight")
            saved[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) / math.sqrt(inputs)
            factor = strength / math.sqrt(rank) * rank / alpha
            saved[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * factor
    to.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.to(dtype) for key, tensor in saved.items()}, to / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "base_model_name_or_path": f"tiny/{name}",
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": False,
        "bias": "none",
        "target_modules": list(modules),
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "use_dora": False,
    }
    (to / "adapter_config.json").write_text(json.dumps(fields | config))
    return to


def merged(name: str, adapter: Path) -> dict[str, Tensor]:
    """Return the weights of a tiny model with an adapter added to them, as PEFT's `merge_and_unload` does."""
    config, parts = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
    weights = {key: value.clone() for key, value in tiny.original(name).state_dict().items()}
    for key, a in parts.items():
        if key.endswith("lora_A.weight"):
            b = parts[key.replace("lora_A", "lora_B")]
            weights[key.removeprefix(PREFIX).replace(".lora_A", "")] += scale * b @ a
    return weights


def merged_checkpoint(name: str, adapter: Path) -> tiny.Memory:
    plain = tiny.checkpoint(name)
    weights = merged(name, adapter)
    return tiny.Memory(plain.config, {key: weights[key] for key in plain.tensors}, plain.norms_are_offset)


def copy_merged(name: str, adapter: Path, to: Path) -> Path:
    """Save the merged model in a folder of its own, with the tokenizer of `tiny.copy`."""
    tiny.copy(name, to)
    held = load_file(to / "model.safetensors")
    weights = merged(name, adapter)
    save_file({key: weights[key].contiguous() for key in held}, to / "model.safetensors", {"format": "pt"})
    return to
