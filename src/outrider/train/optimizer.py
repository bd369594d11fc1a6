"""The optimizer of a head: AdamW, optionally Muon for matrices, and the learning-rate schedule.

Nothing here waits for the device: a step with non-finite gradients changes nothing, and is counted with the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
MOMENTUM = 0.95
QUINTIC = (3.4445, -4.7750, 2.0315)  # Newton-Schulz coefficients of Muon (Jordan 2024): steep near 0
NEWTON_SCHULZ_STEPS = 5
MAX_ASPECT = 8.0  # matrices with a larger ratio of sides are token tables, which Muon does not suit: AdamW
ADAM_RMS = 0.2  # RMS of AdamW's updates, to which Muon's are scaled, so that one learning rate suits both


@dataclass(frozen=True)
class Recipe:
    learning_rate: float = 1e-3
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices, AdamW for the rest
    matrix_rate: float | None = None  # learning rate of Muon; None: the same
    warm_up: float = 0.04  # fraction of the steps in which the rate rises
    floor: float = 0.1  # fraction of the rate at the end, after a cosine
    clip: float = 1.0  # maximum norm of all gradients together

    def factor(self, step: int, steps: int) -> float:
        """Return the factor on the learning rate at `step`, from 0, in a run of `steps`."""
        rising = max(round(self.warm_up * steps), 1)
        if step < rising:
            return (step + 1) / rising
        done = min((step + 1 - rising) / max(steps - rising, 1), 1.0)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2


class Optimizer:
    """The optimizer of one head."""

    def __init__(self, draft_head: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self.parameters = [parameter for parameter in draft_head.parameters() if parameter.requires_grad]
        use_muon = [recipe.optimizer == "muon" and is_map(parameter) for parameter in self.parameters]
        maps = [parameter for parameter, muon in zip(self.parameters, use_muon, strict=True) if muon]
        others = [parameter for parameter, muon in zip(self.parameters, use_muon, strict=True) if not muon]
        self.muon = Muon(maps) if maps else None
        self.adamw = torch.optim.AdamW(others, betas=BETAS, weight_decay=0.0, fused=True) if others else None

    def step(self, factor: float) -> tuple[Tensor, Tensor]:
        """Apply and clear the gradients. Return their norm before clipping, and whether all were finite."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip, error_if_nonfinite=False, foreach=True)
        finite = norm.isfinite()
        rate = self.recipe.learning_rate * factor
        if self.adamw is not None:
            # As GradScaler does: the fused step reads this flag on the device.
            self.adamw.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.adamw.grad_scale = None  # type: ignore[attr-defined]
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
        if self.muon is not None:
            self.muon.step((self.recipe.matrix_rate or self.recipe.learning_rate) * factor, finite)
        for parameter in self.parameters:
            parameter.grad = None
        return norm, finite

    def state(self) -> dict[str, Any]:
        return {
            "adamw": None if self.adamw is None else self.adamw.state_dict(),
            "muon": None if self.muon is None else self.muon.momenta,
        }

    def load(self, state: dict[str, Any]) -> None:
        if self.adamw is not None:
            self.adamw.load_state_dict(state["adamw"])
        if self.muon is not None:
            for momentum, saved in zip(self.muon.momenta, state["muon"], strict=True):
                momentum.copy_(saved)


class Muon:
    """Muon: momentum with equalized singular values, so that a step is equally large in every direction."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self.matrices = sorted(matrices, key=lambda one: tuple(one.shape))  # matrices of one shape are updated together
        self.momenta = [torch.zeros_like(one) for one in self.matrices]

    @torch.no_grad()
    def step(self, rate: float, finite: Tensor) -> None:
        pairs = [pair for pair in zip(self.matrices, self.momenta, strict=True) if pair[0].grad is not None]
        for shape, alike in groupby(pairs, key=lambda pair: tuple(pair[0].shape)):
            matrices, momenta = zip(*alike, strict=True)
            gradients = torch.stack([one.grad for one in matrices])  # [N, rows, columns]
            gradients = torch.where(finite, gradients, 0.0)
            moved = torch.stack(momenta).lerp(gradients, (1 - MOMENTUM) * finite.float())
            ahead = gradients.lerp(moved, MOMENTUM)  # Nesterov momentum
            change = orthogonal(ahead).float() * finite * (-rate * ADAM_RMS * max(shape) ** 0.5)
            torch._foreach_copy_(list(momenta), list(moved.unbind()))
            torch._foreach_add_(list(matrices), list(change.unbind()))


def orthogonal(matrices: Tensor) -> Tensor:
    """Bring the singular values of matrices [N, rows, columns] near 1 by Newton-Schulz iterations."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x: Tensor = (matrices if wide else matrices.mT).to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    first, third, fifth = QUINTIC
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = first * x + (third * square + fifth * square @ square) @ x
    return x if wide else x.mT


def is_map(parameter: Tensor) -> bool:
    """Return whether a parameter maps hidden states, in contrast to vectors and token tables."""
    return parameter.dim() == 2 and max(parameter.shape) <= MAX_ASPECT * min(parameter.shape)
