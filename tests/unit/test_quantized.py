"""Quantized safetensors checkpoints: each format equals its library's own dequantisation, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outrider.errors import UserError
from outrider.kernels import Weight
from outrider.kernels.quantization import dequantize
from outrider.weights.quantized import join, read_settings

VECTORS = Path(__file__).parents[1] / "vectors" / "quantized"  # recorded by tools/record_quantized.py
KINDS = {  # the blocks that hold each without loss
    "awq-128": "q4_z",
    "awq-32": "q4_z",
    "float8-block-sym-float-quantized": "fp8",
    "float8-channel-sym-float-quantized": "fp8",
    "float8-tensor-sym-float-quantized": "fp8",
    "gptq-4-asym-128_v2": "q4_z",
    "gptq-4-asym-32": "q4_z",
    "gptq-4-asym-32-act-order_v2": "q4_z",
    "gptq-4-sym-32": "q4_0",
    "gptq-4-sym-32-act-order": "q4_0",
    "gptq-4-sym-row": "q4_0",
    "gptq-8-asym-64_v2": "q8_z",
    "gptq-8-sym-32": "q8_0",
    "gptq-8-sym-32-act-order": "q8_0",
    "int4-channel-sym-pack-quantized": "q4_0",
    "int4-group-asym-pack-quantized": "q4_z",
    "int4-group-sym-pack-quantized": "q4_0",
    "int8-channel-asym-int-quantized": "q8_z",
    "int8-channel-sym-int-quantized": "q8_0",
    "int8-group-sym-pack-quantized": "q8_0",
    "int8-tensor-sym-int-quantized": "q8_0",
}


def read(name: str) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """Return the config, the tensors of the matrix `m`, and the library's dequantisation of it."""
    with safe_open(VECTORS / f"{name}.safetensors", framework="pt") as file:
        config = {"quantization_config": json.loads(file.metadata()["quantization_config"])}
        tensors = {f"m.{key}": file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    return config, tensors, tensors.pop("m.expected")


def load(config: dict[str, Any], tensors: dict[str, Tensor]) -> Weight:
    settings = read_settings(Path("here"), config)
    assert settings is not None
    matrices, used = join(settings, tensors)
    assert used == set(tensors)
    return matrices["m.weight"].load()


def test_every_recorded_vector_is_tested() -> None:
    assert {path.stem for path in VECTORS.glob("*.safetensors")} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_matrix_equals_the_dequantisation_of_its_library(name: str) -> None:
    config, tensors, expected = read(name)
    weight = load(config, tensors)
    assert weight.kind == KINDS[name] and (weight.order is not None) == ("act-order" in name)
    found = dequantize(weight)
    assert found.shape == expected.shape
    # Blocks are more precise than the libraries, which round each weight to the dtype of the scales.
    assert torch.equal(found.to(expected.dtype), expected)


def test_groups_of_different_sizes_become_floats() -> None:
    config, tensors, _ = read("gptq-4-sym-32-act-order")
    groups = tensors["m.g_idx"].clone()
    groups[0] = (groups[0] + 1) % 4
    assert load(config, tensors | {"m.g_idx": groups}).kind == "f16"


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind != "fp8"])
def test_scales_that_half_precision_cannot_hold_make_floats(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config, tensors, expected = read(name)
    scale = next(key for key in tensors if key.endswith(("scales", "weight_scale")))
    tensors[scale] = tensors[scale].to(torch.float32) * 1.0000001  # more bits than half precision has
    with caplog.at_level("WARNING"):
        weight = load(config, tensors)
    assert weight.kind == "f32"
    assert "become f32, which takes more memory" in caplog.text
    assert torch.allclose(dequantize(weight), expected.float(), rtol=1e-2)


def test_mxfp4_experts_equal_transformers() -> None:
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(115, 130, (3, 8, 2), dtype=torch.uint8)
    settings = read_settings(Path("here"), {"quantization_config": {"quant_method": "mxfp4"}})
    assert settings is not None
    tensors = {"mlp.experts.up_proj_blocks": blocks, "mlp.experts.up_proj_scales": scales}
    matrices, used = join(settings, tensors)
    assert used == set(tensors)
    weight = matrices["mlp.experts.up_proj"].load()
    assert (weight.kind, weight.shape) == ("mxfp4", (3, 8, 64))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, K, N]
    assert torch.equal(dequantize(weight), expected.transpose(1, 2))
    with pytest.raises(UserError, match=r"`mlp\.experts\.up_proj_blocks` has the shape"):
        join(settings, tensors | {"mlp.experts.up_proj_scales": scales[:, 1:]})


DAMAGED = ["gptq-4-sym-32", "awq-32", "int4-group-asym-pack-quantized", "int8-channel-sym-int-quantized"]


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_matrices_are_refused_by_name(name: str) -> None:
    config, tensors, _ = read(name)
    for key, tensor in tensors.items():
        if key in ("m.weight", "m.weight_shape"):
            continue  # any number of columns is possible; any shape that fits the others
        with pytest.raises(UserError, match=r"`here` is quantised with `.*`, but .*`m\b.*: fetch it again"):
            load(config, tensors | {key: tensor.flatten()[:-1].contiguous()})


@pytest.mark.parametrize("name", [*DAMAGED, "gptq-8-sym-32-act-order", "float8-channel-sym-float-quantized"])
def test_a_part_of_another_dtype_is_refused_or_is_no_matrix(name: str) -> None:
    config, tensors, _ = read(name)
    settings = read_settings(Path("here"), config)
    assert settings is not None
    for key, tensor in tensors.items():
        other = tensors | {key: tensor.to(torch.int16)}
        if key in ("m.weight", "m.qweight", "m.weight_packed"):
            assert not join(settings, other)[0]
        else:
            with pytest.raises(UserError, match=rf"`{key}` holds torch.int16 of shape"):
                join(settings, other)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_missing_part_is_named(name: str) -> None:
    config, tensors, _ = read(name)
    settings = read_settings(Path("here"), config)
    assert settings is not None
    optional = ("m.weight", "m.qweight", "m.weight_packed", "m.g_idx", "m.weight_zero_point")
    for key in set(tensors).difference(optional):
        with pytest.raises(UserError, match=rf"but `{key}` is missing: fetch it again"):
            join(settings, {each: tensor for each, tensor in tensors.items() if each != key})


REFUSED = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised with `bitsandbytes`, which"),
    "hqq": ({"quant_method": "hqq"}, "quantised with `hqq`, which Outrider cannot read"),
    "gptq 3 bits": ({"quant_method": "gptq", "bits": 3}, "with `gptq` in 3 bits"),
    "gptq marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in the layout `marlin`"),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "in the layout `gemv`"),
    "nvfp4": ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "`nvfp4-pack-quantized`"),
    "2:4": ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "in the format `marlin-24`"),
    "damaged": ({"quant_method": "awq", "bits": 4, "group_size": "many"}, "damaged `quantization_config`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_methods_are_refused_in_one_sentence(name: str) -> None:
    stated, problem = REFUSED[name]
    with pytest.raises(UserError) as refusal:
        read_settings(Path("here"), {"quantization_config": stated})
    assert problem in str(refusal.value) and "\n" not in str(refusal.value)
