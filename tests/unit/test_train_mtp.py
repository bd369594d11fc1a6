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
from outrider.speculation.checkpoints import choose_taps, open_head
from outrider.train.heads.mtp import MtpStudent, Options
from outrider.train.target import Lesson


def make(name: str = "llama", **variant: Any) -> tuple[MtpStudent, Lesson]:
    target = unrolled.model(name)
    options = Options(**{"length": 3, "rows": 7} | variant)
    student = MtpStudent(unrolled.subject(target, name), options, unrolled.POSITIONS)
    unrolled.stir(student)
    return student, unrolled.teach(target, unrolled.pack(), student.taps)


@pytest.mark.parametrize("head_norms", [False, True])
def test_every_step_is_plain_attention_over_what_the_row_has_seen(head_norms: bool) -> None:
    """Logits, the report and its gradients; the shares of the steps add up to one."""
    student, lesson = make(head_norms=head_norms)
    unrolled.learn(student, lesson, 6)
    shares = [1 / 1.96, 0.6 / 1.96, 0.36 / 1.96]
    unrolled.same_as_plain(student, lesson, shares)


@pytest.mark.parametrize("target", ["llama", "llama3-rope", "gemma3"])
def test_the_engine_drafts_what_was_trained(target: str, tmp_path: Path) -> None:
    student, lesson = make(target, head_norms=target == "llama", mlp_width=40)
    model = unrolled.model(target)
    head = open_head(str(unrolled.write(student.exported(), tmp_path)), model.config, "mtp")
    assert head.shape.layout == "Qwen" and head.shape.modules == 1 and not head.shape.offset_norms
    taps = choose_taps(head, model)
    network = EagleHead(head.module(0), model, unrolled.pages(head), unrolled.POSITIONS)
    found, wanted = unrolled.logits_of(student, lesson), unrolled.draft_by_engine(network, lesson, taps, 3)
    assert len(wanted) > 50
    for (row, at, step), logits in wanted.items():
        assert unrolled.close(found[step, row, at], logits), (row, at, step)


def test_only_the_module_learns_and_only_it_is_written() -> None:
    target = unrolled.model()
    subject = unrolled.subject(target)
    student = MtpStudent(subject, Options(rows=7), unrolled.POSITIONS)
    losses = unrolled.learn(student, unrolled.teach(target, unrolled.pack(), ()), 25)
    assert losses[-1] < 0.4 * losses[0]
    assert torch.equal(student.head, tiny.original("llama").lm_head.weight)
    names = set(student.exported().tensors)
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
def test_refusals(variant: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MtpStudent(unrolled.subject(unrolled.model()), Options(**variant), unrolled.POSITIONS)
