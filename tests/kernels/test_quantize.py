"""Quantization to int8, int5 and int4: valid blocks, small errors, smaller than without the range search."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from outrider.errors import UserError
from outrider.kernels import Weight
from outrider.kernels.cpu import _native, quantize_weight
from outrider.kernels.quantization import FORMATS, dequantize, quantize_int4, quantize_int8


def matrix(values: Tensor, kind: str = "f32") -> Weight:
    return Weight(kind, tuple(values.shape), values.to(FORMATS[kind].dtype))


def error(values: Tensor, to: str) -> float:
    """Root mean square of the error, relative to that of the values."""
    found = dequantize(quantize_weight(matrix(values), to))
    return float((found - values).square().mean().sqrt() / values.square().mean().sqrt())


@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("to", "kind", "limit"),
    [("int8", "q8_0", 0.007), ("int5", "q5_1", 0.042), ("int4", "q4_1", 0.08), ("fp8", "fp8", 0.03)],
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


def test_fp8_has_a_scale_for_each_row() -> None:
    values = (
        torch.randn(5, 64, generator=torch.Generator().manual_seed(2)) * torch.tensor([1e-6, 1, 1e4, 0, 3])[:, None]
    )
    found = quantize_weight(matrix(values), "fp8")
    scales = found.data.view(5, 2, 36)[:, :, :4].contiguous().view(torch.float32)  # [rows, blocks, 1]
    assert torch.equal(scales[:, 0, 0], values.abs().amax(1) / 448)
    assert torch.equal(scales[:, 0], scales[:, 1])
    numbers = dequantize(found)
    assert ((numbers - values).abs() <= values.abs() / 16 + scales[:, 0] / 512).all()
    assert numbers[3].eq(0).all()


def searched(x: Tensor, highest: int, cuts: Sequence[float]) -> Tensor:
    """The blocks [X, 32] as numbers, after a search over all ranges that are clipped by these fractions."""
    low, high = x.aminmax(dim=1, keepdim=True)
    best, numbers = torch.full_like(low, torch.inf), torch.zeros_like(x)
    for below, above in product(cuts, repeat=2):
        scale = ((high - low) * ((1 - below - above) / highest)).half().float()
        minimum = (low + (high - low) * below).half().float()
        levels = ((x - minimum) * torch.where(scale == 0, 0, 1 / scale)).round().clamp(0, highest)
        wrong = (levels * scale + minimum - x).square().sum(1, keepdim=True)
        numbers = torch.where(wrong < best, levels * scale + minimum, numbers)
        best = torch.minimum(wrong, best)
    return numbers


@pytest.mark.parametrize(("to", "highest"), [("int5", 31), ("int4", 15)])
def test_the_range_of_the_least_error_is_found(to: str, highest: int) -> None:
    values = torch.randn(256, 64, generator=torch.Generator().manual_seed(3))
    values[:64] *= 1e-6  # scales that are denormal in fp16
    values[64:128] *= 1e4
    found = dequantize(quantize_weight(matrix(values), to)).view(-1, 32)
    expected = searched(values.view(-1, 32), highest, (0.0, 0.03, 0.06, 0.09, 0.12))
    wrong, least = ((numbers - values.view(-1, 32)).square().sum(1) for numbers in (found, expected))
    assert torch.allclose(wrong, least, rtol=1e-5, atol=0)  # two ranges may be equally good
    assert (found == expected).all(1).float().mean() > 0.99
    plain = (searched(values.view(-1, 32), highest, (0.0,)) - values.view(-1, 32)).square().sum()
    assert wrong.sum() < (0.9 if to == "int4" else 0.99) * plain


@pytest.mark.parametrize("to", ["int8", "int5", "int4"])
def test_weights_that_are_not_finite_spoil_only_their_block(to: str) -> None:
    values = torch.randn(3, 96, generator=torch.Generator().manual_seed(6))
    sound = dequantize(quantize_weight(matrix(values), to))
    values[0, 5], values[1, 40], values[2, 95] = torch.nan, torch.inf, -torch.inf
    found = dequantize(quantize_weight(matrix(values), to))
    intact = torch.ones(3, 96, dtype=torch.bool)
    intact[0, :32] = intact[1, 32:64] = intact[2, 64:] = False
    assert torch.equal(found[intact], sound[intact])
    assert not found[~intact].isfinite().any() or found[~intact].eq(0).all()  # int8 says so, others have no scale


@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
def test_torch_quantizes_to_the_bits_of_the_native_kernel(source: str, to: str) -> None:
    """Weights on a GPU are quantized there."""
    values = torch.randn(900, 5056, generator=torch.Generator().manual_seed(7))  # several chunks
    values[:200] *= 1e-6  # scales that are denormal in fp16, or 0
    values[200:400] *= 1e4
    values[400, :96] = values[401] = 0
    values[402, 5], values[403, 40], values[404, 95] = torch.nan, torch.inf, -torch.inf
    values[405:500] = values[405:500].round(decimals=1)  # ties
    weight = matrix(values, source)
    quantize = {"int8": quantize_int8, "int4": quantize_int4}[to]
    assert torch.equal(quantize(weight).data, quantize_weight(weight, to).data)


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
def test_threads_and_parts_change_no_bit(to: str) -> None:
    values = torch.randn(1100, 96, generator=torch.Generator().manual_seed(5))  # several runs of 1,024 blocks
    threads, found = _native.thread_count(), []
    try:
        for count in (1, 3):
            _native.set_thread_count(count)
            found.append(quantize_weight(matrix(values), to).data)
    finally:
        _native.set_thread_count(threads)
    parts = [quantize_weight(matrix(part), to).data for part in values.split(300)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], torch.cat(parts))


def test_unquantizable_matrices_are_refused() -> None:
    with pytest.raises(UserError, match="`int3`"):
        quantize_weight(matrix(torch.zeros(2, 32)), "int3")
    with pytest.raises(UserError, match="40 numbers"):
        quantize_weight(matrix(torch.zeros(2, 40)), "int4")
    with pytest.raises(ValueError, match="`q8_0`"):
        quantize_weight(quantize_weight(matrix(torch.zeros(2, 32)), "int8"), "int4")
    with pytest.raises(ValueError, match="64 numbers"):
        quantize_weight(Weight("f32", (3, 32), torch.zeros(2, 32)), "int4")
    with pytest.raises(ValueError, match="cannot quantize from or to `q8_1`"):
        _native.quantize("f32", "q8_1", 0, 0, 0)
    with pytest.raises(ValueError, match="cannot quantize 40 weights"):
        _native.quantize("f32", "q8_0", 40, 0, 0)
