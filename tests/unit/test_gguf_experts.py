"""Mixtures of experts in GGUF files: merged tensors, quantized or not, give the logits of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import kernels
from outrider.errors import UserError
from outrider.kernels import Weight
from outrider.kernels.cpu import quantize_weight
from outrider.kernels.quantization import dequantize
from outrider.models import build
from outrider.weights import gguf_writer, open_checkpoint
from outrider.weights.gguf import LAYER_NAMES
from tiny import checkpoint, original, prompt, run

TOKENS = prompt(19)
ARCHITECTURES = {"mixtral": "llama", "olmoe": "olmoe", "qwen2-moe": "qwen2moe", "qwen3-moe": "qwen3moe"}


def tensors(name: str) -> dict[str, Weight]:
    """Return the tensors of a model under the names of GGUF; gate and up are tensors of their own there."""
    config, weights, found = original(name).config, checkpoint(name), {}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads} if name == "mixtral" else {}
    for key, tensor in weights.tensors.items():
        if key.endswith("gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                found[key.replace("gate_up_proj", f"{part}_proj.weight")] = half.contiguous()
        elif key.endswith("down_proj"):
            found[f"{key}.weight"] = tensor
        else:
            found[key] = tensor.flatten() if key.endswith("shared_expert_gate.weight") else tensor
    renamed = {}
    for key, tensor in found.items():
        weight = Weight("f32", tuple(tensor.shape), tensor)
        new = gguf_writer.gguf_name(key, LAYER_NAMES)
        count = next((count for part, count in heads.items() if f".{part}." in new), 0)
        renamed[new] = gguf_writer.interleave(weight, count) if count else weight
    return renamed


def metadata(name: str) -> dict[str, Any]:
    config = json.loads(original(name).config.to_json_string())
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": 128,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
    }
    if config.get("head_dim"):
        fields["attention.key_length"] = config["head_dim"]
    if name == "mixtral":
        fields["attention.sliding_window"] = config["sliding_window"]
    architecture = ARCHITECTURES[name]
    named = {f"{architecture}.{key}": value for key, value in fields.items()}
    return {"general.architecture": architecture, "tokenizer.ggml.eos_token_id": 2, **named}


def write(path: Path, fields: dict[str, Any], weights: dict[str, Weight]) -> Path:
    path.write_bytes(b"".join(gguf_writer.encode(fields, weights)))
    return path


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_merged_experts_equal_transformers(name: str, backend: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", metadata(name), tensors(name))
    logits, _ = run(build(open_checkpoint(path), kernels.load(backend)), TOKENS, 7)
    with torch.no_grad():
        wanted = original(name)(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


def test_quantized_experts_are_split_by_expert(tmp_path: Path) -> None:
    weights, plain = tensors("qwen3-moe"), checkpoint("qwen3-moe")
    for key, weight in weights.items():
        if "_exps" in key:
            flat = Weight("f32", (weight.shape[0] * weight.shape[1], weight.shape[2]), weight.data.flatten(0, 1))
            packed = quantize_weight(flat, "int8")
            weights[key] = Weight(packed.kind, weight.shape, packed.data)
            stem = key.removesuffix(".weight")
            layer, part = stem.split(".")[1], stem.split("_")[1]
            rounded = dequantize(packed).view(weight.shape)
            module = f"model.layers.{layer}.mlp.experts."
            if part == "down":
                plain.tensors[module + "down_proj"] = rounded
            else:
                half = slice(0, 64) if part == "gate" else slice(64, 128)
                plain.tensors[module + "gate_up_proj"] = plain.tensors[module + "gate_up_proj"].clone()
                plain.tensors[module + "gate_up_proj"][:, half] = rounded
    reference = kernels.load("reference")
    file = open_checkpoint(write(tmp_path / "m.gguf", metadata("qwen3-moe"), weights))
    found, _ = run(build(file, reference), TOKENS, 7)
    wanted, _ = run(build(plain, reference), TOKENS, 7)
    assert torch.equal(found, wanted)


def test_experts_of_an_unknown_architecture_are_refused_by_name(tmp_path: Path) -> None:
    fields = {key.replace("qwen3moe", "qwen3"): value for key, value in metadata("qwen3-moe").items()}
    fields["general.architecture"] = "qwen3"
    with pytest.raises(UserError, match="is a `qwen3` with experts: pick one of mixtral, olmoe, qwen2_moe"):
        open_checkpoint(write(tmp_path / "m.gguf", fields, tensors("qwen3-moe")))
