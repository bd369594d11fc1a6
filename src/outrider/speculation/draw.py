"""How drafted tokens are drawn from a drafter's logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import Choice
from ..kernels.philox import DRAFT, TARGET
from . import Target, Turn


class Drawer:
    """The likeliest tokens, or tokens at the request's temperature, with the noise that the verification asks for."""

    def __init__(self, target: Target) -> None:
        self.ops, self.device = target.ops, target.device
        self.sampled, self.coupled = target.sampled, target.coupled
        self.keeps = target.sampled and not target.coupled  # the verification asks for the logits as well

    def draw(self, logits: Tensor, turns: Sequence[Turn], depth: int) -> Tensor:
        """One token [B] int32 for each row of logits [B, V], `depth` tokens after the newest of its text."""
        return self.ops.sample(logits, self._choice(turns, depth))

    def _choice(self, turns: Sequence[Turn], depth: int) -> Choice:
        params, upload = [turn.request.params for turn in turns], self.device.upload
        # Exact match asks for the target's own token, so the draft is cut as the target's choice is. Else the draft is
        # to be as wide as its model: what the target would not say is rejected all the same.
        shaped = [p if self.sampled and self.coupled else None for p in params]
        return Choice(
            temperature=upload([p.temperature if self.sampled else 0.0 for p in params], torch.float32),
            top_k=upload([0 if p is None else p.top_k for p in shaped], torch.int32),
            top_p=upload([1.0 if p is None else p.top_p for p in shaped], torch.float32),
            min_p=upload([0.0 if p is None else p.min_p for p in shaped], torch.float32),
            seeds=upload([turn.request.seed for turn in turns], torch.int64),
            positions=upload([turn.length + depth for turn in turns], torch.int32),
            stream=TARGET if self.coupled else DRAFT,
            # A position may be drafted for more than once, after other texts: each draft has noise of its own.
            epochs=None if self.coupled else upload([turn.length for turn in turns], torch.int32),
        )
