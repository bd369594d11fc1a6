"""Medusa heads in training: all at once they equal one by one, and the engine's heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sample_targets
import torch
from torch import Tensor
from torch.nn.functional import silu

import tiny
from outrider.kernels import load
from outrider.models import build
from outrider.models.heads import MedusaHeads
from outrider.speculation.checkpoints import choose_aux_layers, open_head
from outrider.train.heads.medusa import MedusaDraftHead, Options
from outrider.train.losses import loss_by_row
from outrider.train.target import TargetOutputs
from refusals import refusal

PLANS: dict[str, Options] = {
    "plain": Options(share=0.5),
    "three heads of two blocks": Options(heads=3, blocks=2, share=0.3, decay=0.5),
    "some tokens": Options(draft_vocabulary=60),
    "every place": Options(share=1.0, loss="ce"),
}


def draft_head(options: Options, target: str = "llama", noise: float = 0.1) -> MedusaDraftHead:
    made = MedusaDraftHead(sample_targets.target_info(target), options, 30)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return made


def plainly(learner: MedusaDraftHead, state: Tensor, head: int) -> Tensor:
    """The logits of one head for one state [H]: [U]."""
    weights = dict(learner.named_parameters())
    for layer in range(learner.options.blocks):
        prefix = f"blocks.{head}.layers.{layer}."
        state = state + silu(weights[prefix + "weight"] @ state + weights[prefix + "bias"])
    ids, matrix = learner.vocab.ids, learner.target_info.lm_head
    return (matrix if ids is None else matrix[ids]) @ state


def report(learner: MedusaDraftHead, outputs: TargetOutputs) -> tuple[Tensor, list[int], list[int], list[float]]:
    """Return the loss, and by head the drafted, correct and overlap sums: one token at a time."""
    heads, pack, ids = learner.options.heads, outputs.pack, learner.vocab.ids
    length = pack.tokens.shape[1]
    counted, correct, overlap = [0] * heads, [0] * heads, [0.0] * heads
    losses, weights = [], []
    for index in learner.sample_positions(pack)[0].tolist():
        row, at = divmod(index, length)
        for head in range(heads):
            drafted = at + head + 2
            if drafted >= length or pack.documents[row, drafted] != pack.documents[row, at]:
                break
            if not pack.answered[row, drafted]:
                break
            logits, wanted = plainly(learner, outputs.last_state[row, at], head), outputs.logits[row, drafted - 1]
            losses.append(
                loss_by_row(learner.options.loss, logits[None], (wanted if ids is None else wanted[ids])[None])[0]
            )
            weights.append(learner.options.decay**head)
            q = torch.zeros_like(wanted)
            q[slice(None) if ids is None else ids] = logits.detach().softmax(-1)
            counted[head] += 1
            correct[head] += int(q.argmax() == wanted.argmax())
            overlap[head] += float(torch.minimum(q, wanted.softmax(-1)).sum())
    return (torch.stack(losses) * torch.tensor(weights)).sum() / sum(weights), counted, correct, overlap


@pytest.mark.parametrize("name", PLANS)
def test_loss_and_gradients_equal_those_of_single_tokens(name: str) -> None:
    learner, outputs = draft_head(PLANS[name]), sample_targets.outputs(sample_targets.pack(), ())
    torch.manual_seed(4)
    found = learner(outputs)
    found.loss.backward()
    gradients = {name: parameter.grad for name, parameter in learner.named_parameters()}
    learner.zero_grad()
    torch.manual_seed(4)
    loss, counted, correct, overlap = report(learner, outputs)
    loss.backward()
    assert min(counted) > 3
    torch.testing.assert_close(found.loss, loss, rtol=1e-5, atol=1e-5)
    assert found.counted.tolist() == counted and found.correct.tolist() == correct
    torch.testing.assert_close(found.overlap, torch.tensor(overlap), rtol=1e-4, atol=1e-4)
    for part, parameter in learner.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), part
        torch.testing.assert_close(gradients[part], parameter.grad, rtol=2e-3, atol=2e-6, msg=part)


@pytest.mark.parametrize("target", ["llama", "gemma3"])
@pytest.mark.parametrize("name", PLANS)
def test_the_engine_computes_the_same_logits(name: str, target: str, tmp_path: Path) -> None:
    learner, outputs = draft_head(PLANS[name], target), sample_targets.outputs(sample_targets.pack(), (), target)
    model = build(tiny.checkpoint(target), load("cpu"))
    head = open_head(sample_targets.write(learner.export(), tmp_path), model.config, learner.method)
    layers = model.config.layers
    assert choose_aux_layers(head, model) == (layers,) and not head.shape.own_head
    text = outputs.pack.tokens[1, :20].tolist()
    hidden = tiny.run(model, text, 20, (layers,))[1][0]  # [T, E]
    heads = learner.options.heads
    found = torch.stack(list(MedusaHeads(head, model).logits(hidden, heads)), 1)  # [T, K, V]
    expected = learner.states(outputs.last_state[1, :20]) @ learner.matrix.T  # [T, K, U]
    ids = slice(None) if learner.vocab.ids is None else learner.vocab.ids
    torch.testing.assert_close(found[..., ids], expected.detach(), rtol=1e-4, atol=1e-4)
    assert int(found.isfinite().sum()) == 20 * heads * learner.vocab.size


def test_positions_are_sampled_where_the_next_token_is_answered() -> None:
    learner, pack = draft_head(Options(share=0.2)), sample_targets.pack()
    documents, answered = pack.documents.tolist(), pack.answered.tolist()
    fit = {
        row * 30 + at
        for row in range(3)
        for at in range(28)
        if answered[row][at + 2] and documents[row][at + 2] == documents[row][at]
    }
    seen: set[int] = set()
    for _ in range(40):
        at, counted = learner.sample_positions(pack)
        assert len(set(at.tolist())) == len(at) == 18 and bool(counted[:, 0].all())
        seen |= set(at.tolist())
    assert seen == fit
    at, counted = draft_head(Options(share=1.0)).sample_positions(pack)
    assert (
        len(at) == 90 and {index for index, one in zip(at.tolist(), counted[:, 0].tolist(), strict=True) if one} == fit
    )
    assert not counted[~counted[:, 0]].any()


def test_training_starts_from_the_target_and_lowers_the_loss() -> None:
    learner, outputs = draft_head(Options(share=1.0), noise=0.0), sample_targets.outputs(sample_targets.pack(), ())
    states = outputs.last_state.flatten(0, 1)
    assert torch.equal(learner.states(states)[:, 2], states)
    shares = sample_targets.learn(learner, outputs, 40)
    assert shares[0] < 0.5 and shares[-1] > 0.55


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # some processors have no such products
def test_half_precision_stays_close_to_fp32() -> None:
    learner, outputs = draft_head(PLANS["some tokens"]), sample_targets.outputs(sample_targets.pack(), ())
    sample_targets.check_half_precision(learner, outputs)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (Options(heads=0), "`heads` is 0"),
        (Options(blocks=0), "`blocks` is 0"),
        (Options(share=0.0), "`share` is 0.0"),
        (Options(share=1.1), "`share` is 1.1"),
        (Options(decay=0.0), "`decay` is 0.0"),
        (replace(Options(), draft_vocabulary=102), "`draft_vocabulary` is 102"),
    ],
)
def test_invalid_options_are_refused(options: Options, culprit: str) -> None:
    assert culprit in refusal(lambda: MedusaDraftHead(sample_targets.target_info(), options, 30))
