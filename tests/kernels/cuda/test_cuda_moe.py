"""Mixtures of experts on CUDA: every storage, grouping by pair and by expert, independence of rows."""

from __future__ import annotations

import pytest
import torch

from carried import Carried
from outrider.kernels import Kernels, cuda, reference
from outrider.kernels.cases import Case, difference, inputs, layers
from outrider.kernels.cases.case import LOOSE
from outrider.kernels.cases.inputs import Shape
from outrider.kernels.cuda import matrices
from outrider.kernels.cuda.device import DEVICE
from outrider.kernels.cuda.moe import _group

SMALL = Shape(width=96, inner=64)
EVERYTHING = ("norm", "post_norm", "router_bias", "gate_bias", "up_bias", "down_bias", "shared", "normalized")
CASES = [
    layers.moe("f32", [], tokens=1, shape=SMALL),
    layers.moe("f32", ["norm", "normalized"], tokens=17, shape=SMALL),
    layers.moe("bf16", EVERYTHING, activation="gelu_tanh", shape=SMALL),
    layers.moe("q4_0", EVERYTHING, tokens=3, shape=SMALL),
    layers.moe("mxfp4", EVERYTHING[2:6], tokens=3, activation="swiglu_oai", shape=SMALL),
    layers.moe("q6_k", tokens=2, experts=4, top_k=2),
    layers.moe("q8_0", ["norm", "shared"], tokens=20, experts=5, top_k=5, shape=SMALL),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_mixtures_agree_with_the_reference(case: Case, ops: Kernels, poisoned_memory: None) -> None:
    (found,), (meant,) = case.build(ops, 1)(None), case.build(reference, 1)(None)
    assert difference(found, meant) <= case.loose


@pytest.mark.parametrize("kind", ["f32", "q4_1"])
def test_a_row_has_the_same_bits_in_any_batch(kind: str) -> None:
    from outrider.kernels.cuda import batch_invariant

    run = layers.moe(kind, EVERYTHING, tokens=19, shape=SMALL).build(Carried(batch_invariant, DEVICE), 2)
    (together,) = run(None)
    for items in ([4], [18, 0], list(range(7, 17))):
        assert torch.equal(run(items)[0], together[items])


def test_experts_of_fp8_have_a_scale_for_each_row(ops: Kernels) -> None:
    weights = inputs.moe_weights(inputs.generator(1), "fp8", SMALL, 4, 2)
    for each in (*weights.gate, *weights.up, *weights.down):
        blocks = each.data.view(each.shape[0], -1, 36)
        blocks[:, :, :4] = blocks[:, :1, :4].clone()
    layer, plain = ops.moe_layer(weights), reference.moe_layer(weights)
    x = inputs.normal(inputs.generator(2), 5, SMALL.width)
    found, meant = x.clone(), x.clone()
    ops.moe(found, layer)
    reference.moe(meant, plain)
    assert difference(found - x, meant - x) <= 2 * LOOSE[torch.bfloat16]


def test_experts_stay_quantized_where_short_rows_of_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "EXPANDED", 2048)
    layer = cuda.moe_layer(inputs.moe_weights(inputs.generator(1), "q4_1", SMALL, 4, 2))
    assert (layer.gate_up.kind, layer.down.kind) == ("int4", "int4")


@pytest.mark.parametrize(("tokens", "experts"), [(1, 8), (3, 64), (3, 4), (700, 4)])
def test_groups_hold_each_pair_once(tokens: int, experts: int) -> None:
    random = inputs.generator(tokens)
    chosen = torch.stack([torch.randperm(experts, generator=random)[:3] for _ in range(tokens)]).to(torch.int32)
    groups = _group(chosen.to(DEVICE), experts)
    assert len(groups.counts) == min(3 * tokens, experts)
    found = [
        (pair, expert)
        for expert, count, pairs in zip(*(part.tolist() for part in groups), strict=True)
        for pair in pairs[:count]
    ]
    assert sorted(found) == list(enumerate(chosen.flatten().tolist()))
