"""Losses on CUDA: values as `losses.loss_by_row` defines them, gradients as autograd finds them in float64."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, inf, nan

from outrider.kernels.cuda.device import DEVICE
from outrider.train import losses
from outrider.train.losses import Loss, loss_by_row, score

distillation = import_module("outrider.kernels.cuda.distill")
KINDS: tuple[Loss, ...] = tuple(kind for kind in get_args(Loss) if kind in distillation.KINDS)
BLOCK = 64


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    """So that a row has several."""
    monkeypatch.setattr(distillation, "BLOCK", BLOCK)
    monkeypatch.setattr(distillation, "WARPS", 2)


def draw(*shape: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(
    kind: str, logits: Tensor, wanted: Tensor, whole: Tensor | None = None, dtype: torch.dtype | None = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Losses, best, overlap and gradient (none without a `dtype`), all on the host."""
    gradient = None if dtype is None else torch.full(logits.shape, nan, dtype=dtype, device=DEVICE)
    parts = None if whole is None else whole.to(DEVICE)
    found = distillation.distill(kind, logits.to(DEVICE), wanted.to(DEVICE), parts, gradient)
    assert [each.dtype for each in found] == [torch.float32, torch.int64, torch.float32]
    rows, best, overlap = (each.cpu() for each in found)
    return rows, best, overlap, None if gradient is None else gradient.cpu()


def check(kind: Loss, logits: Tensor, wanted: Tensor, whole: Tensor | None = None, atol: float = 2e-6) -> None:
    leaf = logits.double().requires_grad_()
    right = loss_by_row(kind, leaf, wanted.double())
    (by_logits,) = torch.autograd.grad(right.sum(), leaf)
    everything = wanted.double().logsumexp(-1) if whole is None else whole.double()
    p = (wanted.double() - everything[:, None]).exp()
    found, best, overlap, gradient = run(kind, logits, wanted, whole)
    torch.testing.assert_close(found.double(), right.detach(), rtol=1e-5, atol=atol)
    torch.testing.assert_close(gradient, by_logits.float(), rtol=1e-4, atol=atol)
    torch.testing.assert_close(
        overlap.double(), torch.minimum(p, logits.double().softmax(-1)).sum(-1), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(best, logits.argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, BLOCK, 4 * BLOCK - 3])
