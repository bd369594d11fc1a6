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
from outrider.train.heads.base import StepResult
from outrider.train.heads.draft_model import DraftModelHead, Options, projected_embedding
from outrider.train.target import TargetOutputs
from outrider.weights import open_checkpoint

TARGETS = ["llama", "llama3-rope"]


def options(**variant: Any) -> Options:
    small = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_width": 48, "share": 1.0, "rows": 7}
    return Options(**{**small, **variant})


def make(name: str = "llama", stirred: bool = True, **variant: Any) -> tuple[DraftModelHead, TargetOutputs]:
    target = unrolled.model(name)
    draft_head = DraftModelHead(unrolled.target_info(target, name), options(**variant), unrolled.POSITIONS)
    if stirred:
        unrolled.stir(draft_head)
    return draft_head, unrolled.forward(target, unrolled.pack(), draft_head.aux_layers)


def original(draft_head: DraftModelHead) -> Any:
    """The student in transformers."""
    export = draft_head.export()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**export.config))
    missing, strange = model.load_state_dict(export.tensors, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not strange
    model.tie_weights()
    return model


def drafts_per_block(outputs: TargetOutputs) -> list[tuple[unrolled.Document, int]]:
    """Documents and places of theirs before an answered token."""
    return [
        (where, at)
        for where in unrolled.documents(outputs.pack)
        for at in range(where.end - where.begin - 1)
        if where.of(outputs.pack.answered)[at + 1]
    ]


def plainly(model: Any, outputs: TargetOutputs) -> tuple[Tensor, list[float]]:
    """Compute one document and one position at a time: the mean loss; drafted, correct, overlap."""
    losses, correct, overlap = [], 0, 0.0
    apart = {where: model(where.of(outputs.pack.tokens)[None]).logits[0] for where in unrolled.documents(outputs.pack)}
    for where, at in drafts_per_block(outputs):
        draft_ids = apart[where][at].log_softmax(-1)
        wanted = where.of(outputs.logits)[at].log_softmax(-1)
        losses.append((wanted.exp() * (wanted - draft_ids)).sum())
        correct += int(draft_ids.argmax() == wanted.argmax())
        overlap += float(torch.minimum(draft_ids.detach().exp(), wanted.exp()).sum())
    return torch.stack(losses).mean(), [len(losses), correct, overlap]


def figures(report: StepResult) -> list[float]:
    return [float(each) for each in (report.counted, report.correct, report.overlap)]


@pytest.mark.parametrize("name", TARGETS)
def test_losses_and_gradients_are_those_of_transformers(name: str) -> None:
    draft_head, outputs = make(name)
    unrolled.learn(draft_head, outputs, 10)
    model = original(draft_head)
    wanted, counted = plainly(model, outputs)
    wanted.backward()
    draft_head.zero_grad()
    report = draft_head(outputs)
    report.loss.backward()
    assert unrolled.close(report.loss.detach(), wanted.detach())
    assert figures(report) == pytest.approx(counted, rel=1e-5)
    assert 0 < report.correct < report.counted
    theirs = {key: each.grad for key, each in model.named_parameters()}
    for key, parameter in draft_head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-4, key
        assert unrolled.close(parameter.grad, theirs[f"model.{key}"], 2e-5), key


@pytest.mark.parametrize("name", TARGETS)
def test_the_engine_reads_what_was_exported(name: str, tmp_path: Path) -> None:
    draft_head, outputs = make(name)
    folder, export = tiny.copy(name, tmp_path / "draft"), draft_head.export()
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    (folder / "config.json").write_text(json.dumps(export.config))
    save_file(export.tensors, folder / "model.safetensors")
    drafter = build(open_checkpoint(folder), kernels.load("cpu"))
    with torch.no_grad():
        logits = draft_head.logits(outputs.pack)
    assert logits.std() > 0.3  # else the tolerance would mean nothing
    for where in unrolled.documents(outputs.pack):
        found, _ = tiny.run(drafter, where.of(outputs.pack.tokens).tolist(), 5)
        assert unrolled.close(where.of(logits), found)
    assert drafter.config.end_tokens == (2,)
    assert drafter.config.context == draft_head.target_info.config.context


@pytest.mark.parametrize("loss", ["kl", "lk_hybrid"])
def test_training_lowers_the_loss(loss: str) -> None:
    draft_head, outputs = make(stirred=False, loss=loss, rows=100)
    before = figures(draft_head(outputs))
    losses = unrolled.learn(draft_head, outputs, 40)
    after = figures(draft_head(outputs))
    assert losses[-1] < 0.5 * losses[0]
    assert after[1] > before[1] and after[2] > before[2] + 0.2 * before[0]


def test_sampled_positions_give_the_loss_of_all() -> None:
    draft_head, outputs = make(share=0.25)
    where, counted = draft_head.sample_positions(outputs.pack)
    flat = {(each.row * unrolled.LONGEST + each.begin + at) for each, at in drafts_per_block(outputs)}
    assert len(where) == 10 and len(set(where.tolist())) == 10 and counted.all()
    assert set(where.tolist()) < flat
    torch.manual_seed(5)
    drawn, _ = draft_head.sample_positions(outputs.pack)
    answered = torch.zeros_like(outputs.pack.answered).flatten()
    answered[drawn + 1] = True
    only = replace(outputs, pack=replace(outputs.pack, answered=answered.view_as(outputs.pack.answered)))
    wanted, sums = plainly(original(draft_head), only)
    torch.manual_seed(5)
    report = draft_head(outputs)
    assert unrolled.close(report.loss.detach(), wanted.detach())
    assert figures(report) == pytest.approx(sums, rel=1e-5)


def test_positions_are_sampled_each_step_by_seed() -> None:
    draft_head, outputs = make(share=0.25)
    torch.manual_seed(3)
    drawn = [draft_head.sample_positions(outputs.pack)[0].tolist() for _ in range(2)]
    assert drawn[0] != drawn[1]
    torch.manual_seed(3)
    assert [draft_head.sample_positions(outputs.pack)[0].tolist() for _ in range(2)] == drawn


def test_a_pack_without_answers_has_no_gradient() -> None:
    draft_head, outputs = make()
    silent = replace(outputs, pack=replace(outputs.pack, answered=torch.zeros_like(outputs.pack.answered)))
    report = draft_head(silent)
    report.loss.backward()
    assert figures(report) == [0, 0, 0] and report.loss.item() == 0
    assert all(each.grad is None or not each.grad.any() for each in draft_head.parameters())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where a CPU has no bf16
def test_autocast_stays_close() -> None:
    draft_head, outputs = make()
    exact = draft_head(outputs)
    with torch.autocast("cpu", torch.bfloat16):
        report = draft_head(outputs)
    assert report.loss.item() != exact.loss.item()
    assert report.loss.item() == pytest.approx(exact.loss.item(), rel=0.03)
    report.loss.backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in draft_head.parameters())


