"""Matmuls with FP8 weights whose activations are sums of e4m3 numbers: exact with two, rounded with one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from outrider import kernels
from outrider.kernels import Weight
from outrider.kernels.cases import difference, inputs
from outrider.kernels.cases.inputs import Shape
from outrider.kernels.cuda import e4m3_matmul, matmul, matrices
from outrider.kernels.cuda.device import DEVICE, INTERPRETED
from outrider.kernels.cuda.matrices import Matrix
from outrider.kernels.quantization import dequantize, quantize_fp8

EPS = 1e-5
EXACT = 1e-5 if INTERPRETED else 1e-3  # tensor cores keep about 14 bits of a sum of e4m3 products
COLUMNS = (128, 224, 576, 992)  # whole chunks of 128 columns, and padded ones
FEW, MANY = 5, 40  # rows for the fused kernel, and for cuBLAS


@pytest.fixture(autouse=True)
def quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, too, short rows stay as they are stored."""
    monkeypatch.setattr(matrices, "EXPANDED", 0)


def fp8(rows: int, columns: int, seed: int = 1) -> Weight:
    return quantize_fp8(inputs.random_weight(inputs.generator(seed), "f32", rows, columns))


def packed(weight: Weight, terms: int, batch_invariant: bool = False) -> Matrix:
    return matrices.pack([weight], batch_invariant, fast_activations=terms == 1)


def states(seed: int, rows: int, columns: int) -> Tensor:
    """Return numbers of a bf16 whose sizes differ: [T, K] f32."""
    random = inputs.generator(seed)
    values = inputs.normal(random, rows, columns) * torch.exp2(inputs.normal(random, rows, columns) * 2)
    return values.bfloat16().float().to(DEVICE)


def product(x: Tensor, weight: Weight) -> Tensor:
    return (x.double() @ dequantize(weight).to(DEVICE).double().T).float()


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the size of the error relative to that of the result."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def as_e4m3(x: Tensor) -> Tensor:
    """Round rows to e4m3 numbers, the largest of which is 128 to 256, times a power of two."""
    power = torch.exp2(torch.floor(torch.log2(x.abs().amax(1, keepdim=True))) - 7)
    return (x / power).to(torch.float8_e4m3fn).float() * power


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", [33, MANY])
def test_two_terms_are_as_exact_as_the_activations(rows: int, columns: int) -> None:
    weight, x = fp8(48, columns), states(2, rows, columns)
    matrix = packed(weight, 2)
    assert e4m3_matmul.is_faster(matrix, rows)
    assert distance(matmul.linear(x, matrix), product(x, weight)) <= EXACT
    assert distance(matmul.linear(x.bfloat16(), matrix), product(x, weight)) <= EXACT


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", [1, FEW, MANY, 130])
def test_one_term_is_the_activation_rounded_to_e4m3(rows: int, columns: int) -> None:
    weight, x = fp8(48, columns), states(3, rows, columns)
    expected = product(as_e4m3(x), weight)
    assert distance(matmul.linear(x, packed(weight, 1)), expected) <= EXACT
    assert distance(expected, product(x, weight)) > 1e-2


@pytest.mark.parametrize("terms", [1, 2])
def test_rows_have_scales_of_their_own(terms: int) -> None:
    weight, x = fp8(32, 256), states(4, MANY, 256)
    sizes = torch.exp2(torch.linspace(-90, 90, MANY, device=DEVICE).round())[:, None]
    found, expected = (matmul.linear(given, packed(weight, terms)) for given in (x * sizes, x))
    assert difference(found / sizes, expected) <= 1e-6


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("rows", [10, MANY])
def test_rows_of_zeros_and_of_infinite_numbers_change_no_other(rows: int, terms: int) -> None:
    weight, x = fp8(32, 256), states(5, rows, 256)
    expected = matmul.linear(x, packed(weight, terms))
    x[3] = 0
    if not INTERPRETED:  # it warns of them
        x[7], x[8, 9] = torch.nan, torch.inf
    found = matmul.linear(x, packed(weight, terms))
    assert torch.equal(found[3], torch.zeros_like(found[3]))
    assert INTERPRETED or not found[7:9].isfinite().any()
    kept = [row for row in range(rows) if row not in (3, 7, 8)]
    assert torch.equal(found[kept], expected[kept])


