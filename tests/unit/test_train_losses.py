"""Losses by row against a published vector; the chunked score against plain autograd."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from outrider.train import losses
from outrider.train.losses import LOSSES, Loss, block_weights, depth_weights, dpace, loss_by_row, score

KINDS: tuple[Loss, ...] = get_args(Loss)
VECTOR = {"kl": 0.5987, "rkl": 0.6087, "jsd": 0.1286, "ce": 2.3309, "tv": 0.3944, "nla": 0.5159, "lk_hybrid": 0.4391}
R, U = 13, 11


def example(dtype: torch.dtype = torch.float32, count: int = R) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Two parts of different widths, the target's logits, and weights of which some are 0."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    parts = [(draw(count, size).requires_grad_(), draw(U, size).requires_grad_()) for size in (6, 3)]
    weights = torch.rand(count, generator=generator, dtype=dtype)
    weights[::4] = 0
    return parts, 2 * draw(count, U), weights


def plain(parts: list[tuple[Tensor, Tensor]], wanted: Tensor, weights: Tensor, kind: Loss) -> tuple[Tensor, Tensor]:
    """The loss and the draft's logits, all rows at once."""
    logits = sum((states @ matrix.t() for states, matrix in parts), torch.zeros(()))
    return (loss_by_row(kind, logits, wanted) * weights).sum(), logits.detach()


def gradients(loss: Tensor, parts: list[tuple[Tensor, Tensor]]) -> list[Tensor | None]:
    flat = [each for part in parts for each in part]
    found = iter(torch.autograd.grad(3 * loss, [each for each in flat if each.requires_grad]))
    return [next(found) if each.requires_grad else None for each in flat]


def test_every_loss_gives_the_published_vector() -> None:
    torch.manual_seed(0)
    draft_logits, wanted = torch.randn(1, 5, 11)[0], torch.randn(1, 5, 11)[0]
    assert set(LOSSES) == set(KINDS) == set(VECTOR)
    for kind in KINDS:
        assert loss_by_row(kind, draft_logits, wanted).mean().item() == pytest.approx(VECTOR[kind], abs=1e-4), kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [4, 13, 100])
def test_score_equals_plain_autograd(kind: Loss, rows: int) -> None:
    parts, wanted, weights = example()
    loss, logits = plain(parts, wanted, weights, kind)
    found = score(parts, wanted, weights, kind, rows=rows)
    torch.testing.assert_close(found.loss, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(found.loss, parts), gradients(loss, parts), rtol=1e-5, atol=2e-6)
    assert torch.equal(found.argmax, logits.argmax(-1))
    shared = torch.minimum(logits.softmax(-1), wanted.softmax(-1)).sum(-1)
    torch.testing.assert_close(found.overlap, shared, rtol=1e-5, atol=1e-6)


def test_target_rows_select_rows_of_the_target_logits() -> None:
    parts, wanted, weights = example()
    target_rows = torch.randperm(len(wanted), generator=torch.Generator().manual_seed(4)).repeat(2)[: len(wanted)]
    kept = torch.cat([wanted[target_rows], wanted])
    for kind in KINDS:
        picked = score(parts, wanted, weights, kind, rows=5, target_rows=target_rows)
        plainly = score(parts, kept[: len(wanted)], weights, kind, rows=5)
        assert torch.equal(picked.loss, plainly.loss) and torch.equal(picked.overlap, plainly.overlap)


