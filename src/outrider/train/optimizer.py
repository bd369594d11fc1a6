"""How gradients change parameters: AdamW, Muon for matrices, and the learning rate over a run.

Nothing here waits for the device: a step whose gradients are not finite changes nothing, and the host learns of it
when it next looks at the sums.
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
QUINTIC = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz: slopes steep near 0, and singular values end near 1
ROUNDS = 5
TABLE = 8.0  # a matrix so much longer than wide has a row for each token: it is no map from states to states
LIKE_ADAM = 0.2  # the size of AdamW's steps, so that one learning rate suits both


@dataclass(frozen=True)
class Recipe:
    learning_rate: float = 1e-3
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for matrices; all else is AdamW's
    matrix_rate: float | None = None  # muon's; None: the learning rate
    warm_up: float = 0.04  # the share of the steps in which the rate rises
    floor: float = 0.1  # what is left of it at the end, after a cosine
    clip: float = 1.0  # the norm of all gradients together, at most

    def factor(self, step: int, steps: int) -> float:
        """The share of the learning rate that the step numbered `step`, from 0, takes in a run of `steps`."""
        rising = max(round(self.warm_up * steps), 1)
        if step < rising:
            return (step + 1) / rising
        done = min((step + 1 - rising) / max(steps - rising, 1), 1.0)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2


class Optimiser:
    """All that changes one student's parameters."""

    def __init__(self, student: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self.parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
        maps = [one for one in self.parameters if recipe.optimizer == "muon" and is_map(one)]
        chosen = {id(one) for one in maps}
        others = [one for one in self.parameters if id(one) not in chosen]
        self.muon = Muon(maps) if maps else None
        self.adamw = torch.optim.AdamW(others, betas=BETAS, weight_decay=0.0, fused=True) if others else None

    def step(self, factor: float) -> tuple[Tensor, Tensor]:
        """Take the gradients, and forget them: their norm before it was clipped, and whether all were finite."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip, error_if_nonfinite=False, foreach=True)
        finite = norm.isfinite()
        rate = self.recipe.learning_rate * factor
        if self.adamw is not None:
            # As a GradScaler does it: the fused step looks at this flag on the device.
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
            for kept, found in zip(self.muon.momenta, state["muon"], strict=True):
                kept.copy_(found)


class Muon:
    """Momentum whose singular values are made equal, so that a step moves a matrix as far in every direction."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self.matrices = sorted(matrices, key=lambda one: tuple(one.shape))  # those of one shape take their step at once
        self.momenta = [torch.zeros_like(one) for one in self.matrices]

    @torch.no_grad()
    def step(self, rate: float, finite: Tensor) -> None:
        pairs = [pair for pair in zip(self.matrices, self.momenta, strict=True) if pair[0].grad is not None]
        for shape, alike in groupby(pairs, key=lambda pair: tuple(pair[0].shape)):
            matrices, momenta = zip(*alike, strict=True)
            gradients = torch.stack([one.grad for one in matrices])  # [N, rows, columns]
            gradients = torch.where(finite, gradients, 0.0)
            moved = torch.stack(momenta).lerp(gradients, (1 - MOMENTUM) * finite.float())
            ahead = gradients.lerp(moved, MOMENTUM)  # Nesterov's: as if the next step were taken already
            change = orthogonal(ahead).float() * finite * (-rate * LIKE_ADAM * max(shape) ** 0.5)
            torch._foreach_copy_(list(momenta), list(moved.unbind()))
            torch._foreach_add_(list(matrices), list(change.unbind()))


def orthogonal(matrices: Tensor) -> Tensor:
    """[N, rows, columns], their singular values brought near 1 by products alone (Newton-Schulz)."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x: Tensor = (matrices if wide else matrices.mT).to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    first, third, fifth = QUINTIC
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = first * x + (third * square + fifth * square @ square) @ x
    return x if wide else x.mT


def is_map(parameter: Tensor) -> bool:
    return parameter.dim() == 2 and max(parameter.shape) <= TABLE * min(parameter.shape)
