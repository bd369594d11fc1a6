"""LoRA adapters in PEFT's layout: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..types import Progress, unwatched
from .checkpoint import read_json
from .hf_folder import read_shard, text_name
from .loader import locate

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
TENSOR = re.compile(r"^base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight$")
MODULE = re.compile(r"^model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)$")
EXPERTS = re.compile(r"\bexperts?\b|block_sparse_moe|shared_expert|\brouter\b")
# Fields of adapter_config.json that change the computation, and are set. Others are about training.
REFUSED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
# Initialisations that subtract from the base model, so that the adapter fits the changed model alone.
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LoraWeights:
    """An adapter as it is stored, in fp32."""

    path: Path
    base: str  # the model that it was trained for, as its configuration names it; may be empty
    modules: Mapping[tuple[int, str], tuple[Tensor, Tensor]]  # layer, module -> a [R, K], b [N, R] with the scale

    @property
    def rank(self) -> int:
        return max(a.shape[0] for a, _ in self.modules.values())


def read_lora(source: str | Path, progress: Progress = unwatched) -> LoraWeights:
    """Read an adapter from a folder, or from the hub by its name."""
    path = locate(source, progress, "adapter")
    if not (path / CONFIG).is_file():
        raise UserError(f"`{path}` is not a LoRA adapter, it has no `{CONFIG}`: pass a folder that PEFT has saved")
    if not (path / WEIGHTS).is_file() and (path / PICKLED).is_file():
        raise UserError(f"`{path}` has pickled weights only, which are unsafe to read: save it as safetensors")
    config = read_json(path / CONFIG)
    scale = _scale(path, config)
    pairs: dict[str, dict[str, Tensor]] = {}
    tensors, _ = read_shard(path / WEIGHTS)
    for name, stored in tensors.items():
        match = TENSOR.match(name)
        if match is None:
            raise UserError(f"`{path}` has the tensor `{name}`: expected `lora_A.weight` and `lora_B.weight` only")
        if len(stored.shape) != 2:
            raise UserError(f"`{path}` has the tensor `{name}` of shape {list(stored.shape)}: expected a matrix")
        pairs.setdefault(text_name(match[1]), {})[match[2]] = stored.data.to(torch.float32, copy=True)
    if not pairs:
        raise UserError(f"`{path}` has no weights: it is not a trained adapter")
    modules = {_module(path, name): _pair(path, name, pair, config["r"], scale) for name, pair in pairs.items()}
    return LoraWeights(path, str(config.get("base_model_name_or_path") or ""), modules)


def _scale(path: Path, config: dict[str, Any]) -> float:
    """Return the factor on B; refuse a configuration that means another computation."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(f"`{path}` is an adapter of the type `{kind}`: only `LORA` is supported")
    for field in REFUSED:
        if config.get(field):
            raise UserError(f"`{path}` sets `{field}` in `{CONFIG}`, which is not supported: train it without")
    if config.get("bias", "none") != "none":
        raise UserError(f"`{path}` has `bias={config['bias']}` in `{CONFIG}`: only `none` is supported")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGED_BASE):
        raise UserError(
            f"`{path}` has `init_lora_weights={start}`, which changes the base model: convert it to a plain LoRA, "
            "as PEFT does with `path_initial_model_for_weight_conversion`"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise UserError(f"`{path}` has `r={rank}` in `{CONFIG}`: expected a whole number from 1 up")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UserError(f"`{path}` has `lora_alpha={alpha}` in `{CONFIG}`: expected a number")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _module(path: Path, name: str) -> tuple[int, str]:
    """Return the layer and the name of a module."""
    if EXPERTS.search(name):
        raise UserError(f"`{path}` adapts `{name}`: adapters over expert layers are not supported")
    match = MODULE.match(name)
    if match is None:
        raise UserError(f"`{path}` adapts `{name}`: only the projections of attention and MLP can be adapted")
    return int(match[1]), match[2]


def _pair(path: Path, name: str, pair: dict[str, Tensor], rank: int, scale: float) -> tuple[Tensor, Tensor]:
    for part in "AB":
        if part not in pair:
            raise UserError(f"`{path}` has no `lora_{part}` of `{name}`: it is incomplete")
        if not bool(pair[part].isfinite().all()):
            raise UserError(f"`{path}` has numbers that are not finite in `lora_{part}` of `{name}`")
    a, b = pair["A"], pair["B"] * scale
    if a.shape[0] != rank or b.shape[1] != rank:
        raise UserError(
            f"`{path}` adapts `{name}` with matrices {list(a.shape)} and {list(b.shape)}, but `r={rank}` in `{CONFIG}`"
        )
    return a, b
