"""What a drafter gave, made sure of: what is wrong with it may not reach the target's pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..types import Draft
from .interface import DraftBatch, DraftContext
from .verifier import Verifier


def sound_guesses(
    draft_batch: DraftBatch, contexts: Sequence[DraftContext], vocabulary: int, verifier: Verifier
) -> list[Draft | None]:
    """The guess for each context, no wider than it may be. Raises ValueError where one cannot be verified."""
    drafts: list[Draft | None] = []
    reads = verifier.reads_drafts
    sound = (
        not reads or draft_batch.logits is None or are_scores(draft_batch.logits)
    )  # all rows at once: the host waits for it
    for context, whole in zip(contexts, draft_batch.drafts(), strict=True):
        draft = whole.cut(context.num_draft_tokens)
        if not reads and draft.logits is not None:
            draft = replace(draft, logits=None)  # nothing so large waits for a step that does not read it
        check_guess(draft, vocabulary)
        if not sound and draft.logits is not None and not are_scores(draft.logits):
            raise ValueError(f"tokens were drafted from scores that are no numbers: {draft.tokens}")
        if draft.parents == list(range(-1, len(draft.tokens) - 1)):
            draft = replace(draft, parents=None)  # a tree of one branch: chains are cheaper to run
        if draft.parents is not None and verifier.mode == "block":
            raise ValueError(f"a tree was drafted, and only chains can be verified: {draft.parents}")
        drafts.append(draft if draft.tokens else None)
    return drafts


def are_scores(logits: Tensor) -> bool:
    """Whether each row [..., V] is a distribution: no NaN, which a verifier would take for certainty, and not empty."""
    return bool(logits.amax(-1).isfinite().all())


def check_guess(draft: Draft, vocabulary: int) -> None:
    """An id that the target does not have would be read as an address."""
    tokens, parents = draft.tokens, draft.parents
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise ValueError(f"the vocabulary ends at {vocabulary - 1}, and these were drafted: {tokens}")
    if parents is not None and (
        len(parents) != len(tokens) or any(not -1 <= parent < place for place, parent in enumerate(parents))
    ):
        raise ValueError(f"a drafted token follows one that is not listed before it: {parents}")
    if any(part is not None and len(part) != len(tokens) for part in (draft.confidence, draft.origins)):
        raise ValueError(f"{len(tokens)} tokens were drafted, with another number of chances or origins")
    if draft.logits is not None and tuple(draft.logits.shape) != (len(tokens), vocabulary):
        raise ValueError(f"{len(tokens)} tokens were drafted from logits of shape {list(draft.logits.shape)}")
