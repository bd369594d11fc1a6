"""The chain of one request in a recording: the first pass and the decode loop of a drafter are recorded once a shape.

So nothing of Python runs between the tokens of a draft. The functions that are recorded also serve every other call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...device import Device
from ..interface import DraftBatch, DraftContext
from .chain_builder import ChainBuilder, DraftPlan
from .draft_sampler import DraftSampler


class RecordedChain(ChainBuilder):
    """The chain of one request. All its tokens are recorded; a replay ends after the last one that pays."""

    def __init__(self, sampler: DraftSampler, device: Device, width: int, ids: Tensor | None) -> None:
        """ids [U] int32: tokens that the drafter knows; None: all."""
        super().__init__(sampler, width, None)
        self.ids = ids
        self.tokens, self.logprobs = device.buffer(width, torch.int32), device.buffer(width, torch.float32)
        self.recorder: Any = None  # while it is recorded
        self._sampling = sampler.greedy_sampling(1)

    @property
    def counts(self) -> list[int]:
        return [1] * self.width

    def put(self, depth: int, logits: Tensor, confidence: Tensor | None = None) -> Tensor:
        assert self._sampling is not None
        children = self.sampler.ops.sample_children(logits, self._sampling, 1)
        tokens = children.tokens.view(1)
        if self.ids is not None:
            tokens = self.ids.index_select(0, tokens)
        self.tokens.tensor[depth : depth + 1].copy_(tokens)
        logprob = self.logprobs.tensor[depth : depth + 1]
        logprob.copy_(children.logprobs.view(1))
        self.recorder.end_depth(logprob)
        return tokens

    def read(self, plan: DraftPlan, contexts: Sequence[DraftContext], reached: int) -> DraftBatch:
        """Return the draft of a replay that drafted `reached` tokens, cut before the first that does not pay."""
        confidence = [math.exp(min(logprob, 0.0)) for logprob in self.logprobs.read(reached)]
        length, path, least = reached, 1.0, plan.context.min_acceptance
        for depth, probability in enumerate(confidence):
            path *= probability
            if path < least:
                length = depth
                break
        tokens: list[list[int]] = [[] for _ in contexts]
        confidences: list[list[float]] = [[] for _ in contexts]
        lengths = [0] * len(contexts)
        tokens[plan.row], confidences[plan.row] = self.tokens.read(reached), confidence[:length]
        lengths[plan.row] = length
        return DraftBatch(tokens, lengths, confidence=confidences, reached=reached)


def least_path(context: DraftContext, paid: bool) -> float:
    """Return the acceptance probability of a path below which it does not pay to go on."""
    if not context.min_acceptance:
        return 0.0
    return context.min_acceptance if paid else max(context.min_acceptance, context.min_continuation)
