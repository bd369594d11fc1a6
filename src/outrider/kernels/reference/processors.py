"""Logits processors of texts that grow on the device, token by token as process_logits states them."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from ..structures import (
    COUNTED,
    MARK_ALLOWED,
    MARK_BANNED,
    MARK_BIAS,
    MARK_COUNT,
    MARK_END,
    MARK_PROMPT,
    ONLY_ALLOWED,
    PROCESSED,
    DecodeProcessors,
    LogitsProcessors,
)
from .sampling import process_logits

NO_BIAS = 0.0
BAN = -torch.inf


def process_decode_logits(logits: Tensor, processors: DecodeProcessors, drafts: Tensor, positions: Tensor) -> None:
    width = drafts.shape[1]
    rows = logits.view(-1, width + 1, logits.shape[1])
    for text, (kind, draft) in enumerate(zip(processors.kinds.tolist(), drafts.tolist(), strict=True)):
        if kind & PROCESSED:
            for depth in range(width + 1):
                position = int(positions[text]) + 1 + depth
                process_logits(rows[text, depth][None], _entries(processors, text, draft[:depth], position))


def _entries(processors: DecodeProcessors, text: int, drafted: list[int], position: int) -> LogitsProcessors:
    """Return the changes of one row of logits, which predicts the token at `position`."""
    kind, (repetition, presence, frequency) = int(processors.kinds[text]), processors.penalties[text].tolist()
    is_early = position < int(processors.min_lengths[text])
    found = processors.marks[text].nonzero()[:, 0].tolist()
    marks: dict[int, int] = {token: int(processors.marks[text, token]) for token in found}
    if kind & COUNTED:
        for token, count in Counter(token for token in drafted if token >= 0).items():
            marks[token] = marks.get(token, 0) + count
    entries: dict[int, tuple[float, float]] = {}
    for token, mark in sorted(marks.items()):
        count, bans = mark & MARK_COUNT, MARK_BANNED | (MARK_END if is_early else 0)
        if kind & ONLY_ALLOWED and not mark & MARK_ALLOWED:
            continue
        if not mark & (MARK_COUNT | MARK_PROMPT | MARK_BIAS | MARK_ALLOWED | bans):
            continue
        bias = float(processors.bias[text, token]) if mark & MARK_BIAS else NO_BIAS
        if count and (presence or frequency):
            bias += -presence - frequency * count
        scale = repetition if count or mark & MARK_PROMPT else 1.0
        entries[token] = scale, BAN if mark & bans else bias
    return LogitsProcessors(
        starts=torch.tensor([0, len(entries)], dtype=torch.int32),
        tokens=torch.tensor(list(entries), dtype=torch.int32),
        scale=torch.tensor([scale for scale, _ in entries.values()]),
        bias=torch.tensor([bias for _, bias in entries.values()]),
        only=torch.tensor([bool(kind & ONLY_ALLOWED)], dtype=torch.uint8),
    )


def count_tokens(processors: DecodeProcessors, tokens: Tensor) -> None:
    for text, (kind, row) in enumerate(zip(processors.kinds.tolist(), tokens.tolist(), strict=True)):
        for token in row if kind & COUNTED else ():
            if token >= 0:
                processors.marks[text, token] += 1
