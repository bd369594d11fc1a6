"""Distillation losses between the draft's and the target's distributions, with their gradients.

Shapes: R rows, U tokens that can be drafted, K tokens of a block. p is the target's distribution, q the draft's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Loss = Literal["kl", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"]


@dataclass(frozen=True)
class Scores:
    loss: Tensor  # []: sum over rows of weight times loss, with a gradient
    argmax: Tensor  # [R] int64: the draft's argmax, a column of U
    overlap: Tensor  # [R] f32: sum of min(p, q), with p over the target's whole vocabulary


def score(
    parts: Sequence[tuple[Tensor, Tensor]],
    target_logits: Tensor,
    weights: Tensor,
    kind: Loss = "kl",
    target_logsumexp: Tensor | None = None,
    rows: int = 4096,
    target_rows: Tensor | None = None,
) -> Scores:
    """Score a draft whose logits are the sum of states [R, H_i] times matrices [U, H_i].

    target_logits [any, U]; target_rows [R]: the rows of it to compare with, None: row by row. weights [R] f32.
    target_logsumexp [R] f32: over all of the target's logits; None: U is the whole vocabulary. States and matrices that
    need a gradient get it chunk by chunk, `rows` at a time, so that only a few [rows, U] are ever in memory.
    """
    flat = [each for part in parts for each in part]
    needs_grad = tuple(each.requires_grad and torch.is_grad_enabled() for each in flat)
    loss, argmax, overlap = _Score.apply(
        target_logits, target_rows, weights, kind, target_logsumexp, rows, needs_grad, *flat
    )  # type: ignore[no-untyped-call]
    return Scores(loss, argmax, overlap)


def loss_by_row(kind: Loss, draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Compute a loss for each row from logits of the draft and of the target, [R, U] each: [R]."""
    return LOSSES[kind](draft_logits, target_logits)


def depth_weights(count: int, decay: float, device: torch.device | None = None) -> Tensor:
    """Return decay^s: [count] f32."""
    return decay ** torch.arange(count, dtype=torch.float32, device=device)


def block_weights(count: int, gamma: float, device: torch.device | None = None) -> Tensor:
    """Return exp(-k / gamma): [count] f32."""
    return torch.exp(-torch.arange(count, dtype=torch.float32, device=device) / gamma)


def dpace(acceptance: Tensor, a: float = 0.5) -> Tensor:
    """Weight each token of a block by the accepted tokens that depend on it (D-PACE), without a gradient.

    acceptance [R, K] to weights [R, K]: sum over j >= k of the product over i <= j of (1 - a) * acceptance_i + a.
    """
    reached = ((1 - a) * acceptance.detach().float() + a).cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)


