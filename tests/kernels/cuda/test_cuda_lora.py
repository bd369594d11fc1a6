"""Adapters in the Triton kernels, against the reference; a row's result does not depend on its neighbours' adapters."""

from __future__ import annotations

import pytest
import torch

from carried import Carried
from outrider.kernels import Kernels, reference
from outrider.kernels.cases import CASES, Case, difference, inputs
from outrider.kernels.cases.inputs import Shape
from outrider.kernels.cases.layers import mlp
from outrider.kernels.cuda.device import DEVICE

CASES = [case for case in CASES if "adapters" in case.name and not case.name.startswith("q")] + [
    mlp("bf16", "silu", ["norm"], tokens=33, shape=Shape(width=96, inner=160), lora=True),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.op}: {case.name}" for case in CASES])
def test_adapters_agree_with_the_reference(ops: Kernels, case: Case) -> None:
    for found, meant in zip(case.build(ops, 1)(None), case.build(reference, 1)(None), strict=True):
        assert difference(found, meant) <= case.loose


@pytest.mark.parametrize("case", CASES[-1:], ids=lambda case: f"{case.op}: {case.name}")
def test_the_adapters_of_other_rows_change_nothing(case: Case) -> None:
    from outrider.kernels.cuda import batch_invariant

    run = case.build(Carried(batch_invariant, DEVICE), 2)
    whole = run(None)
    for items in ([0], list(range(1, case.items))):
        for result, meant in zip(run(items), whole, strict=True):
            assert torch.equal(result, meant[items])


def test_rows_without_an_adapter_keep_their_bits() -> None:
    from outrider.kernels.cuda import batch_invariant

    ops = Carried(batch_invariant, DEVICE)
    random = inputs.generator(3)
    weights = inputs.mlp_weights(random, "f32", Shape(width=96, inner=160), "silu", ["norm"])
    layer = ops.mlp_layer(inputs.with_mlp_lora(random, ops, weights))
    x = inputs.normal(random, 20, 96)
    plain, mixed = x.clone(), x.clone()
    ops.mlp(plain, layer)
    ops.mlp(mixed, layer, torch.tensor([-1, 0] * 10, dtype=torch.int32))
    assert torch.equal(plain[::2], mixed[::2])
    assert not torch.equal(plain[1::2], mixed[1::2])
