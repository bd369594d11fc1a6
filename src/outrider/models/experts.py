"""Build a mixture of experts from the tensors of a checkpoint.

Checkpoints store experts in four ways: one matrix for each, `gate_up_proj` [X, 2 * N, E] and `down_proj` [X, E, N] of
all (newer transformers), the same with the rows of gate and up in turns (gpt-oss; transposed if they are floats), or
`gate_proj`, `up_proj` and `down_proj` of all (GGUF). Letter X: experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import MlpWeights, MoeWeights, Weight
from ..kernels.quantization import doubled
from .config import Experts, ModelConfig
from .layers import WeightReader

MODULES = ("mlp", "block_sparse_moe")  # the second in Mixtral's own checkpoints
ROUTERS = ("gate", "router", "router.layer")  # the second in gpt-oss, the third in Granite 4
# The tensors of all experts in Granite 4's own checkpoints, and their names elsewhere.
GRANITE_NAMES = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
SHARED_MLP = "shared_mlp."  # of every token in Granite 4; its score is 1
MATRICES = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}  # the second of Mixtral


class Biases(NamedTuple):
    """Biases of all experts."""

    gate: Tensor | None = None  # [X, N] f32
    up: Tensor | None = None  # [X, N] f32
    down: Tensor | None = None  # [X, E] f32


def moe(config: ModelConfig, experts: Experts, reader: WeightReader, layer: int) -> MoeWeights:
    """Read the mixture of experts of a layer."""
    prefix = f"model.layers.{layer}."
    names = [(f"{prefix}{module}.", router) for module in MODULES for router in ROUTERS]
    module, router = next((name for name in names if reader.has(f"{name[0]}{name[1]}.weight")), names[0])
    width, inner, shared = config.width, experts.width, experts.shared_width
    # Never quantized: rounding would change the chosen experts.
    router_weight = reader.floats(f"{module}{router}.weight", experts.count, width)
    gate, up = _gates(reader, module, experts, width)
    biases = _biases(reader, module + "experts.", experts, width) if experts.biased else Biases()
    return MoeWeights(
        router=router_weight,
        gate=gate,
        up=up,
        down=_matrices(reader, module, "down", experts, width, inner),
        top_k=experts.top_k,
        normalized=experts.normalized,
        activation=config.activation,
        eps=config.stream_eps,
        norm=reader.norm(prefix + "post_attention_layernorm.weight", width),
        router_bias=reader.vector(f"{module}{router}.bias", experts.count) if experts.biased else None,
        gate_bias=biases.gate,
        up_bias=biases.up,
        down_bias=biases.down,
        **(_shared(config, reader, prefix, module, shared) if shared else {}),
    )


def _shared(config: ModelConfig, reader: WeightReader, prefix: str, module: str, inner: int) -> dict[str, Any]:
    """Read the expert of every token, and the gate of its score."""
    width = config.width
    if not reader.has(f"{prefix}{SHARED_MLP}output_linear.weight"):
        module += "shared_expert"
        gate, up = (reader.matrix(f"{module}.{name}.weight", inner, width) for name in ("gate_proj", "up_proj"))
        down = reader.matrix(f"{module}.down_proj.weight", width, inner)
        score = reader.row(f"{module}_gate.weight", width)
    else:  # its score is 1: a gate of zeros gives a half, so the output is doubled, which is exact
        module = prefix + SHARED_MLP
        gate, up = reader.matrices(module, {"gate_proj": inner, "up_proj": inner}, "input_linear", width)
        whole = doubled(reader.stored(module + "output_linear.weight", width, inner))
        down = reader.counted(reader.quantized(whole, fine=False))
        score = torch.zeros(width, device=whole.data.device)
    mlp = MlpWeights(gate=gate, up=up, down=down, activation=config.activation, eps=config.stream_eps)
    return {"shared": mlp, "shared_gate": score}


def _biases(reader: WeightReader, module: str, experts: Experts, width: int) -> Biases:
    count, inner = experts.count, experts.width
    if reader.has(module + "gate_up_proj_bias"):
        both = reader.floats(module + "gate_up_proj_bias", count, 2 * inner)
        down = reader.floats(module + "down_proj_bias", count, width)
        return Biases(both[:, ::2].contiguous(), both[:, 1::2].contiguous(), down)
    return Biases(
        reader.floats(module + "gate_proj.bias", count, inner),
        reader.floats(module + "up_proj.bias", count, inner),
        reader.floats(module + "down_proj.bias", count, width),
    )


def _gates(
    reader: WeightReader, module: str, experts: Experts, width: int
) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Read the gate and up matrices of all experts."""
    joined = _name(reader, module, "experts.gate_up_proj")
    if not reader.has(joined):
        gate = _matrices(reader, module, "gate", experts, experts.width, width)
        return gate, _matrices(reader, module, "up", experts, experts.width, width)
    merged = reader.stored(joined, experts.count, 2 * experts.width, width, transposed=experts.interleaved)
    both = _interleaved(merged, experts.count) if experts.interleaved else split(merged, 2 * experts.count)
    parts = tuple(reader.quantized(part, fine=False) for part in both)
    reader.count_experts(parts, experts.top_k, experts.count)
    return parts[::2], parts[1::2]


def _matrices(
    reader: WeightReader, module: str, part: str, experts: Experts, rows: int, columns: int
) -> tuple[Weight, ...]:
    """Read one matrix [rows, columns] of each expert."""
    merged = [_name(reader, module, f"experts.{MATRICES[part][0]}{suffix}") for suffix in ("", ".weight")]
    name = next((name for name in merged if reader.has(name)), None)
    if name is not None:
        transposed = experts.interleaved and name == merged[0]
        found = split(reader.stored(name, experts.count, rows, columns, transposed=transposed), experts.count)
    else:
        leaf = next((leaf for leaf in MATRICES[part] if reader.has(f"{module}experts.0.{leaf}.weight")), None)
        leaf = leaf or MATRICES[part][0]
        names = [f"{module}experts.{expert}.{leaf}.weight" for expert in range(experts.count)]
        found = [reader.stored(name, rows, columns) for name in names]
    parts = tuple(reader.quantized(weight, fine=False) for weight in found)
    reader.count_experts(parts, experts.top_k, experts.count)
    return parts


def _name(reader: WeightReader, module: str, name: str) -> str:
    """Return the name of a tensor of all experts in this checkpoint."""
    other = module + GRANITE_NAMES.get(name, name)
    return other if reader.has(other) else module + name


def split(merged: Weight, count: int) -> list[Weight]:
    """Cut a tensor [..., rows, columns] into `count` matrices [rows of one, columns], in the order of its rows."""
    rows = merged.data.reshape(count, -1, merged.data.shape[-1])  # floats, or blocks of bytes
    return [Weight(merged.kind, (rows.shape[1], merged.shape[-1]), part) for part in rows]


def _interleaved(merged: Weight, count: int) -> list[Weight]:
    """Cut a tensor whose rows belong to gate and up in turns: gate and up of the first expert, then of the next."""
    both = split(merged, count)
    rows = merged.shape[1] // 2
    return [Weight(one.kind, (rows, one.shape[1]), one.data[part::2].contiguous()) for one in both for part in (0, 1)]
