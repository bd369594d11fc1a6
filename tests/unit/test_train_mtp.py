"""One module of multi-token prediction in training is what plain attention says, and what the engine's module says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import unrolled

import tiny
from outrider.errors import UserError
from outrider.models.heads import EagleHead
from outrider.speculation.checkpoints import choose_aux_layers, open_head
from outrider.train.heads.autoregressive import MtpDraftHead, MtpOptions
from outrider.train.target import TargetOutputs


def make(name: str = "llama", **variant: Any) -> tuple[MtpDraftHead, TargetOutputs]:
    target = unrolled.model(name)
    options = MtpOptions(**{"length": 3, "rows": 7} | variant)
    draft_head = MtpDraftHead(unrolled.target_info(target, name), options, unrolled.POSITIONS)
    unrolled.stir(draft_head)
    return draft_head, unrolled.forward(target, unrolled.pack(), draft_head.aux_layers)


@pytest.mark.parametrize("head_norms", [False, True])
def test_every_step_equals_plain_attention(head_norms: bool) -> None:
    """Logits, the report and its gradients; the shares of the steps add up to one."""
    draft_head, outputs = make(head_norms=head_norms)
    unrolled.learn(draft_head, outputs, 6)
    shares = [1 / 1.96, 0.6 / 1.96, 0.36 / 1.96]
    unrolled.same_as_plain(draft_head, outputs, shares)


@pytest.mark.parametrize("target", ["llama", "llama3-rope", "gemma3"])
def test_the_engine_drafts_what_was_trained(target: str, tmp_path: Path) -> None:
    draft_head, outputs = make(target, head_norms=target == "llama", mlp_width=40)
    model = unrolled.model(target)
    head = open_head(str(unrolled.write(draft_head.export(), tmp_path)), model.config, "mtp")
    assert head.shape.layout == "Qwen" and head.shape.modules == 1 and not head.shape.offset_norms
    aux_layers = choose_aux_layers(head, model)
    network = EagleHead(head.module(0), model, unrolled.pages(head), unrolled.POSITIONS)
    found, wanted = unrolled.logits_of(draft_head, outputs), unrolled.draft_by_engine(network, outputs, aux_layers, 3)
    assert len(wanted) > 50
    for (row, at, step), logits in wanted.items():
        assert unrolled.close(found[step, row, at], logits), (row, at, step)


def test_only_the_module_is_trained_and_written() -> None:
    target = unrolled.model()
    target_info = unrolled.target_info(target)
    draft_head = MtpDraftHead(target_info, MtpOptions(rows=7), unrolled.POSITIONS)
    losses = unrolled.learn(draft_head, unrolled.forward(target, unrolled.pack(), ()), 25)
    assert losses[-1] < 0.4 * losses[0]
    assert torch.equal(draft_head.head, tiny.original("llama").lm_head.weight)
    names = set(draft_head.export().tensors)
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight"} < names
    assert len(names) == 4 + 9 and not any("head" in name or "embed_tokens" in name for name in names)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"length": 0}, "`length` is 0: pass 1 or more"),
        ({"rows": 0}, "`rows` is 0: pass 1 or more"),
        ({"mlp_width": -1}, "`mlp_width` is -1: pass 0 or more"),
        ({"decay": 0.0}, "`decay` is 0.0: pass a number above 0, at most 1"),
    ],
)
def test_invalid_options_are_refused(variant: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MtpDraftHead(unrolled.target_info(unrolled.model()), MtpOptions(**variant), unrolled.POSITIONS)
