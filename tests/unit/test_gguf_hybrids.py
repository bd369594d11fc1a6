"""GGUF files of hybrid models: quantized matrices stay as they are, and what cannot be read is refused by name. See
also test_gguf_architectures.py, which compares unquantized ones with transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import tiny
import tiny_gguf
import tiny_gguf_hybrids
from backends import every_kernels
from outrider import kernels
from outrider.diagnostics.model_check import check_tensors
from outrider.kernels import Weight
from outrider.kernels.quantization import FORMATS, dequantize, doubled
from outrider.models import build
from outrider.weights import open_checkpoint
from outrider.weights.checkpoint import Stored
from refusals import refusal

TOKENS = tiny.prompt(19)
PARTS = (
    "ssm_in",
    "ssm_out",
    "attn_qkv",
    "attn_gate",
    "ssm_alpha",
    "ssm_beta",
    "ssm_ba",
    "attn_q",
    "down_shexp",
    "_down",
)


@pytest.fixture(params=every_kernels())
def ops(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("name", tiny_gguf_hybrids.ARCHITECTURES)
def test_quantized_matrices_compute_with_their_own_weights(name: str, ops: kernels.Kernels, tmp_path: Path) -> None:
    """Heads of 24 values are no whole blocks of 32: their order is that of the inputs of a matrix."""
    packed = tiny_gguf.write(name, tmp_path / "packed.gguf", "Q8_0", parts=PARTS)
    plain = tiny_gguf.write(name, tmp_path / "plain.gguf", "Q8_0", dequantized=True, parts=PARTS)
    found, _ = tiny.run(build(open_checkpoint(packed), ops), TOKENS, 7)
    wanted, _ = tiny.run(build(open_checkpoint(plain), ops), TOKENS, 7)
    assert (found - wanted).norm() < 5e-3 * wanted.norm()  # activations are rounded
    check_tensors(packed)


@pytest.mark.parametrize("size", [24, 32, 64])
@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0"])
def test_columns_move_in_whole_blocks_or_keep_their_inputs(kind: str, size: int) -> None:
    heads, width = 4, 3
    columns = np.arange(heads * size).reshape(2, 2, size).swapaxes(0, 1).ravel()
    floats = torch.randn(width, heads * size, generator=torch.Generator().manual_seed(0))
    data = floats.to(FORMATS[kind].dtype) if FORMATS[kind].dtype else _q8_0(floats)
    stored = Stored(kind, (width, heads * size), data, columns=columns)
    found = stored.load()
    assert (found.order is None) == (kind != "q8_0" or size % 32 == 0)
    plain = dequantize(Weight(kind, stored.shape, data))
    assert torch.equal(dequantize(found), plain[:, torch.from_numpy(columns)])


def _q8_0(floats: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.quantize(floats.numpy(), gguf.GGMLQuantizationType.Q8_0))


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in ("q4_z", "q8_z")])
def test_doubled_matrices_are_exact(kind: str) -> None:
    block = FORMATS[kind]
    if block.dtype is not None:
        weight = Weight(kind, (4, 8), torch.randn(4, 8).to(block.dtype))
    else:
        random = np.random.default_rng(0)
        data = torch.from_numpy(random.integers(0, 255, (64, block.bytes), dtype=np.uint8))
        weight = Weight(kind, (64, block.elements), data)
    once, twice = dequantize(weight), dequantize(doubled(weight))
    usual = (
        once.isfinite() & (once.abs() < 1e30) & (once.abs() > 1e-30) & twice.isfinite()
    )  # random scales may be anything
    assert usual.float().mean() > 0.5
    assert torch.equal(twice[usual], 2 * once[usual])


def edited(
    name: str, path: Path, edit: Callable[[dict[str, np.ndarray], dict[str, Any]], object], module: str = "none"
) -> Path:
    """Write a file with changed tensors and metadata."""
    reader = gguf.GGUFReader(tiny_gguf.write(name, path, module=module))
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    edit(tensors, fields)
    kind = fields.pop("general.architecture")
    writer = gguf.GGUFWriter(path.with_suffix(".edited"), kind)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    for tensor, data in tensors.items():
        writer.add_tensor(tensor, data)
    tiny_gguf.finish(writer)
    return path.with_suffix(".edited").rename(path)


def test_mtp_modules_in_a_file_are_no_layers_of_the_model(tmp_path: Path) -> None:
    path = tiny_gguf.write("qwen3.5", tmp_path / "m.gguf", module="inside")
    reference = kernels.load("reference")
    found, _ = tiny.run(build(open_checkpoint(path), reference), TOKENS, 7)
    wanted, _ = tiny.run(build(tiny.checkpoint("qwen3.5"), reference), TOKENS, 7)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    check_tensors(path)


def test_older_files_have_queries_keys_values_and_gates_in_one_matrix(tmp_path: Path) -> None:
    def join(tensors: dict[str, np.ndarray], _: dict[str, Any]) -> None:
        original = tiny.checkpoint("qwen3-next-moe").tensors
        for layer in (0, 2):
            del tensors[f"blk.{layer}.attn_qkv.weight"], tensors[f"blk.{layer}.attn_gate.weight"]
            whole = original[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"]
            tensors[f"blk.{layer}.ssm_in.weight"] = whole.numpy()

    path = edited("qwen3-next-moe", tmp_path / "m.gguf", join)
    reference = kernels.load("reference")
    found, _ = tiny.run(build(open_checkpoint(path), reference), TOKENS, 7)
    wanted, _ = tiny.run(build(tiny.checkpoint("qwen3-next-moe"), reference), TOKENS, 7)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


Edit = Callable[[dict[str, np.ndarray], dict[str, Any]], object]
BROKEN: dict[str, tuple[str, Edit, str]] = {
    "no state size": ("qwen3.5", lambda _, fields: fields.pop("qwen35.ssm.state_size"), "`qwen35.ssm.state_size` is"),
    "odd values": (
        "qwen3.5",
        lambda _, fields: fields.update({"qwen35.ssm.inner_size": 97}),
        "`qwen35.ssm.inner_size` is 97, for 4 heads",
    ),
    "no decay": ("qwen3.5", lambda tensors, _: tensors.pop("blk.0.ssm_a"), "`model.layers.0.linear_attn.A_log`"),
    "merged experts": (
        "qwen3.5-moe",
        lambda tensors, _: tensors.update({"blk.0.ffn_gate_up_exps.weight": np.ones((2, 2), np.float32)}),
        "`blk.0.ffn_gate_up_exps.weight`",
    ),
    "modules alone": (
        "qwen3.5",
        lambda _, fields: fields.update({"qwen35.nextn_predict_layers": 3}),
        "claims 3 modules among 3 layers",
    ),
    "very many modules": (
        "qwen3.5-moe",
        lambda _, fields: fields.update(
            {"qwen35moe.nextn_predict_layers": 2**31 - 2, "qwen35moe.block_count": 2**31 - 1}
        ),
        "claims 2147483647 layers",
    ),
    "heads of no layer": (
        "granite4",
        lambda _, fields: fields.update({"granitehybrid.attention.head_count_kv": 2}),
        "expected a number for each layer",
    ),
    "odd width": (
        "granite4",
        lambda _, fields: fields.update({"granitehybrid.ssm.inner_size": 96}),
        "no multiple of the width 64",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_cannot_be_read_are_refused_by_name(name: str, tmp_path: Path) -> None:
    model, edit, reason = BROKEN[name]
    path = edited(model, tmp_path / "m.gguf", edit)
    assert reason in refusal(lambda: build(open_checkpoint(path), kernels.load("reference")))
