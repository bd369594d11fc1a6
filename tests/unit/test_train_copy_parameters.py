"""Heads that start from the parameters of another: deeper ones, and ones with another vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import unrolled
from torch import Tensor

from outrider.train.heads import autoregressive, block, draft_model, medusa
from outrider.train.heads.base import DraftHead
from outrider.train.io.init_from import copy_parameters
from outrider.train.loop import trained
from outrider.train.target import TargetOutputs

MAKERS: dict[str, tuple[Any, Any]] = {
    "eagle3": (autoregressive.EagleDraftHead, autoregressive.EagleOptions),
    "dspark": (block.DSparkDraftHead, block.Options),
    "medusa": (medusa.MedusaDraftHead, medusa.Options),
    "draft_model": (draft_model.DraftModelHead, draft_model.Options),
}
SMALL = {"width": 32, "heads": 4, "kv_heads": 2, "mlp_width": 64, "share": 1.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"length": 2},
    "dspark": {"block": 4, "layers": 1, "aux_layers": (1, 3), "markov_rank": 4},
    "medusa": {"heads": 2},
    "draft_model": SMALL | {"layers": 1},
}
DEEPER = {"eagle3": {"layers": 3}, "dspark": {"layers": 2}, "medusa": {"blocks": 3}, "draft_model": {"layers": 2}}


def make(method: str, seed: int, **more: Any) -> DraftHead:
    torch.manual_seed(seed)
    kind, options = MAKERS[method]
    target = unrolled.model("llama")
    draft_head: DraftHead = kind(unrolled.target_info(target, "llama"), options(**OPTIONS[method] | more), 40)
    return draft_head


def loss(draft_head: DraftHead) -> Tensor:
    target = unrolled.model("llama")
    outputs: TargetOutputs = unrolled.forward(target, unrolled.pack(), draft_head.aux_layers)
    torch.manual_seed(0)
    with torch.no_grad():
        return draft_head(outputs).loss


def stirred(method: str, **more: Any) -> DraftHead:
    draft_head = make(method, 1, **more)
    unrolled.stir(draft_head)
    loss(draft_head)  # some look at their first lesson
    return draft_head


@pytest.mark.parametrize("method", MAKERS)
@pytest.mark.parametrize("deeper", [False, True])
def test_a_head_with_copied_parameters_keeps_the_loss(method: str, deeper: bool) -> None:
    before = stirred(method, draft_vocabulary=60)
    after = make(method, 2, draft_vocabulary=60, **DEEPER[method] if deeper else {})
    assert not torch.allclose(loss(after), loss(before))
    assert copy_parameters(after, trained(before), before.draft_ids) == []
    torch.testing.assert_close(loss(after), loss(before))


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
@pytest.mark.parametrize(("then", "now"), [(50, 70), (70, 50), (0, 50)])
def test_rows_are_copied_by_token(method: str, then: int, now: int) -> None:
    before, after = stirred(method, draft_vocabulary=then), make(method, 2, draft_vocabulary=now)
    table = "lm_head.weight" if method == "eagle3" else "embed_tokens.weight"
    trained(before)[table].mul_(-2)  # so that no row is as it began
    fresh = trained(after)[table].clone()
    assert copy_parameters(after, trained(before), before.draft_ids) == []
    assert after.draft_ids is not None
    left = trained(before)[table]
    words = range(len(left)) if before.draft_ids is None else before.draft_ids.tolist()
    old = dict(zip(words, left, strict=True))
    for number, word in enumerate(after.draft_ids.tolist()):
        wanted = old.get(word, fresh[number])
        assert torch.equal(trained(after)[table][number], wanted), word
    assert old.keys() != set(after.draft_ids.tolist())


def test_another_width_is_refused_without_changes() -> None:
    before, after = stirred("draft_model"), make("draft_model", 2, mlp_width=96)
    kept = {name: value.clone() for name, value in trained(after).items()}
    assert copy_parameters(after, trained(before), before.draft_ids)[0].endswith("gate_proj.weight")
    assert all(torch.equal(value, trained(after)[name]) for name, value in kept.items())
