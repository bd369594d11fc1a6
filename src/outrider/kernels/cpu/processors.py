"""Logits processors of texts that grow without the host: whole rows of logits at once."""

from __future__ import annotations

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
)


def process_decode_logits(logits: Tensor, processors: DecodeProcessors, drafts: Tensor, positions: Tensor) -> None:
    width = drafts.shape[1]
    rows = logits.view(-1, width + 1, logits.shape[1])
    for text, kind in enumerate(processors.kinds.tolist()):
        marks = processors.marks[text].clone()  # [V]
        for depth in range(width + 1) if kind & PROCESSED else ():
            if depth and kind & COUNTED and drafts[text, depth - 1] >= 0:
                marks[drafts[text, depth - 1]] += 1
            _process(rows[text, depth], marks, processors, text, int(positions[text]) + 1 + depth)


def _process(logits: Tensor, marks: Tensor, processors: DecodeProcessors, text: int, position: int) -> None:
    """Change the logits [V] that predict the token at `position`."""
    kind, (repetition, presence, frequency) = int(processors.kinds[text]), processors.penalties[text].tolist()
    counts = marks & MARK_COUNT
    bias = torch.zeros_like(logits, dtype=torch.float64)
    if presence or frequency:
        bias = torch.where(counts > 0, -presence - frequency * counts.double(), bias)
    has_bias = (marks & MARK_BIAS) != 0
    if has_bias.any():
        bias[has_bias] += processors.bias[text, has_bias]
    bans = MARK_BANNED | (MARK_END if position < int(processors.min_lengths[text]) else 0)
    bias[(marks & bans) != 0] = -torch.inf
    scale = torch.ones_like(logits)
    scale[(marks & (MARK_COUNT | MARK_PROMPT)) != 0] = repetition
    changed = torch.where(logits > 0, logits / scale, logits * scale) + bias.float()
    if kind & ONLY_ALLOWED:
        logits.copy_(changed.masked_fill((marks & MARK_ALLOWED) == 0, -torch.inf))
    else:
        listed = (marks & (MARK_COUNT | MARK_PROMPT | MARK_BIAS | MARK_ALLOWED | bans)) != 0
        logits.copy_(torch.where(listed, changed, logits))


def count_tokens(processors: DecodeProcessors, tokens: Tensor) -> None:
    counted = ((processors.kinds & COUNTED) != 0)[:, None] & (tokens >= 0)  # [B, N]
    processors.marks.scatter_add_(1, tokens.clamp(min=0).long(), counted.int())