def test_embeddings_start_as_a_projection_of_the_targets() -> None:
    """Words that mostly differ in 5 directions keep their distances in 6; one more than the target's are filled."""
    target_info = unrolled.target_info(unrolled.model())
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(tiny.VOCABULARY, 5, generator=generator) @ torch.randn(5, 64, generator=generator) + 3
    target_info = replace(target_info, embedding=flat)
    found = projected_embedding(target_info, options(width=6, heads=1, kv_heads=1, spread=0.5))
    assert found.shape == (tiny.VOCABULARY, 6)
    assert float(found.square().mean().sqrt()) == pytest.approx(0.5)
    distances, wanted = torch.cdist(found, found), torch.cdist(flat, flat)
    scale = float(distances.sum() / wanted.sum())
    assert (distances - scale * wanted).abs().max() < 1e-2 * distances.max()
    wide = projected_embedding(target_info, options(width=80))
    assert wide.shape == (tiny.VOCABULARY, 80) and wide[:, 64:].std() > 0.01
    assert torch.equal(wide, projected_embedding(target_info, options(width=80)))


@pytest.mark.parametrize(
    ("wrong", "culprit"),
    [
        ({"width": 30}, "`width` is 30 and `heads` is 4"),
        ({"kv_heads": 3}, "`kv_heads` is 3"),
        ({"layers": 0}, "`layers` is 0"),
        ({"share": 0.0}, "`share` is 0.0"),
        ({"share": 1.5}, "`share` is 1.5"),
        ({"spread": 0.0}, "`spread` is 0.0"),
    ],
)
def test_invalid_options_are_refused(wrong: dict[str, Any], culprit: str) -> None:
    with pytest.raises(UserError, match=culprit):
        make(**wrong)
