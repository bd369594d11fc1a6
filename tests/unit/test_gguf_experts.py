"""Mixtures of experts in GGUF files: merged tensors stay quantized, and are split by expert. See also
test_gguf_architectures.py, which compares unquantized ones with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

import tiny
import tiny_gguf
from backends import every_kernels
from outrider import kernels
from outrider.errors import UserError
from outrider.models import build
from outrider.weights import open_checkpoint

TOKENS = tiny.prompt(19)
KINDS = {"mixtral": "Q4_0", "olmoe": "Q8_0", "qwen2-moe": "Q5_1", "qwen3-moe": "Q4_1", "gpt-oss": "MXFP4"}
BITS = {"Q4_0": 4.5, "Q8_0": 8.5, "Q5_1": 6, "Q4_1": 5, "MXFP4": 4.25}


@pytest.fixture(params=every_kernels())
def ops(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("name", KINDS)
def test_quantized_experts_compute_with_their_own_weights(name: str, ops: kernels.Kernels, tmp_path: Path) -> None:
    packed = tiny_gguf.write(name, tmp_path / "packed.gguf", KINDS[name])
    plain = tiny_gguf.write(name, tmp_path / "plain.gguf", KINDS[name], dequantized=True)
    found, _ = tiny.run(build(open_checkpoint(packed), ops), TOKENS, 7)
    wanted, _ = tiny.run(build(open_checkpoint(plain), ops), TOKENS, 7)
    original, _ = tiny.run(build(tiny.checkpoint(name), ops), TOKENS, 7)
    assert (found - wanted).norm() < 2e-3 * wanted.norm()  # activations are rounded
    assert (found - wanted).norm() < 0.1 * (original - wanted).norm()


@pytest.mark.parametrize("name", KINDS)
def test_experts_take_the_bytes_of_the_file(name: str, tmp_path: Path) -> None:
    reference = kernels.load("reference")
    packed = build(open_checkpoint(tiny_gguf.write(name, tmp_path / "packed.gguf", KINDS[name])), reference)
    plain = build(open_checkpoint(tiny_gguf.write(name, tmp_path / "plain.gguf")), reference)
    assert packed.idle_bytes == pytest.approx(plain.idle_bytes * BITS[KINDS[name]] / 32, rel=1e-3)


def test_experts_of_an_unknown_architecture_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    config = tiny.original("qwen3-moe").config.to_dict()
    tiny_gguf.describe(writer, "qwen3", config)
    for name, data in tiny_gguf.tensors("qwen3-moe"):
        writer.add_tensor("token_embd.weight" if name == "model.embed_tokens.weight" else name, data)
    tiny_gguf.finish(writer)
    with pytest.raises(UserError, match="is a `qwen3` with experts: pick one of mixtral, gpt_oss, olmoe, qwen2_moe"):
        open_checkpoint(tmp_path / "m.gguf")
