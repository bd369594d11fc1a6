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
from ...kernels import SamplingMetadata
from ...request import Request
from ..interface import DraftBatch, DraftContext
from .chain_builder import ChainBuilder, DraftPlan
from .draft_sampler import DraftSampler


class RecordedChain(ChainBuilder):
    """The chain of one request. All its tokens are recorded; a replay ends after the last one that pays."""

    def __init__(
        self, sampler: DraftSampler, device: Device, width: int, ids: Tensor | None, greedy: bool = True
    ) -> None:
        """ids [U] int32: tokens that the drafter knows; None: all. greedy: tokens are the argmax, else sampled."""
        super().__init__(sampler, width, None)
        self.tokens, self.estimates = device.buffer(width, torch.int32), device.buffer(width, torch.float32)
        self.recorder: Any = None  # while it is recorded
        self.greedy, self.reads_confidence = greedy, not greedy
        self.shares_noise = not greedy  # tokens are sampled with the target's noise
        self._are_logprobs = True  # the estimates, else they are acceptance probabilities
        self._request: Request | None = None  # whose parameters are in the buffers of a chain that is sampled
        if greedy:
            self.ids, self._sampling = ids, sampler.greedy_sampling(1)
            return
        self._floats, self._seed = device.buffer(3, torch.float32), device.buffer(1, torch.int64)
        self._integers = device.buffer(2, torch.int32)
        temperature, top_p, min_p = torch.split(self._floats.tensor, 1)
        top_k, lengths = torch.split(self._integers.tensor, 1)
        target_sampling = SamplingMetadata(temperature, top_k, top_p, min_p, self._seed.tensor, lengths)
        self._sampling = sampler.adapt(target_sampling, lengths)

    @property
    def counts(self) -> list[int]:
        return [1] * self.width

    def take(self, context: DraftContext) -> None:
        """Fill in the sampling parameters for the next token of a request."""
        if self.greedy:
            return
        params = context.request.params
        if self._request is not context.request:
            self._request = context.request
            self._floats.fill([params.temperature, params.top_p, params.min_p])
            self._seed.fill([context.request.seed])
        self._integers.fill([params.top_k, context.length])

    def put(self, depth: int, logits: Tensor, confidence: Tensor | None = None) -> Tensor:
        assert self._sampling is not None
        children = self.sampler.ops.sample_children(logits, self.sampler.at_depth(self._sampling, depth), 1)
        tokens = children.tokens.view(1)
        if self.ids is not None:
            tokens = self.ids.index_select(0, tokens)
        self.tokens.tensor[depth : depth + 1].copy_(tokens)
        estimate = self.estimates.tensor[depth : depth + 1]
        estimate.copy_(children.logprobs.view(1) if confidence is None else confidence)
        self._are_logprobs = confidence is None
        self.recorder.end_depth(estimate, self._are_logprobs)
        return tokens

    def read(self, plan: DraftPlan, contexts: Sequence[DraftContext], reached: int, least: float) -> DraftBatch:
        """Return the draft of a call that drafted `reached` tokens, cut before the first that does not pay.

        least: where a replay ends; the call that makes a recording drafts on, and is cut there.
        """
        confidence: list[float] = []
        length, path = reached, 1.0
        for depth, estimate in enumerate(self.estimates.read(reached)):
            probability = estimate
            if self._are_logprobs:
                probability = 1.0 if estimate > 0 else math.exp(estimate)
                if self.shares_noise:
                    probability = 1 - (1 - probability) / 2
            confidence.append(probability)
            path *= probability
            if path < least:
                reached = depth + 1
                length = depth if path < plan.context.min_acceptance else reached
                break
        tokens: list[list[int]] = [[]] * len(contexts)
        confidences: list[list[float]] = [[]] * len(contexts)
        lengths = [0] * len(contexts)
        tokens[plan.row], confidences[plan.row] = self.tokens.read(reached), confidence[:length]
        lengths[plan.row] = length
        return DraftBatch(tokens, lengths, confidence=confidences, reached=reached)


def least_path(context: DraftContext, paid: bool) -> float:
    """Return the acceptance probability of a path below which it does not pay to go on."""
    if not context.min_acceptance:
        return 0.0
    return context.min_acceptance if paid else max(context.min_acceptance, context.min_continuation)
