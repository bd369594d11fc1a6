"""How far a draft's guesses are from the target's, and the gradient of that, in few passes over the logits.

Letters: R rows, U tokens that can be drafted, K places of a block; p is the target's distribution, q the draft's.
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
    loss: Tensor  # []: the sum over rows of weight times loss, with a gradient
    best: Tensor  # [R] int64: the column of U that the draft likes best
    overlap: Tensor  # [R] f32: the sum of min(p, q), p over the target's whole vocabulary


def score(
    parts: Sequence[tuple[Tensor, Tensor]],
    wanted: Tensor,
    weights: Tensor,
    kind: Loss = "kl",
    whole: Tensor | None = None,
    rows: int = 4096,
    places: Tensor | None = None,
) -> Scores:
    """The draft's logits are the sum of states [R, H_i] times matrices [U, H_i]; `wanted` [R, U] are the target's.

    `places` [R]: the rows of `wanted` [any, U] that are meant; None: one after the other.

    Whatever of them needs a gradient gets it chunk by chunk, `rows` at a time, so that a few [rows, U] are all that is
    ever held. `weights` [R] f32. `whole` [R] f32: logsumexp of all of the target's logits; None: U is all of them.
    """
    flat = [each for part in parts for each in part]
    learns = tuple(each.requires_grad and torch.is_grad_enabled() for each in flat)
    loss, best, overlap = _Score.apply(wanted, places, weights, kind, whole, rows, learns, *flat)  # type: ignore[no-untyped-call]
    return Scores(loss, best, overlap)


def by_row(kind: Loss, drafted: Tensor, wanted: Tensor) -> Tensor:
    """Logits of the draft and of the target, [R, U] each, to losses [R]."""
    return ROWS[kind](drafted, wanted)


def depth_weights(count: int, decay: float, place: torch.device | None = None) -> Tensor:
    """[count] f32: decay^s."""
    return decay ** torch.arange(count, dtype=torch.float32, device=place)


def block_weights(count: int, gamma: float, place: torch.device | None = None) -> Tensor:
    """[count] f32: exp(-k / gamma)."""
    return torch.exp(-torch.arange(count, dtype=torch.float32, device=place) / gamma)


def dpace(chances: Tensor, a: float = 0.5) -> Tensor:
    """How many tokens still hang on each place of a block (D-PACE), from the draft's chances of the right ones.

    [R, K] to [R, K]: the sum over j >= k of the product over i <= j of (1 - a) * chance_i + a. Without a gradient.
    """
    reached = ((1 - a) * chances.detach().float() + a).cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)


def _logarithms(drafted: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """log q and log p."""
    return drafted.log_softmax(-1), wanted.log_softmax(-1)


def _shared(drafted: Tensor, wanted: Tensor) -> Tensor:
    """The sum of min(p, q): how often rejection sampling would keep a guess."""
    return torch.minimum(drafted.softmax(-1), wanted.softmax(-1)).sum(-1)


def _kl(drafted: Tensor, wanted: Tensor) -> Tensor:
    q, p = _logarithms(drafted, wanted)
    return (p.exp() * (p - q)).sum(-1)


def _rkl(drafted: Tensor, wanted: Tensor) -> Tensor:
    q, p = _logarithms(drafted, wanted)
    return (q.exp() * (q - p)).sum(-1)


def _jsd(drafted: Tensor, wanted: Tensor) -> Tensor:
    q, p = _logarithms(drafted, wanted)
    middle = torch.logaddexp(q, p) - math.log(2)
    return 0.5 * (p.exp() * (p - middle) + q.exp() * (q - middle)).sum(-1)


def _ce(drafted: Tensor, wanted: Tensor) -> Tensor:
    return -drafted.log_softmax(-1).gather(-1, wanted.argmax(-1, keepdim=True)).squeeze(-1)


def _tv(drafted: Tensor, wanted: Tensor) -> Tensor:
    return 0.5 * (drafted.softmax(-1) - wanted.softmax(-1)).abs().sum(-1)


def _nla(drafted: Tensor, wanted: Tensor) -> Tensor:
    shared = _shared(drafted, wanted)
    return -shared.clamp_min(torch.finfo(shared.dtype).tiny).log()


def _lk_hybrid(drafted: Tensor, wanted: Tensor) -> Tensor:
    """KL where the two are far apart, total variation where they are close."""
    far = torch.exp(-3 * _shared(drafted, wanted).detach())
    return far * _kl(drafted, wanted) + (1 - far) * _tv(drafted, wanted)


ROWS: Mapping[Loss, Callable[[Tensor, Tensor], Tensor]] = {
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
        wanted: Tensor,
        places: Tensor | None,
        weights: Tensor,
        kind: Loss,
        whole: Tensor | None,
        rows: int,
        learns: tuple[bool, ...],
        *flat: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        place = wanted.device.type
        narrow = torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else flat[0].dtype
        with torch.autocast(place, enabled=False):
            sums = _Sums(flat, learns, narrow)
            for start in range(0, len(weights), rows):
                sums.add(slice(start, start + rows), wanted, places, weights, kind, whole)
        ctx.save_for_backward(*sums.gradients)
        ctx.mark_non_differentiable(sums.best, sums.overlap)
        return sums.loss, sums.best, sums.overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if each is None else each * by_loss.to(each.dtype) for each in ctx.saved_tensors)
        return None, None, None, None, None, None, None, *found


class _Sums:
    """What chunks add up to. Gradients: of the states in their own type, of the matrices in fp32."""

    def __init__(self, flat: Sequence[Tensor], learns: Sequence[bool], narrow: torch.dtype) -> None:
        self.narrow, self.wide = narrow, torch.promote_types(narrow, torch.float32)
        self.states = [each.to(narrow) for each in flat[::2]]  # [R, H_i]
        self.matrices = [each.to(narrow) for each in flat[1::2]]  # [U, H_i]
        # One product over all parts at once: adding up [rows, U] in memory would cost more than the products.
        self.joined = torch.cat(self.states, -1), torch.cat(self.matrices, -1)
        self.gradients = [
            torch.zeros_like(each, dtype=self.wide if at % 2 else each.dtype) if needed else None
            for at, (each, needed) in enumerate(zip(flat, learns, strict=True))
        ]
        count, place = len(flat[0]), flat[0].device
        self.loss = torch.zeros((), dtype=self.wide, device=place)
        self.best = torch.empty(count, dtype=torch.int64, device=place)
        self.overlap = torch.empty(count, dtype=self.wide, device=place)
        self.spare: Tensor | None = None  # [rows, U] in the type of products, for the gradients of one chunk at a time

    def add(
        self, at: slice, wanted: Tensor, places: Tensor | None, weights: Tensor, kind: Loss, whole: Tensor | None
    ) -> None:
        logits = _product(self.joined[0][at], self.joined[1].t(), self.wide)  # [rows, U]
        wanted, places = (wanted[at], None) if places is None else (wanted, places[at])
        found = self._look(kind, logits, wanted, places, None if whole is None else whole[at])
        self.loss += (found.losses * weights[at]).sum()
        self.best[at] = found.best
        self.overlap[at] = found.overlap
        if found.by_logits is not None:
            self._spread(at, found.by_logits, weights[at, None])

    def _look(self, kind: Loss, logits: Tensor, wanted: Tensor, places: Tensor | None, whole: Tensor | None) -> _Look:
        learns = any(each is not None for each in self.gradients)
        if not _has_kernel(kind, logits):
            wanted = wanted if places is None else wanted[places]
            return _look(kind, logits, wanted, whole, self.narrow if learns else None)
        from ..kernels.cuda.distill import distill  # needs Triton, which is where the GPUs are

        if learns and self.spare is None:
            self.spare = torch.empty_like(logits, dtype=self.narrow)  # no chunk is longer than the first
        by_logits = None if self.spare is None else self.spare[: len(logits)]
        return _Look(*distill(kind, logits, wanted.contiguous(), whole, by_logits, places), by_logits)

    def _spread(self, at: slice, by_logits: Tensor, weights: Tensor) -> None:
        """From logits [rows, U] to states and matrices; weighted there, where rows are short."""
        for part, (states, matrix) in enumerate(zip(self.states, self.matrices, strict=True)):
            by_states, by_matrix = self.gradients[2 * part : 2 * part + 2]
            if by_states is not None:
                by_states[at] = (_product(by_logits, matrix, self.wide) * weights).to(by_states.dtype)
            if by_matrix is not None:
                by_matrix += _product(by_logits.t(), (states[at] * weights).to(self.narrow), self.wide)


def _product(left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    """Narrow matrices multiplied, with a wide result: logits near 20 would lose all that tells tokens apart."""
    if left.dtype == wide:
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=wide)
    return left.to(wide) @ right.to(wide)


def _has_kernel(kind: Loss, logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype == torch.float32 and kind not in ("rkl", "jsd")


@dataclass(frozen=True)
class _Look:
    losses: Tensor  # [rows]
    best: Tensor  # [rows] int64
    overlap: Tensor  # [rows]
    by_logits: Tensor | None  # [rows, U] in the type of products: the gradient of the losses


def _look(kind: Loss, logits: Tensor, wanted: Tensor, whole: Tensor | None, narrow: torch.dtype | None) -> _Look:
    """One chunk, where no kernel does it. Each pass over [rows, U] counts; `logits` are overwritten.

    `narrow`: the type of products; None: no gradient is needed.
    """
    p, q = torch.softmax(wanted, -1), torch.softmax(logits, -1)
    label, best = p.argmax(-1, keepdim=True), logits.argmax(-1, keepdim=True)
    # log of a row's sum of exp, from what softmax took off its largest entry: no pass of its own.
    target_sum = (wanted.gather(-1, label) - p.gather(-1, label).log()).squeeze(-1)
    draft_sum = (logits.gather(-1, best) - q.gather(-1, best).log()).squeeze(-1)
    by_logits: Tensor | None = None
    if kind in ("rkl", "jsd"):
        losses, by_logits = _by_autograd(kind, logits, wanted, narrow)
    elif kind == "ce":
        losses = draft_sum - logits.gather(-1, label).squeeze(-1)
    elif kind in ("tv", "nla"):
        losses, by_logits = _by_shared(kind, p, q, None, narrow, spare=logits)
    else:
        losses = torch.sub(wanted, logits, out=logits).mul_(p).sum(-1) - target_sum + draft_sum
        if kind == "lk_hybrid":
            losses, by_logits = _by_shared(kind, p, q, losses, narrow, spare=logits)
        elif narrow is not None:
            by_logits = torch.sub(q, p, out=torch.empty_like(q, dtype=narrow))
    overlap = _overlap(p, q, by_logits if kind == "kl" else None, target_sum, whole, spare=logits)
    if kind == "ce" and narrow is not None:
        by_logits = q.scatter_add_(-1, label, q.new_full(label.shape, -1)).to(narrow)
    return _Look(losses, best.squeeze(-1), overlap, by_logits)


def _by_shared(
    kind: Loss, p: Tensor, q: Tensor, divergence: Tensor | None, narrow: torch.dtype | None, spare: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Losses of the sum of min(p, q), and of `divergence`, p from q [rows], if there is one; their gradient."""
    shared = torch.minimum(p, q, out=spare).sum(-1, keepdim=True)  # [rows, 1]
    if divergence is not None:
        far = torch.exp(-3 * shared)
        losses, by_shared = far * divergence[:, None] + (1 - far) * (1 - shared), far - 1
    elif kind == "nla":
        shared = shared.clamp_min(torch.finfo(shared.dtype).tiny)
        losses, by_shared = -shared.log(), -1 / shared
    else:
        losses, by_shared = 1 - shared, torch.full_like(shared, -1)
    if narrow is None:
        return losses.squeeze(-1), None
    below = q.masked_fill(q >= p, 0)  # the sum changes with q where q is the smaller
    by_logits = below.mul_(by_shared).addcmul_(q, -below.sum(-1, keepdim=True))
    if divergence is not None:
        by_logits.addcmul_(q, far).addcmul_(p, far, value=-1)
    return losses.squeeze(-1), by_logits.to(narrow)


def _overlap(
    p: Tensor, q: Tensor, apart: Tensor | None, target_sum: Tensor, whole: Tensor | None, spare: Tensor
) -> Tensor:
    """[rows]: the sum of min(a, b) is half of what the sums of a and b have over the sum of |a - b|."""
    if whole is None:
        apart = torch.sub(q, p, out=spare) if apart is None else apart
        distance: Tensor = torch.linalg.vector_norm(apart, 1, -1, dtype=q.dtype)
        return 1 - 0.5 * distance
    share = (target_sum - whole).exp().clamp_max(1)  # [rows]: of the target's chances, what can be drafted
    apart = torch.addcmul(q, p, share[:, None], value=-1, out=spare)
    distance = torch.linalg.vector_norm(apart, 1, -1)
    return 0.5 * (1 + share - distance)


def _by_autograd(
    kind: Loss, logits: Tensor, wanted: Tensor, narrow: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    if narrow is None:
        return by_row(kind, logits, wanted), None
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        losses = by_row(kind, leaf, wanted)
        (by_logits,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), by_logits.to(narrow)
