"""A draft in the making where nobody is there to look at it: what Sheet is to a call with the host."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .draw import Drawer
from .seats import Seats


class Slate:
    def __init__(
        self,
        drawer: Drawer,
        seats: Seats,
        vocabulary: int,
        context: int | None = None,
        ids: Tensor | None = None,
    ) -> None:
        """context: longer texts are not drafted for. ids [U]: what logits are over; None: the whole vocabulary."""
        self.drawer, self.seats = drawer, seats
        self.ids = None if ids is None else ids.to(torch.int32)
        self.depths = torch.arange(seats.width, dtype=torch.int32, device=seats.newest.device)
        self.longest = torch.iinfo(torch.int32).max if context is None else context + 1
        self.logits = None  # [B * (W + 1), V]; owned here, written at every depth, read by the next verification
        if drawer.keeps:
            rows = seats.rows * (seats.width + 1)
            self.logits = torch.zeros(rows, vocabulary, device=seats.newest.device)

    def begin(self) -> None:
        """Noise is that of the texts as they are now."""
        lengths = self.seats.places + 1
        self.choice = self.drawer.adapt(replace(self.seats.choice, positions=lengths), lengths)

    def put(self, depth: int, logits: Tensor, sure: Tensor | None = None) -> Tensor:
        """Draw a token for each row of logits [B, V or U]; return them [B]. `sure` [B]: their chances, where known."""
        seats = self.seats
        if self.logits is None and sure is None:
            drawn, sure = self.drawer.guess(logits, self.choice, depth)
        else:
            drawn = self.drawer.draw(logits, self.choice, depth)
        if self.logits is not None:
            self.logits.view(seats.rows, seats.width + 1, -1)[:, depth + 1] = logits
        if self.ids is not None:
            drawn = self.ids.index_select(0, drawn.clamp(min=0))  # rows that pad may have found nothing
        if sure is not None:
            seats.chances[:, depth] = sure
        seats.drafts[:, depth] = drawn
        return drawn

    def end(self) -> None:
        """What has no room before the text's own last token, or in the drafter, was not drafted."""
        room = self.seats.limits.clamp(max=self.longest) - self.seats.places - 2  # [B]
        self.seats.drafts.masked_fill_(self.depths >= room[:, None], -1)
