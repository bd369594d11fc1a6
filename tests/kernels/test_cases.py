"""Every case of every operation, on the cpu backend at every level, against the reference."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from outrider.kernels import Kernels, cpu, reference
from outrider.kernels.cases import CASES, Case, difference, inputs, layers
from outrider.kernels.kv_quantization import quantize_heads

EACH = pytest.mark.parametrize("case", CASES, ids=[f"{case.op}: {case.name}" for case in CASES])
SEED = 1


@cache
def expected(case: Case) -> tuple[Tensor, ...]:
    return case.build(reference, SEED)(None)


@EACH
def test_the_cpu_backend_agrees_with_the_reference(case: Case, level: str) -> None:
    found = case.build(cpu, SEED)(None)
    for at, (result, meant) in enumerate(zip(found, expected(case), strict=True)):
        assert difference(result, meant) <= case.at(level), f"result {at} at level {level}"


def test_difference_detects_errors() -> None:
    meant = torch.tensor([3.0, -4.0, 0.0, 5.0])
    assert difference(meant.clone(), meant) == 0
    assert difference(meant + 1e-3, meant) == pytest.approx(1e-3 / 12.5**0.5, rel=1e-3)
    assert difference(meant[:3], meant) == torch.inf
    assert difference(meant.double(), meant) == torch.inf
    banned = torch.tensor([1.0, -torch.inf])
    assert difference(torch.tensor([1.0, -1e30]), banned) == torch.inf
    assert difference(torch.tensor([torch.nan, -torch.inf]), banned) != 0
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == torch.inf
    half = torch.tensor([1.0, 2.0]).half()
    assert difference(half * (1 + 2**-10), half) == 0
    assert difference(half * (1 + 2**-8), half) > 1e-3


@pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_stored_numbers_are_those_that_float_pages_would_give(ops: Kernels, dtype: torch.dtype, head_dim: int) -> None:
    random, shape = inputs.generator(3), inputs.Shape(heads=2, kv_heads=2, head_dim=head_dim)
    weights = inputs.attention_weights(random, "f32", shape, ["rotary"])
    layer, batch = ops.attention_layer(weights), inputs.random_batch(random, layers.MIXED)
    x = inputs.normal(random, len(batch.tokens), shape.width) * torch.logspace(-40, 4, len(batch.tokens))[:, None]
    x[3], x[5, 1] = 0, torch.inf
    floats, found = (inputs.random_pages(random, batch, shape, each) for each in (torch.float32, dtype))
    for pages in (floats, found):
        ops.project_qkv(x, layer, batch, pages)
    at = batch.slots.long() // inputs.PAGE, slice(None), batch.slots.long() % inputs.PAGE
    for values, numbers, scales in (
        (floats.keys, found.keys, found.key_scales),
        (floats.values, found.values, found.value_scales),
    ):
        expected, expected_scales = quantize_heads(values[at], dtype)
        assert torch.equal(numbers[at].view(torch.uint8), expected.view(torch.uint8))
        assert scales is not None and torch.equal(scales[at].nan_to_num(7), expected_scales.nan_to_num(7))
        assert scales[at][5].isnan().all() and not scales[at][:5].isnan().any()


def test_projections_write_only_the_slots_of_their_tokens(level: str) -> None:
    random = inputs.generator(3)
    layer = cpu.attention_layer(inputs.attention_weights(random, "f32", inputs.SMALL, ["rotary"]))
    batch = inputs.random_batch(random, layers.MIXED)
    pages = inputs.random_pages(random, batch, inputs.SMALL, torch.float16)
    keys, values = pages.keys.clone(), pages.values.clone()
    cpu.project_qkv(inputs.normal(random, len(batch.tokens), inputs.SMALL.width), layer, batch, pages)
    page, slot = batch.slots.long() // inputs.PAGE, batch.slots.long() % inputs.PAGE
    for before, after in ((keys, pages.keys), (values, pages.values)):
        assert not torch.equal(before, after)
        before[page, :, slot] = after[page, :, slot]
        assert torch.equal(before, after)
