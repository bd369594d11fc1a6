"""A draft model in training is a Llama: it has the gradients of transformers', and exported it is the engine's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import unrolled
from safetensors.torch import save_file
from torch import Tensor

import tiny
from outrider import kernels
from outrider.errors import UserError
from outrider.models import build
from outrider.train.heads.base import Report
from outrider.train.heads.draft_model import DraftModelStudent, Options, words_of
from outrider.train.target import Lesson
from outrider.weights import open_checkpoint

TARGETS = ["llama", "llama3-rope"]


def options(**variant: Any) -> Options:
    small = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_width": 48, "share": 1.0, "rows": 7}
    return Options(**{**small, **variant})


def make(name: str = "llama", stirred: bool = True, **variant: Any) -> tuple[DraftModelStudent, Lesson]:
    target = unrolled.model(name)
    student = DraftModelStudent(unrolled.subject(target, name), options(**variant), unrolled.POSITIONS)
    if stirred:
        unrolled.stir(student)
    return student, unrolled.teach(target, unrolled.pack(), student.taps)


def original(student: DraftModelStudent) -> Any:
    """The student in transformers."""
    exported = student.exported()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**exported.config))
    missing, strange = model.load_state_dict(exported.tensors, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not strange
    model.tie_weights()
    return model


def guesses(lesson: Lesson) -> list[tuple[unrolled.Document, int]]:
    """Documents and places of theirs before an answered token."""
    return [
        (where, at)
        for where in unrolled.documents(lesson.pack)
        for at in range(where.end - where.begin - 1)
        if where.of(lesson.pack.answered)[at + 1]
    ]


def plainly(model: Any, lesson: Lesson) -> tuple[Tensor, list[float]]:
    """One document and one place at a time: the mean of the losses; guesses, right ones, overlap."""
    losses, correct, overlap = [], 0, 0.0
    apart = {where: model(where.of(lesson.pack.tokens)[None]).logits[0] for where in unrolled.documents(lesson.pack)}
    for where, at in guesses(lesson):
        drafted = apart[where][at].log_softmax(-1)
        wanted = where.of(lesson.logits)[at].log_softmax(-1)
        losses.append((wanted.exp() * (wanted - drafted)).sum())
        correct += int(drafted.argmax() == wanted.argmax())
        overlap += float(torch.minimum(drafted.detach().exp(), wanted.exp()).sum())
    return torch.stack(losses).mean(), [len(losses), correct, overlap]


def figures(report: Report) -> list[float]:
    return [float(each) for each in (report.counted, report.correct, report.overlap)]


@pytest.mark.parametrize("name", TARGETS)
def test_losses_and_gradients_are_those_of_transformers(name: str) -> None:
    student, lesson = make(name)
    unrolled.learn(student, lesson, 10)
    model = original(student)
    wanted, counted = plainly(model, lesson)
    wanted.backward()
    student.zero_grad()
    report = student(lesson)
    report.loss.backward()
    assert unrolled.close(report.loss.detach(), wanted.detach())
    assert figures(report) == pytest.approx(counted, rel=1e-5)
    assert 0 < report.correct < report.counted
    theirs = {key: each.grad for key, each in model.named_parameters()}
    for key, parameter in student.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-4, key
        assert unrolled.close(parameter.grad, theirs[f"model.{key}"], 2e-5), key


@pytest.mark.parametrize("name", TARGETS)
def test_the_engine_reads_what_was_exported(name: str, tmp_path: Path) -> None:
    student, lesson = make(name)
    folder, exported = tiny.copy(name, tmp_path / "draft"), student.exported()
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    (folder / "config.json").write_text(json.dumps(exported.config))
    save_file(exported.tensors, folder / "model.safetensors")
    drafter = build(open_checkpoint(folder), kernels.load("cpu"))
    with torch.no_grad():
        logits = student.logits(lesson.pack)
    assert logits.std() > 0.3  # else the tolerance would mean nothing
    for where in unrolled.documents(lesson.pack):
        found, _ = tiny.run(drafter, where.of(lesson.pack.tokens).tolist(), 5)
        assert unrolled.close(where.of(logits), found)
    assert drafter.config.end_tokens == (2,)
    assert drafter.config.context == student.subject.config.context


@pytest.mark.parametrize("loss", ["kl", "lk_hybrid"])
def test_it_learns(loss: str) -> None:
    student, lesson = make(stirred=False, loss=loss, rows=100)
    before = figures(student(lesson))
    losses = unrolled.learn(student, lesson, 40)
    after = figures(student(lesson))
    assert losses[-1] < 0.5 * losses[0]
    assert after[1] > before[1] and after[2] > before[2] + 0.2 * before[0]


def test_a_share_of_the_places_teaches_as_if_it_were_all() -> None:
    student, lesson = make(share=0.25)
    where, counted = student.sample_positions(lesson.pack)
    flat = {(each.row * unrolled.LONGEST + each.begin + at) for each, at in guesses(lesson)}
    assert len(where) == 10 and len(set(where.tolist())) == 10 and counted.all()
    assert set(where.tolist()) < flat
    torch.manual_seed(5)
    drawn, _ = student.sample_positions(lesson.pack)
    answered = torch.zeros_like(lesson.pack.answered).flatten()
    answered[drawn + 1] = True
    only = replace(lesson, pack=replace(lesson.pack, answered=answered.view_as(lesson.pack.answered)))
    wanted, sums = plainly(original(student), only)
    torch.manual_seed(5)
    report = student(lesson)
    assert unrolled.close(report.loss.detach(), wanted.detach())
    assert figures(report) == pytest.approx(sums, rel=1e-5)


def test_places_are_drawn_anew_each_step_and_alike_by_the_seed() -> None:
    student, lesson = make(share=0.25)
    torch.manual_seed(3)
    drawn = [student.sample_positions(lesson.pack)[0].tolist() for _ in range(2)]
    assert drawn[0] != drawn[1]
    torch.manual_seed(3)
    assert [student.sample_positions(lesson.pack)[0].tolist() for _ in range(2)] == drawn


def test_where_nothing_was_answered_nothing_is_learnt() -> None:
    student, lesson = make()
    silent = replace(lesson, pack=replace(lesson.pack, answered=torch.zeros_like(lesson.pack.answered)))
    report = student(silent)
    report.loss.backward()
    assert figures(report) == [0, 0, 0] and report.loss.item() == 0
    assert all(each.grad is None or not each.grad.any() for each in student.parameters())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where a CPU has no bf16
def test_autocast_stays_close() -> None:
    student, lesson = make()
    exact = student(lesson)
    with torch.autocast("cpu", torch.bfloat16):
        report = student(lesson)
    assert report.loss.item() != exact.loss.item()
    assert report.loss.item() == pytest.approx(exact.loss.item(), rel=0.03)
    report.loss.backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in student.parameters())


def test_words_begin_as_the_targets_do_in_fewer_dimensions() -> None:
    """Words that mostly differ in 5 directions keep their distances in 6; one more than the target's are filled."""
    subject = unrolled.subject(unrolled.model())
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(tiny.VOCABULARY, 5, generator=generator) @ torch.randn(5, 64, generator=generator) + 3
    subject = replace(subject, embedding=flat)
    found = words_of(subject, options(width=6, heads=1, kv_heads=1, spread=0.5))
    assert found.shape == (tiny.VOCABULARY, 6)
    assert float(found.square().mean().sqrt()) == pytest.approx(0.5)
    distances, wanted = torch.cdist(found, found), torch.cdist(flat, flat)
    scale = float(distances.sum() / wanted.sum())
    assert (distances - scale * wanted).abs().max() < 1e-2 * distances.max()
    wide = words_of(subject, options(width=80))
    assert wide.shape == (tiny.VOCABULARY, 80) and wide[:, 64:].std() > 0.01
    assert torch.equal(wide, words_of(subject, options(width=80)))


@pytest.mark.parametrize(
    ("wrong", "culprit"),
    [
        ({"width": 30}, "`width` is 30 and `heads` 4"),
        ({"kv_heads": 3}, "`kv_heads` 3"),
        ({"layers": 0}, "`layers` is 0"),
        ({"share": 0.0}, "`share` is 0.0"),
        ({"share": 1.5}, "`share` is 1.5"),
        ({"spread": 0.0}, "`spread` is 0.0"),
    ],
)
def test_refusals(wrong: dict[str, Any], culprit: str) -> None:
    with pytest.raises(UserError, match=culprit):
        make(**wrong)