def _logarithms(draft_logits: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log q and log p."""
    return draft_logits.log_softmax(-1), target_logits.log_softmax(-1)


def _overlap_of(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return the sum of min(p, q): the acceptance rate under rejection sampling."""
    return torch.minimum(draft_logits.softmax(-1), target_logits.softmax(-1)).sum(-1)


def _kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    q, p = _logarithms(draft_logits, target_logits)
    return (p.exp() * (p - q)).sum(-1)


def _rkl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    q, p = _logarithms(draft_logits, target_logits)
    return (q.exp() * (q - p)).sum(-1)


def _jsd(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    q, p = _logarithms(draft_logits, target_logits)
    middle = torch.logaddexp(q, p) - math.log(2)
    return 0.5 * (p.exp() * (p - middle) + q.exp() * (q - middle)).sum(-1)


def _ce(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    return -draft_logits.log_softmax(-1).gather(-1, target_logits.argmax(-1, keepdim=True)).squeeze(-1)


def _tv(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    return 0.5 * (draft_logits.softmax(-1) - target_logits.softmax(-1)).abs().sum(-1)


def _nla(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    shared = _overlap_of(draft_logits, target_logits)
    return -shared.clamp_min(torch.finfo(shared.dtype).tiny).log()


def _lk_hybrid(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Blend KL, for distributions that are far apart, with total variation, for close ones."""
    far = torch.exp(-3 * _overlap_of(draft_logits, target_logits).detach())
    return far * _kl(draft_logits, target_logits) + (1 - far) * _tv(draft_logits, target_logits)


LOSSES: Mapping[Loss, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": _kl,
    "rkl": _rkl,
    "jsd": _jsd,
    "ce": _ce,
    "tv": _tv,
    "nla": _nla,
    "lk_hybrid": _lk_hybrid,
}


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        target_logits: Tensor,
        target_rows: Tensor | None,
        weights: Tensor,
        kind: Loss,
        target_logsumexp: Tensor | None,
        rows: int,
        needs_grad: tuple[bool, ...],
        *flat: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device_type = target_logits.device.type
        matmul_dtype = (
            torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else flat[0].dtype
        )
        with torch.autocast(device_type, enabled=False):
            sums = _Accumulator(flat, needs_grad, matmul_dtype)
            for start in range(0, len(weights), rows):
                sums.add(slice(start, start + rows), target_logits, target_rows, weights, kind, target_logsumexp)
        ctx.save_for_backward(*sums.gradients)
        ctx.mark_non_differentiable(sums.argmax, sums.overlap)
        return sums.loss, sums.argmax, sums.overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if each is None else each * by_loss.to(each.dtype) for each in ctx.saved_tensors)
        return None, None, None, None, None, None, None, *found


class _Accumulator:
    """Sums over chunks. Gradients of the states have the type of the states, gradients of the matrices are fp32."""

    def __init__(self, flat: Sequence[Tensor], needs_grad: Sequence[bool], matmul_dtype: torch.dtype) -> None:
        self.matmul_dtype, self.sum_dtype = matmul_dtype, torch.promote_types(matmul_dtype, torch.float32)
        self.states = [each.to(matmul_dtype) for each in flat[::2]]  # [R, H_i]
        self.matrices = [each.to(matmul_dtype) for each in flat[1::2]]  # [U, H_i]
        # One matmul over all factors: adding up [rows, U] in memory would cost more than the matmuls.
        self.joined = torch.cat(self.states, -1), torch.cat(self.matrices, -1)
        self.gradients = [
            torch.zeros_like(each, dtype=self.sum_dtype if at % 2 else each.dtype) if needed else None
            for at, (each, needed) in enumerate(zip(flat, needs_grad, strict=True))
        ]
        count, device = len(flat[0]), flat[0].device
        self.loss = torch.zeros((), dtype=self.sum_dtype, device=device)
        self.argmax = torch.empty(count, dtype=torch.int64, device=device)
        self.overlap = torch.empty(count, dtype=self.sum_dtype, device=device)
        self.buffer: Tensor | None = None  # [rows, U]: gradient of one chunk at a time

    def add(
        self,
        at: slice,
        target_logits: Tensor,
        target_rows: Tensor | None,
        weights: Tensor,
        kind: Loss,
        target_logsumexp: Tensor | None,
    ) -> None:
        logits = _matmul(self.joined[0][at], self.joined[1].t(), self.sum_dtype)  # [rows, U]
        target_logits, target_rows = (
            (target_logits[at], None) if target_rows is None else (target_logits, target_rows[at])
        )
        found = self._score_chunk(
            kind, logits, target_logits, target_rows, None if target_logsumexp is None else target_logsumexp[at]
        )
        self.loss += (found.losses * weights[at]).sum()
        self.argmax[at] = found.argmax
        self.overlap[at] = found.overlap
        if found.by_logits is not None:
            self._spread(at, found.by_logits, weights[at, None])

    def _score_chunk(
        self,
        kind: Loss,
        logits: Tensor,
        target_logits: Tensor,
        target_rows: Tensor | None,
        target_logsumexp: Tensor | None,
    ) -> _ChunkScores:
        needs_grad = any(each is not None for each in self.gradients)
        if not _has_kernel(kind, logits):
            target_logits = target_logits if target_rows is None else target_logits[target_rows]
            return _score_chunk(
                kind, logits, target_logits, target_logsumexp, self.matmul_dtype if needs_grad else None
            )
        from ..kernels.cuda.distill import distill  # imported here: it needs Triton

        if needs_grad and self.buffer is None:
            self.buffer = torch.empty_like(logits, dtype=self.matmul_dtype)  # no chunk is longer than the first
        by_logits = None if self.buffer is None else self.buffer[: len(logits)]
        return _ChunkScores(
            *distill(kind, logits, target_logits.contiguous(), target_logsumexp, by_logits, target_rows), by_logits
        )

    def _spread(self, at: slice, by_logits: Tensor, weights: Tensor) -> None:
        """Propagate the gradient of logits [rows, U] to states and matrices, where weighting is cheaper."""
        for part, (states, matrix) in enumerate(zip(self.states, self.matrices, strict=True)):
            by_states, by_matrix = self.gradients[2 * part : 2 * part + 2]
            if by_states is not None:
                by_states[at] = (_matmul(by_logits, matrix, self.sum_dtype) * weights).to(by_states.dtype)
            if by_matrix is not None:
                by_matrix += _matmul(by_logits.t(), (states[at] * weights).to(self.matmul_dtype), self.sum_dtype)


def _matmul(left: Tensor, right: Tensor, sum_dtype: torch.dtype) -> Tensor:
    """Multiply low-precision matrices with a wide result: in bf16, logits near 20 could not tell tokens apart."""
    if left.dtype == sum_dtype:
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=sum_dtype)
    return left.to(sum_dtype) @ right.to(sum_dtype)


def _has_kernel(kind: Loss, logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype == torch.float32 and kind not in ("rkl", "jsd")


@dataclass(frozen=True)
class _ChunkScores:
    losses: Tensor  # [rows]
    argmax: Tensor  # [rows] int64
    overlap: Tensor  # [rows]
    by_logits: Tensor | None  # [rows, U]: the gradient of the losses


def _score_chunk(
    kind: Loss, logits: Tensor, target_logits: Tensor, target_logsumexp: Tensor | None, matmul_dtype: torch.dtype | None
) -> _ChunkScores:
    """Score one chunk in plain torch, with few passes over [rows, U]; `logits` are overwritten.

    matmul_dtype: the type of the gradient; None: no gradient is needed.
    """
    p, q = torch.softmax(target_logits, -1), torch.softmax(logits, -1)
    label, argmax = p.argmax(-1, keepdim=True), logits.argmax(-1, keepdim=True)
    # logsumexp of each row, from its largest entry before and after softmax: saves a pass.
    target_sum = (target_logits.gather(-1, label) - p.gather(-1, label).log()).squeeze(-1)
    draft_sum = (logits.gather(-1, argmax) - q.gather(-1, argmax).log()).squeeze(-1)
    by_logits: Tensor | None = None
    if kind in ("rkl", "jsd"):
        losses, by_logits = _by_autograd(kind, logits, target_logits, matmul_dtype)
    elif kind == "ce":
        losses = draft_sum - logits.gather(-1, label).squeeze(-1)
    elif kind in ("tv", "nla"):
        losses, by_logits = _by_shared(kind, p, q, None, matmul_dtype, buffer=logits)
    else:
        losses = torch.sub(target_logits, logits, out=logits).mul_(p).sum(-1) - target_sum + draft_sum
        if kind == "lk_hybrid":
            losses, by_logits = _by_shared(kind, p, q, losses, matmul_dtype, buffer=logits)
        elif matmul_dtype is not None:
            by_logits = torch.sub(q, p, out=torch.empty_like(q, dtype=matmul_dtype))
    overlap = _overlap(p, q, by_logits if kind == "kl" else None, target_sum, target_logsumexp, buffer=logits)
    if kind == "ce" and matmul_dtype is not None:
        by_logits = q.scatter_add_(-1, label, q.new_full(label.shape, -1)).to(matmul_dtype)
    return _ChunkScores(losses, argmax.squeeze(-1), overlap, by_logits)


def _by_shared(
    kind: Loss, p: Tensor, q: Tensor, divergence: Tensor | None, matmul_dtype: torch.dtype | None, buffer: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute losses from the overlap, blended with `divergence` KL(p, q) [rows] if given, and their gradient."""
    shared = torch.minimum(p, q, out=buffer).sum(-1, keepdim=True)  # [rows, 1]
    if divergence is not None:
        far = torch.exp(-3 * shared)
        losses, by_shared = far * divergence[:, None] + (1 - far) * (1 - shared), far - 1
    elif kind == "nla":
        shared = shared.clamp_min(torch.finfo(shared.dtype).tiny)
        losses, by_shared = -shared.log(), -1 / shared
    else:
        losses, by_shared = 1 - shared, torch.full_like(shared, -1)
    if matmul_dtype is None:
        return losses.squeeze(-1), None
    below = q.masked_fill(q >= p, 0)  # the overlap depends on q only where q is smaller
    by_logits = below.mul_(by_shared).addcmul_(q, -below.sum(-1, keepdim=True))
    if divergence is not None:
        by_logits.addcmul_(q, far).addcmul_(p, far, value=-1)
    return losses.squeeze(-1), by_logits.to(matmul_dtype)


def _overlap(
    p: Tensor, q: Tensor, apart: Tensor | None, target_sum: Tensor, target_logsumexp: Tensor | None, buffer: Tensor
) -> Tensor:
    """Return the overlap [rows]: sum of min(a, b) = (sum of a + sum of b - sum of |a - b|) / 2."""
    if target_logsumexp is None:
        apart = torch.sub(q, p, out=buffer) if apart is None else apart
        distance: Tensor = torch.linalg.vector_norm(apart, 1, -1, dtype=q.dtype)
        return 1 - 0.5 * distance
    share = (
        (target_sum - target_logsumexp).exp().clamp_max(1)
    )  # [rows]: the target's probability mass on the draft vocabulary
    apart = torch.addcmul(q, p, share[:, None], value=-1, out=buffer)
    distance = torch.linalg.vector_norm(apart, 1, -1)
    return 0.5 * (1 + share - distance)


def _by_autograd(
    kind: Loss, logits: Tensor, target_logits: Tensor, matmul_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    if matmul_dtype is None:
        return loss_by_row(kind, logits, target_logits), None
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        losses = loss_by_row(kind, leaf, target_logits)
        (by_logits,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), by_logits.to(matmul_dtype)
