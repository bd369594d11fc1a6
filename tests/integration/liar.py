"""A draft model that drafts the argmax but reports sampling probabilities, so that rejection accepts too often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from outrider.speculation import DraftBatch, DraftContext, Proposer, Target
from outrider.speculation.methods import draft_model

Options = draft_model.Options


def build(options: Options, target: Target) -> Proposer:
    drafter = draft_model.build(options, target)
    honest = drafter.propose

    def propose(contexts: Sequence[DraftContext], last: Tensor, hidden: Tensor | None) -> DraftBatch:
        draft = honest(contexts, last, hidden)
        if draft.logits is None or not draft.logits.numel():
            return draft
        return replace(draft, tokens=draft.logits.argmax(-1).int())

    drafter.propose = propose
    return drafter
