"""Quantization to int8, int5 and int4: valid blocks, small errors, smaller than without the range search."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.errors import UserError
from outrider.kernels import Weight, quantization
from outrider.kernels.quantization import FORMATS, dequantize, quantize_weight


def matrix(values: Tensor, kind: str = "f32") -> Weight:
    return Weight(kind, tuple(values.shape), values.to(FORMATS[kind].dtype))


def error(values: Tensor, to: str) -> float:
    """Root mean square of the error, relative to that of the values."""
    found = dequantize(quantize_weight(matrix(values), to))
    return float((found - values).square().mean().sqrt() / values.square().mean().sqrt())


@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("to", "kind", "limit"), [("int8", "q8_0", 0.007), ("int5", "q5_1", 0.042), ("int4", "q4_1", 0.08)]
)
def test_the_result_is_close_and_of_the_promised_kind(source: str, to: str, kind: str, limit: float) -> None:
    values = torch.randn(48, 256, generator=torch.Generator().manual_seed(1)).to(FORMATS[source].dtype).float()
    found = quantize_weight(matrix(values, source), to)
    assert (found.kind, found.shape, found.data.dtype) == (kind, (48, 256), torch.uint8)
    wrong = (dequantize(found) - values).square().mean().sqrt()
    assert wrong / values.square().mean().sqrt() < limit


def test_no_number_of_int8_is_further_off_than_half_a_step() -> None:
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    found = dequantize(quantize_weight(matrix(values), "int8"))
    step = values.reshape(64, 4, 32).abs().amax(2, keepdim=True) / 127
    # A half rounds the scale by up to 2^-11 of itself, which moves the 127th step by 0.062 of one.
    assert ((found - values).reshape(64, 4, 32).abs() <= step * 0.563).all()


def test_the_search_lowers_the_error_of_int4(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(256, 64, generator=torch.Generator().manual_seed(3))
    searched = error(values, "int4")
    monkeypatch.setattr(quantization, "CUTS", ((0.0, 0.0),))
    assert searched < 0.95 * error(values, "int4")


def test_an_affine_range_costs_nothing_for_shifted_values() -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    plain = dequantize(quantize_weight(matrix(values), "int4")) - values
    shifted = dequantize(quantize_weight(matrix(values + 4), "int4")) - (values + 4)
    assert shifted.square().mean() < 1.1 * plain.square().mean()


@pytest.mark.parametrize("to", ["int8", "int5", "int4"])
def test_blocks_of_one_value_survive(to: str) -> None:
    values = torch.zeros(3, 64)
    values[1] = 0.5
    values[2] = 1e-30
    found = dequantize(quantize_weight(matrix(values), to))
    assert found[0].eq(0).all()
    assert torch.allclose(found[1], values[1], rtol=1e-3)
    assert found[2].abs().max() < 1e-7


@pytest.mark.parametrize("to", ["int8", "int5", "int4"])
def test_quantizing_in_chunks_changes_nothing(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(torch.randn(13, 96, generator=torch.Generator().manual_seed(5)))
    whole = quantize_weight(weight, to).data
    monkeypatch.setattr(quantization, "QUANTIZE_CHUNK", 4 * 96)
    assert torch.equal(quantize_weight(weight, to).data, whole)


def test_unquantizable_matrices_are_refused() -> None:
    with pytest.raises(UserError, match="`int3`"):
        quantize_weight(matrix(torch.zeros(2, 32)), "int3")
    with pytest.raises(UserError, match="40 numbers"):
        quantize_weight(matrix(torch.zeros(2, 40)), "int4")
    with pytest.raises(ValueError, match="`q8_0`"):
        quantize_weight(quantize_weight(matrix(torch.zeros(2, 32)), "int8"), "int4")
