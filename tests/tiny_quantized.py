"""Tiny models as quantized checkpoints: the tensors of each format, and what their matrices are worth in fp32."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import tiny

GROUP = 32
BLOCK = (32, 32)  # rows and columns of an FP8 block
FP8 = torch.float8_e4m3fn
Encoded = tuple[dict[str, Tensor], Tensor]  # tensors by suffix, and the matrix [N, K] f32


def words(fields: Tensor, bits: int) -> Tensor:
    """Pack unsigned fields [..., n] into int32 words, the lowest bits first; missing ones are 0."""
    per_word = 32 // bits
    fields = torch.nn.functional.pad(fields.long(), (0, -fields.shape[-1] % per_word))
    packed = (fields.unflatten(-1, (-1, per_word)) << (bits * torch.arange(per_word))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def quantize(
    weight: Tensor, bits: int, symmetric: bool, of_input: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned codes [N, K], scales [N, G] and zero points [N, G]. of_input [K]: the group of each input."""
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    count = int(of_input.max()) + 1
    grouped = torch.stack([weight[:, of_input == group] for group in range(count)], 1)  # [N, G, size]
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    spread = 2 * torch.maximum(-low, high) if symmetric else high - low
    scales = (spread / most).clamp(min=1e-4).to(dtype)
    zeros = torch.full_like(scales, middle) if symmetric else (-low / scales).round().clamp(0, most - 1)
    codes = (weight / scales.float()[:, of_input] + zeros.float()[:, of_input]).round().clamp(0, most)
    return codes, scales, zeros


def _value(codes: Tensor, scales: Tensor, zeros: Tensor, of_input: Tensor) -> Tensor:
    return (codes - zeros.float()[:, of_input]) * scales.float()[:, of_input]


def gptq(
    weight: Tensor, bits: int = 4, symmetric: bool = True, ordered: bool = False, by_rows: bool = False
) -> Encoded:
    """ordered: groups have random inputs, the same in all matrices; by_rows: in those with as many rows."""
    of_input = torch.arange(weight.shape[1]) // GROUP
    if ordered:
        generator = torch.Generator().manual_seed(len(weight) if by_rows else 0)
        of_input = of_input[torch.randperm(len(of_input), generator=generator)]
    codes, scales, zeros = quantize(weight, bits, symmetric, of_input, torch.float16)
    stored = {
        "qweight": words(codes, bits).T,
        "qzeros": words(zeros.T - 1, bits),
        "scales": scales.T,
        "g_idx": of_input.to(torch.int32),
    }
    return stored, _value(codes, scales, zeros, of_input)


def awq(weight: Tensor) -> Encoded:
    of_input = torch.arange(weight.shape[1]) // GROUP
    codes, scales, zeros = quantize(weight, 4, False, of_input, torch.float16)

    def permuted(fields: Tensor) -> Tensor:
        return words(fields.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2), 4)

    stored = {"qweight": permuted(codes.T), "qzeros": permuted(zeros.T), "scales": scales.T}
    return stored, _value(codes, scales, zeros, of_input)


def w4a16(weight: Tensor, symmetric: bool = True) -> Encoded:
    of_input = torch.arange(weight.shape[1]) // GROUP
    codes, scales, zeros = quantize(weight, 4, symmetric, of_input, torch.bfloat16)
    stored = {"weight_packed": words(codes, 4), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        stored["weight_zero_point"] = words(zeros.T, 4).T
    return stored, _value(codes, scales, zeros, of_input)


def w8a8(weight: Tensor) -> Encoded:
    of_input = torch.zeros(weight.shape[1], dtype=torch.long)
    codes, scales, zeros = quantize(weight, 8, True, of_input, torch.bfloat16)
    return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}, _value(codes, scales, zeros, of_input)