@pytest.mark.parametrize("share", [None, 0.4])
def test_rows_of_any_length(kind: Loss, size: int, share: float | None) -> None:
    logits, wanted = draw(3, size), draw(3, size, seed=1) + torch.tensor([[0.0], [30.0], [-500.0]])
    check(kind, logits, wanted, None if share is None else wanted.logsumexp(-1) - torch.tensor(share).log())


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_the_size_that_trains(kind: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "BLOCK", 4096)
    check(kind, draw(2, 9001), draw(2, 9001, seed=1))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_rise_and_fall(kind: Loss) -> None:
    """Every step of the running sum is up in one row and down in the other, by more than fp32 can hold."""
    ramp = torch.linspace(-300, 300, 3 * BLOCK)
    check(kind, torch.stack((ramp, ramp.flip(0), ramp)), torch.stack((ramp.flip(0) / 50, ramp / 50, ramp)), atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_logits_the_first_is_best(kind: Loss) -> None:
    """In one lane (a block apart), in two lanes, and everywhere. Of the target's too: they are the labels of `ce`."""
    logits, wanted = draw(4, 3 * BLOCK).clamp_max(5), draw(4, 3 * BLOCK, seed=1).clamp_max(5)
    for row, indices in enumerate(((9, 9 + BLOCK), (70, 3 + BLOCK, 2 * BLOCK + 1), (2 * BLOCK + 9, 2 * BLOCK + 8))):
        logits[row, list(indices)] = 20
        wanted[row, [index + 1 for index in indices]] = 20
    logits[3], wanted[3] = 0.25, 1.5
    check(kind, logits, wanted)
    assert run(kind, logits, wanted)[1].tolist() == [9, 67, 2 * BLOCK + 8, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_distributions_have_no_gradient(kind: Loss) -> None:
    same = draw(3, 2 * BLOCK + 5)
    found, _, overlap, gradient = run(kind, same, same.clone())
    torch.testing.assert_close(overlap, torch.ones(3))
    if kind != "ce":
        torch.testing.assert_close(found, torch.zeros(3), rtol=0, atol=2e-6)
        limit = 1e-9 if torch.device(DEVICE).type == "cpu" else 1e-8  # probabilities round differently on a GPU
        assert gradient is not None and gradient.abs().max() < limit


@pytest.mark.parametrize("kind", KINDS)
def test_distributions_that_share_next_to_nothing(kind: Loss) -> None:
    size = 2 * BLOCK
    check(kind, 30 * torch.eye(3, size), 25 * torch.eye(3, size).roll(BLOCK + 1, -1), atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_with_probability_zero(kind: Loss) -> None:
    """-inf is what a very negative logit comes to: of the target's, of the draft's, of both, at the start or later."""
    size = 3 * BLOCK + 7
    logits, wanted = draw(4, size), draw(4, size, seed=1)
    banned = torch.zeros(4, size, dtype=torch.bool)
    banned[0, :BLOCK] = banned[1, BLOCK + 1 :] = banned[2, ::2] = banned[3, 1:] = True
    for whose in ("the target's", "both"):
        soft = logits.masked_fill(banned, -1e6) if whose == "both" else logits
        hard = logits.masked_fill(banned, -inf) if whose == "both" else logits
        goal = wanted.masked_fill(banned, -1e6)
        check(kind, soft, goal, goal.logsumexp(-1) + 0.5)
        torch.testing.assert_close(
            run(kind, hard, wanted.masked_fill(banned, -inf)), run(kind, soft, goal), rtol=0, atol=0
        )
    if kind in ("tv", "nla"):
        there = run(kind, logits.masked_fill(banned, -inf), wanted)
        torch.testing.assert_close(there, run(kind, logits.masked_fill(banned, -1e6), wanted), rtol=0, atol=0)
    if kind in ("kl", "lk_hybrid"):
        assert (run(kind, logits.masked_fill(banned, -inf), wanted)[0] > 1e30).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_reaches_the_loss(kind: Loss) -> None:
    logits = draw(2, 2 * BLOCK)
    logits[1, 70] = nan
    found, best, _, gradient = run(kind, logits, draw(2, 2 * BLOCK, seed=1))
    assert gradient is not None
    assert found.isnan().tolist() == gradient.isnan().any(-1).tolist() == [False, True]
    assert (best >= 0).all() and (best < 2 * BLOCK).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_rounded_to_their_type(kind: Loss, dtype: torch.dtype) -> None:
    logits, wanted = draw(3, 2 * BLOCK + 5), draw(3, 2 * BLOCK + 5, seed=1)
    exact, narrow = run(kind, logits, wanted), run(kind, logits, wanted, dtype=dtype)
    assert exact[3] is not None and narrow[3] is not None
    assert torch.equal(narrow[3], exact[3].to(dtype))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(narrow[:3], exact[:3], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gradient_the_rest_is_the_same(kind: Loss) -> None:
    logits, wanted = draw(3, 2 * BLOCK + 5), draw(3, 2 * BLOCK + 5, seed=1)
    with_it, without = run(kind, logits, wanted), run(kind, logits, wanted, dtype=None)
    assert without[3] is None
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(without[:3], with_it[:3], strict=True))


def test_rows_may_lie_apart_and_only_the_row_is_written() -> None:
    size = BLOCK + 3
    wide, target = draw(3, size + 10), draw(3, size + 20, seed=1)
    capacity = torch.full((3, size + 30), 7.0, device=DEVICE)
    distillation.distill("kl", wide.to(DEVICE)[:, :size], target.to(DEVICE)[:, :size], None, capacity[:, :size])
    right = run("kl", wide[:, :size].contiguous(), target[:, :size].contiguous())[3]
    assert right is not None and torch.equal(capacity[:, :size].cpu(), right)
    assert (capacity[:, size:] == 7).all()


def test_no_rows_at_all() -> None:
    for kind in KINDS:
        assert [each.shape for each in run(kind, draw(0, 5), draw(0, 5))[:3]] == [(0,)] * 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the gradients of chunks went; `score` takes the kernel on any device."""
    made: list[int] = []
    inner: Callable[..., Any] = distillation.distill

    def counted(*given: Any) -> Any:
        gradient = given[4]
        made.append(0 if gradient is None else gradient.data_ptr())
        return inner(*given)

    monkeypatch.setattr(distillation, "distill", counted)
    monkeypatch.setattr(losses, "_has_kernel", lambda kind, logits: kind in KINDS)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("indices", [None, [11, 0, 3, 3, 8, 1, 5]])
def test_scores_by_chunks(
    kind: Loss, narrow: torch.dtype, indices: list[int] | None, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same loss and gradients with the kernel as without, from one piece of memory for all chunks."""
    parts = [(draw(7, width), draw(BLOCK + 9, width, scale=0.5, seed=1)) for width in (6, 3)]
    flat = [each.to(DEVICE).requires_grad_() for part in parts for each in part]
    wanted, weights = draw(7, BLOCK + 9, seed=2).to(DEVICE), torch.linspace(0, 1, 7).to(DEVICE)
    whole = wanted.logsumexp(-1) + 0.2
    picks = None if indices is None else torch.tensor(indices, device=DEVICE)
    if picks is not None:
        wanted = torch.full((12, BLOCK + 9), nan, device=DEVICE).index_put_((picks,), wanted)  # equal rows: the last
        whole = wanted[picks].logsumexp(-1) + 0.2

    def scored() -> list[Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=narrow == torch.bfloat16):
            found = score([(flat[0], flat[1]), (flat[2], flat[3])], wanted, weights, kind, whole, 3, picks)
        return [found.loss, found.argmax, found.overlap, *torch.autograd.grad(2 * found.loss, flat)]

    fused = scored()
    assert len(calls) == 3 and len(set(calls)) == 1 and 0 not in calls
    monkeypatch.setattr(losses, "_has_kernel", lambda kind, logits: False)
    loose = 1e-2 if narrow == torch.bfloat16 else 1e-5
    torch.testing.assert_close(fused, scored(), rtol=loose, atol=loose)
    assert len(calls) == 3


def test_scores_without_a_gradient(calls: list[int]) -> None:
    with torch.no_grad():
        found = score(
            [(draw(4, 6).to(DEVICE), draw(9, 6).to(DEVICE))], draw(4, 9).to(DEVICE), torch.ones(4, device=DEVICE)
        )
    assert calls == [0] and found.loss.isfinite()
