"""A draft in the making where nobody is there to look at it: what Sheet is to a call with the host."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...multi_step.state import DecodeState
from .draft_sampler import DraftSampler


class Slate:
    def __init__(
        self,
        drawer: DraftSampler,
        seats: DecodeState,
        vocabulary: int,
        context: int | None = None,
        ids: Tensor | None = None,
    ) -> None:
        """context: longer texts are not drafted for. ids [U]: what the drafter can say; None: the whole vocabulary."""
        self.drawer, self.seats = drawer, seats
        # What is not drawn needs no noise, which goes by the target's ids: the likeliest is found among fewer.
        drawn = drawer.keeps or (drawer.sampled and seats.warm)
        self.ids = None if drawn or ids is None else ids.to(torch.int32)  # [U]: what logits are to be over
        self.depths = torch.arange(seats.width, dtype=torch.int32, device=seats.newest.device)
        self.longest = torch.iinfo(torch.int32).max if context is None else context + 1
        self.logits = None  # [B * (W + 1), V]; owned here, written at every depth, read by the next verification
        if drawer.keeps:
            rows = seats.rows * (seats.width + 1)
            self.logits = torch.zeros(rows, vocabulary, device=seats.newest.device)

    def begin(self) -> None:
        """Noise is that of the texts as they are now."""
        self._drawn: list[Tensor] = []  # by depth: [B] int32
        lengths = self.seats.places + 1
        self.choice = self.drawer.adapt(replace(self.seats.choice, positions=lengths), lengths)

    def put(self, depth: int, logits: Tensor) -> Tensor:
        """Draw a token for each row of logits [B, V or U]; return them [B]."""
        seats, drawn = self.seats, self.drawer.draw(logits, self.choice, depth)
        if self.logits is not None:
            self.logits.view(seats.rows, seats.width + 1, -1)[:, depth + 1] = logits
        if self.ids is not None:
            drawn = self.ids.index_select(0, drawn)
        self._drawn.append(drawn)
        return drawn

    def end(self) -> None:
        """What has no room before the text's own last token, or in the drafter, was not drafted."""
        torch.stack(self._drawn, 1, out=self.seats.drafts)
        room = self.seats.limits.clamp(max=self.longest) - self.seats.places - 2  # [B]
        self.seats.drafts.masked_fill_(self.depths >= room[:, None], -1)
