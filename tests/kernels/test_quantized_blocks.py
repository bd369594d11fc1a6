"""Dequantized blocks equal those of the `gguf` package, bit for bit; the CPU keeps nibbles as nibbles."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from outrider.kernels import Weight, cpu, quantization
from outrider.kernels.cases import inputs

OURS = ("q4_z", "q8_z", "fp8")  # formats that GGUF does not have
QUANTISED = [kind for kind, block in quantization.FORMATS.items() if block.quantized and kind not in OURS]
HALVES = {  # where the halves lie in a block
    "q4_0": [0],
    "q4_1": [0, 2],
    "q5_0": [0],
    "q5_1": [0, 2],
    "q8_0": [0],
    "q4_k": [0, 2],
    "q5_k": [0, 2],
    "q6_k": [208],
    "iq4_nl": [0],
    "mxfp4": [],  # its scale is a byte, the exponent
}
# Zeros, the smallest subnormal, the largest subnormal, the smallest normal, the largest half, and their negatives.
EDGES = np.array([0x0000, 0x0001, 0x03FF, 0x0400, 0x7BFF, 0x8000, 0x8001, 0x83FF, 0xFBFF], dtype=np.uint16)


def random_blocks(kind: str, count: int, seed: int) -> np.ndarray:
    """Random bits, so every quant and every group scale; the halves finite, the first ones the edges."""
    random = np.random.default_rng(seed)
    packed = random.integers(0, 256, (count, quantization.FORMATS[kind].bytes), dtype=np.uint8)
    for shift, at in enumerate(HALVES[kind]):
        halves = random.integers(0, 1 << 16, count, dtype=np.uint16)
        halves[(halves & 0x7C00) == 0x7C00] &= 0x3FFF
        halves[: EDGES.size] = np.roll(EDGES, shift)
        packed[:, at : at + 2] = halves.view(np.uint8).reshape(count, 2)
    if kind == "mxfp4":
        packed[:, 0] = np.minimum(packed[:, 0], 251)  # the four largest exponents overflow
    return packed


@pytest.mark.parametrize("kind", QUANTISED)
def test_blocks_dequantize_as_in_gguf(kind: str) -> None:
    packed = random_blocks(kind, 2000, seed=1)
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind.upper()])
    found = quantization.dequantize(Weight(kind, expected.shape, torch.from_numpy(packed)))
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", QUANTISED)
def test_rows_of_several_blocks_keep_their_shape_and_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = quantization.FORMATS[kind]
    packed = torch.from_numpy(random_blocks(kind, 15, seed=2)).reshape(5, 3 * block.bytes)
    weight = Weight(kind, (5, 3 * block.elements), packed)
    whole = quantization.dequantize(weight)
    assert whole.shape == weight.shape
    assert packed.shape[1] == quantization.row_bytes(kind, weight.shape[1])
    monkeypatch.setattr(quantization, "DEQUANTIZE_CHUNK", 4 * block.elements)  # 15 blocks in pieces of 4
    assert torch.equal(quantization.dequantize(weight), whole)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_float_weights_convert_exactly(kind: str) -> None:
    values = torch.randn(3, 7).to(quantization.FORMATS[kind].dtype)
    assert torch.equal(quantization.dequantize(Weight(kind, (3, 7), values)), values.float())


@pytest.mark.parametrize("kind", [kind for kind in quantization.FORMATS if kind not in OURS])
def test_sizes_are_those_of_gguf(kind: str) -> None:
    block = quantization.FORMATS[kind]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]] == (block.elements, block.bytes)


def test_a_row_of_half_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="`q4_k`"):
        quantization.row_bytes("q4_k", 128)


@pytest.mark.parametrize("kind", ["q4_0", "iq4_nl", "mxfp4"])
def test_nibbles_stay_nibbles_on_the_cpu(kind: str) -> None:
    """With a half as their scale: 18 bytes for 32 weights."""
    packed = cpu.matrix(inputs.random_weight(inputs.generator(1), kind, 48, 256))
    assert (packed.kind, packed.bytes) == ("q4", 48 * 256 // 32 * 18)


@pytest.mark.parametrize("kind", ["iq4_nl", "mxfp4"])
def test_every_value_of_a_table_is_multiplied(kind: str) -> None:
    """Unit rows return each weight of a matrix; its scales are powers of two that a half can hold."""
    block = quantization.FORMATS[kind]
    packed = np.random.default_rng(1).integers(0, 256, (32, 8 * block.bytes), dtype=np.uint8)
    blocks = packed.reshape(-1, block.bytes)
    exponents = np.arange(len(blocks), dtype=np.uint16) % 12
    if kind == "mxfp4":
        blocks[:, 0] = 120 + exponents
    else:
        blocks[:, :2] = (exponents + 8 << 10).view(np.uint8).reshape(-1, 2)
    weight = Weight(kind, (32, 256), torch.from_numpy(packed))
    matrix, expected = cpu.matrix(weight), quantization.dequantize(weight)
    assert torch.equal(cpu.embed(matrix, torch.arange(32, dtype=torch.int32), 1.0), expected)
    for rows in (1, 3, 8):
        found = torch.cat([cpu.linear(part, matrix) for part in torch.eye(256).split(rows)])
        torch.testing.assert_close(found, expected.T, rtol=1e-6, atol=0)