def fp8(weight: Tensor, strategy: str) -> Encoded:
    rows, columns = weight.shape
    height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": BLOCK}[strategy]
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # [A, height, B, width]
    scales = (blocks.abs().amax((1, 3)) / 448).clamp(min=1e-6)  # [A, B]
    if strategy != "block":
        scales = scales.to(torch.bfloat16)
    spread = scales.float().repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    numbers = (weight / spread).to(FP8)
    name = "weight_scale_inv" if strategy == "block" else "weight_scale"
    stored = {"weight": numbers, name: scales.flatten() if strategy == "tensor" else scales}
    return stored, numbers.float() * spread


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def _gptq(
    bits: int, symmetric: bool, ordered: bool, by_rows: bool = False
) -> tuple[dict[str, Any], Callable[[Tensor], Encoded]]:
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered, "sym": symmetric}
    return config, lambda weight: gptq(weight, bits, symmetric, ordered, by_rows)


SCHEMES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Encoded]]] = {
    "gptq": _gptq(4, True, False),
    "gptq-asymmetric": _gptq(4, False, False),
    "gptq-act-order": _gptq(4, True, True),
    "gptq-orders": _gptq(4, False, True, by_rows=True),
    "gptq-8": _gptq(8, True, False),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "w4a16": (_compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP), w4a16),
    "w4a16-asymmetric": (
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False),
        lambda weight: w4a16(weight, symmetric=False),
    ),
    "w8a8": (_compressed("int-quantized", num_bits=8, type="int", strategy="channel"), w8a8),
    "fp8-tensor": (
        _compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        lambda weight: fp8(weight, "tensor"),
    ),
    "fp8-channel": (
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda weight: fp8(weight, "channel"),
    ),
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"},
        lambda weight: fp8(weight, "block"),
    ),
}


def encode(tensors: dict[str, Tensor], scheme: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a checkpoint with quantized projections, and the same in floats."""
    stored: dict[str, Tensor] = {}
    plain = dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        parts, plain[name] = SCHEMES[scheme][1](tensor.float())
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    return stored, plain


def folder(name: str, scheme: str, to: Path) -> tuple[Path, Any]:
    """Write a tiny model, quantized, with a tokenizer; return the folder and the model in transformers, in floats."""
    tiny.copy(name, to)
    model = copy.deepcopy(tiny.original(name))
    tensors = {key: value for key, value in model.state_dict().items() if key in tiny.checkpoint(name).tensors}
    stored, plain = encode(tensors, scheme)
    save_file(stored, to / "model.safetensors")
    config = json.loads((to / "config.json").read_text()) | {"quantization_config": SCHEMES[scheme][0]}
    (to / "config.json").write_text(json.dumps(config))
    model.load_state_dict(plain, strict=False)
    return to, model


def gpt_oss_folder(to: Path) -> tuple[Path, Any]:
    """Write a tiny gpt-oss whose experts are random MXFP4 blocks, as `folder` does."""
    tiny.copy("gpt-oss", to)
    model, random = copy.deepcopy(tiny.original("gpt-oss")), torch.Generator().manual_seed(1)
    stored = {key: value.to(torch.bfloat16) for key, value in model.state_dict().items()}
    plain = {key: value.float() for key, value in stored.items()}
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = stored.pop(name).shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(121, 124, blocks.shape[:-1], dtype=torch.uint8, generator=random)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, K, N]
    save_file(stored, to / "model.safetensors")
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = json.loads((to / "config.json").read_text()) | {"quantization_config": settings}
    (to / "config.json").write_text(json.dumps(config))
    model.load_state_dict(plain)
    return to, model


def requantize(folder: Path, scheme: str) -> list[Tensor]:
    """Quantize the projections of a head's folder in place; return their values in fp32."""
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    stored, plain = encode(tensors, scheme)
    save_file(stored, file)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": SCHEMES[scheme][0]}
    (folder / "config.json").write_text(json.dumps(config))
    return [plain[name] for name in tensors if name.endswith("_proj.weight")]