@pytest.mark.skipif(not INTERPRETED, reason="sums on a GPU have too few bits for small numbers beside large ones")
def test_small_numbers_beside_large_ones() -> None:
    """They keep their bits down to 2^-13 of the largest. Smaller ones are rounded to 2^-20 of it."""
    values = inputs.random_weight(inputs.generator(1), "f32", 32, 128)
    values.data[:, 5] = 0
    weight = quantize_fp8(values)
    for size, error in ((2.0**-7, 0.0), (2.0**-18, 2.0**-21)):
        x = inputs.normal(inputs.generator(6), MANY, 128).clamp(-1, 1).bfloat16().float() * size
        x[x.abs() < size / 64] = 0
        x[:, 5] = 1
        bound = error * dequantize(weight).abs().sum(1) + 1e-6 * size
        assert bool(((matmul.linear(x, packed(weight, 2)) - product(x, weight)).abs() <= bound).all())


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_norm_bias_and_residual(rows: int, terms: int) -> None:
    weight, x = fp8(48, 224), states(7, rows, 224)
    norm, bias = (states(8, 1, n)[0] for n in (224, 48))
    residual = states(9, rows, 48)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm
    expected = product(as_e4m3(normed) if terms == 1 else normed, weight) + bias + residual
    out = residual.clone()
    assert matmul.matmul(x, packed(weight, terms), norm=norm, eps=EPS, bias=bias, add=out) is out
    assert distance(out, expected) <= 5e-3  # bf16, or numbers that are rounded the other way
    into = torch.empty(rows, 48, device=DEVICE)
    assert matmul.matmul(x, packed(weight, terms), norm=norm, eps=EPS, bias=bias, out=into) is into
    assert distance(into + residual, expected) <= 5e-3


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("with_deltas", [False, True])
@pytest.mark.parametrize("terms", [1, 2])
def test_gates(terms: int, with_deltas: bool, activation: str) -> None:
    weight, x = fp8(96, 256), states(10, MANY, 256) / 16
    gate_bias, up_bias = (states(seed, 1, 48)[0] / 16 for seed in (11, 12))
    deltas = states(13, MANY, 96) / 16 if with_deltas else None
    both = product(as_e4m3(x) if terms == 1 else x, weight) + (0 if deltas is None else deltas)
    gate, up = both[:, :48] + gate_bias, both[:, 48:] + up_bias
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        expected = gate * torch.sigmoid(1.702 * gate) * up
    else:
        expected = up * (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh"))
    found = matmul.gated_matmul(
        x,
        packed(weight, terms),
        norm=None,
        eps=EPS,
        gate_bias=gate_bias,
        up_bias=up_bias,
        activation=activation,  # type: ignore[arg-type]
        deltas=deltas,
    )
    assert found.dtype == torch.bfloat16
    assert distance(found, expected) <= 5e-3


@pytest.mark.skipif(not INTERPRETED, reason="sums on a GPU have too few bits")
def test_gates_of_few_and_of_many_rows_are_rounded_alike() -> None:
    """Rounding to e4m3, which follows, would enlarge a difference."""
    matrix, x = packed(fp8(96, 256), 1), states(21, MANY, 256) / 16
    given = {"norm": None, "eps": EPS, "gate_bias": None, "up_bias": None, "activation": "silu"}
    few, many = (matmul.gated_matmul(part, matrix, **given) for part in (x[:FEW], x))  # type: ignore[arg-type]
    assert (few == many[:FEW]).float().mean() > 0.95


def test_what_cublas_cannot_read_is_multiplied_otherwise() -> None:
    grouped = inputs.random_weight(inputs.generator(1), "fp8", 48, 256)  # a scale for each block
    x = states(14, MANY, 256)
    assert not e4m3_matmul.is_faster(packed(fp8(1 << 15, 32), 2), MANY)  # the fused kernel reads a head as fast
    for weight in (grouped, fp8(40, 256)):
        matrix = packed(weight, 2)
        assert not e4m3_matmul.is_faster(matrix, MANY)
        assert distance(matmul.linear(x, matrix), product(x, weight)) <= 5e-3
    weight, many = fp8(48, 256), states(19, matmul.EXPANDED_ROWS + 1, 256)
    for given, terms in ((x, 1), (x, 2), (many, 1), (many, 2)):
        part = matrices.rows(packed(weight, terms), 0, 24)
        expected = product(as_e4m3(given) if terms == 1 else given, weight)[:, :24]
        assert distance(matmul.linear(given, part), expected) <= 5e-3
        gated = matmul.gated_matmul(given, part, norm=None, eps=EPS, gate_bias=None, up_bias=None, activation="silu")
        assert distance(gated, functional.silu(expected[:, :12]) * expected[:, 12:]) <= 1e-2


@pytest.mark.parametrize("terms", [1, 2])
def test_a_view_of_rows_has_their_scales(terms: int) -> None:
    """As the keys and values of a layer are."""
    weight, x = fp8(96, 256), states(20, MANY, 256)
    part = matrices.rows(packed(weight, terms), 48, 96)
    assert e4m3_matmul.is_faster(part, MANY)
    expected = product(as_e4m3(x) if terms == 1 else x, weight)[:, 48:]
    assert distance(matmul.linear(x, part), expected) <= EXACT


def test_more_rows_than_two_terms_pay_for_are_multiplied_as_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = fp8(48, 256), states(15, e4m3_matmul.MOST_ROWS + 1, 256)
    assert not e4m3_matmul.is_faster(packed(weight, 2), len(x))
    assert e4m3_matmul.is_faster(packed(weight, 1), len(x))
    monkeypatch.setattr(e4m3_matmul, "multiply", None)  # not called
    assert distance(matmul.linear(x, packed(weight, 2)), product(x, weight)) <= 5e-3


@pytest.mark.parametrize("terms", [1, 2])
def test_a_row_of_a_batch_invariant_matrix_does_not_depend_on_others(terms: int) -> None:
    matrix, x = packed(fp8(48, 576), terms, batch_invariant=True), states(16, 70, 576)
    whole = matmul.linear(x, matrix)
    for count in (1, 5, 33, 64):
        assert torch.equal(matmul.linear(x[:count], matrix), whole[:count])


@pytest.mark.parametrize("deterministic", [False, True])
def test_fast_backends_round_activations_of_layers_but_not_of_heads(deterministic: bool) -> None:
    fast = kernels.load("cuda", deterministic=deterministic, activations="fast")
    exact = kernels.load("cuda", deterministic=deterministic)
    shape = Shape(width=128, heads=2, kv_heads=1, head_dim=64, inner=192)
    random = inputs.generator(1)
    attention = inputs.attention_weights(random, "f32", shape, ["gate"])
    stored = {part: quantize_fp8(getattr(attention, part)) for part in ("query", "key", "value", "output", "gate")}
    layer = fast.attention_layer(replace(attention, **stored))
    parts = [layer.qkv, layer.kv, layer.output, layer.gate]
    mlp = inputs.mlp_weights(random, "f32", shape, "silu")
    weights = replace(mlp, gate=quantize_fp8(mlp.gate), up=quantize_fp8(mlp.up), down=quantize_fp8(mlp.down))
    fast_mlp = fast.mlp_layer(weights)
    for part in (*parts, fast_mlp.gate_up, fast_mlp.down):
        assert (part.terms, part.batch_invariant) == (1, deterministic)
    for rows in (FEW, MANY):
        x = states(17, rows, 128)
        found, expected = x.clone(), x.clone()
        fast.mlp(found, fast_mlp)
        exact.mlp(expected, exact.mlp_layer(weights))
        assert 1e-2 < distance(found - x, expected - x) < 0.1
    head, x = fp8(64, 128), states(18, MANY, 128)
    assert torch.equal(fast.linear(x, fast.matrix(head)), exact.linear(x, exact.matrix(head)))