@pytest.mark.parametrize("kind", ["kl", "ce", "tv"])
@pytest.mark.parametrize("frozen", [(0, 1), (1, 1), (0, 0), (1, 0)])
def test_frozen_factors_get_no_gradient_and_leave_the_others_unchanged(kind: Loss, frozen: tuple[int, int]) -> None:
    parts, wanted, weights = example()
    part, side = frozen
    parts[part][side].requires_grad_(False)
    loss, _ = plain(parts, wanted, weights, kind)
    found = gradients(score(parts, wanted, weights, kind, rows=5).loss, parts)
    assert found[2 * part + side] is None
    torch.testing.assert_close(found, gradients(loss, parts), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("learning", [(), (0,), (1, 2), (0, 1, 2, 3)])
def test_matmuls_run_only_for_trained_factors(learning: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    parts, wanted, weights = example()
    for at, each in enumerate(each for part in parts for each in part):
        each.requires_grad_(at in learning)
    made, product = [], losses._matmul
    monkeypatch.setattr(losses, "_matmul", lambda *given: made.append(1) or product(*given))
    score(parts, wanted, weights, rows=R)
    assert len(made) == 1 + len(learning)


def test_without_gradients_there_is_only_the_loss() -> None:
    parts, wanted, weights = example()
    for kind in KINDS:
        loss, _ = plain(parts, wanted, weights, kind)
        with torch.no_grad():
            found = score(parts, wanted, weights, kind, rows=5)
        assert not found.loss.requires_grad
        torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lk_hybrid"])  # its alpha has no gradient
def test_numeric_differences_agree(kind: Loss) -> None:
    parts, wanted, weights = example(torch.float64, 5)
    flat = [each for part in parts for each in part]

    def loss(*given: Tensor) -> Tensor:
        return score([(given[0], given[1]), (given[2], given[3])], wanted, weights, kind, rows=2).loss

    assert torch.autograd.gradcheck(loss, flat, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_nearly_disjoint_distributions_are_exact(kind: Loss) -> None:
    """As exact in fp32 as in fp64, though the sum of min(p, q) is too small to be one less something."""
    states = 30 * torch.eye(3, U).requires_grad_()
    wanted, matrix, weights = 25 * torch.eye(3, U).roll(1, -1), torch.eye(U), torch.ones(3)
    exact = states.detach().double().requires_grad_()
    loss, _ = plain([(exact, matrix.double())], wanted.double(), weights.double(), kind)
    found = score([(states, matrix)], wanted, weights, kind).loss
    assert found.item() == pytest.approx(loss.item(), rel=1e-4)
    torch.testing.assert_close(
        torch.autograd.grad(found, states)[0].double(), torch.autograd.grad(loss, exact)[0], rtol=1e-3, atol=1e-9
    )


def test_rows_of_weight_zero_have_no_gradient() -> None:
    parts, wanted, weights = example()
    for kind in KINDS:
        score(parts, wanted, weights, kind, rows=5).loss.backward()
        (states, _), _ = parts
        assert states.grad is not None
        assert torch.equal(states.grad.abs().sum(-1) == 0, weights == 0), kind
        states.grad = None


def test_zero_rows_give_zero_loss() -> None:
    for kind in KINDS:
        parts, wanted, weights = example(count=0)
        found = score(parts, wanted, weights, kind)
        found.loss.backward()
        assert found.loss.item() == 0 and found.argmax.shape == found.overlap.shape == (0,)
        matrix = parts[0][1]
        assert matrix.grad is not None and not matrix.grad.any()


@pytest.mark.parametrize("kind", ["kl", "ce", "jsd"])
def test_overlap_counts_tokens_outside_the_draft_vocabulary(kind: Loss) -> None:
    parts, everything, weights = example()
    kept = torch.tensor([0, 2, 3, 7, 8, 10])
    fewer = [(states, matrix.detach()[kept]) for states, matrix in parts]
    wanted, whole = everything[:, kept], everything.logsumexp(-1)
    found = score(fewer, wanted, weights, kind, whole, rows=5)
    loss, logits = plain(fewer, wanted, weights, kind)
    spread = torch.zeros(R, U).index_copy_(1, kept, logits.softmax(-1))
    shared = torch.minimum(spread, everything.softmax(-1)).sum(-1)
    torch.testing.assert_close(found.overlap, shared, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.loss, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(found.loss, fewer), gradients(loss, fewer), rtol=1e-5, atol=2e-6)
    without = score(fewer, wanted, weights, kind, rows=5).overlap
    torch.testing.assert_close(without, torch.minimum(logits.softmax(-1), wanted.softmax(-1)).sum(-1))
    assert (found.overlap < without).all()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_multiplies_in_bf16_and_stays_close(kind: Loss) -> None:
    parts, wanted, weights = example()
    loss, _ = plain(parts, wanted, weights, kind)
    right = gradients(loss, parts)
    with torch.autocast("cpu", torch.bfloat16):
        found = score(parts, wanted, weights, kind, rows=5)
    assert found.loss.dtype == found.overlap.dtype == torch.float32
    assert found.loss.item() != loss.item()
    assert found.loss.item() == pytest.approx(loss.item(), rel=0.02)
    for mine, theirs in zip(gradients(found.loss, parts), right, strict=True):
        assert mine is not None and theirs is not None and mine.dtype == torch.float32
        assert (mine - theirs).norm() < 0.03 * theirs.norm()


def test_states_in_bf16_get_gradients_in_bf16() -> None:
    parts, wanted, weights = example()
    states, matrix = parts[0][0].detach().bfloat16().requires_grad_(), parts[0][1]
    with torch.autocast("cpu", torch.bfloat16):
        score([(states, matrix)], wanted, weights).loss.backward()
    assert states.grad is not None and states.grad.dtype == torch.bfloat16
    assert matrix.grad is not None and matrix.grad.dtype == torch.float32


def test_loss_weights_decay_by_depth() -> None:
    assert depth_weights(3, 0.5).tolist() == [1, 0.5, 0.25]
    torch.testing.assert_close(block_weights(3, 4), torch.tensor([0, -0.25, -0.5]).exp())


def test_dpace_sums_the_reach_of_later_positions() -> None:
    acceptance = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found, acceptance = dpace(acceptance, 0.3), acceptance.detach()
    assert not found.requires_grad
    for row in range(4):
        for depth in range(5):
            slow = sum(float((0.7 * acceptance[row, : last + 1] + 0.3).prod()) for last in range(depth, 5))
            assert found[row, depth].item() == pytest.approx(slow, rel=1e-5)
