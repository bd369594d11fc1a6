"""Dequantized blocks equal those of the `gguf` package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from outrider.kernels import Weight, quantization

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
