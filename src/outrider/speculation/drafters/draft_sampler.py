"""Sample draft tokens from a drafter's logits, with the noise that the verification mode needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels import SamplingMetadata
from ...kernels.philox import DRAFT
from ..interface import DraftContext, Target

SIBLING = 256  # distance between the noise streams of a node's children, if they are sampled independently


class DraftSampler:
    """Takes the argmax, or samples at the request's temperature."""

    def __init__(self, target: Target) -> None:
        self.ops, self.device = target.ops, target.device
        self.sampled, self.coupled = target.sampled, target.coupled
        self.replacement = target.replacement
        self.keeps_logits = target.sampled and not target.coupled  # verification reads the logits as well
        self._greedy: dict[int, SamplingMetadata] = {}  # by number of rows
        self._logits: Tensor | None = None

    def logit_storage(self, rows: int, vocabulary: int) -> Tensor:
        """Return storage [R, V] f32 for the logits of drafts, which all shapes of runs share: one run at a time."""
        if self._logits is None or len(self._logits) < rows:
            self._logits = torch.zeros(rows, vocabulary, device=self.device.torch_device)
        return self._logits[:rows]

    def sample(self, logits: Tensor, sampling: SamplingMetadata, depth: int) -> Tensor:
        """Sample a token [B] int32 from each row of logits [B, V], for the position at `depth` of the draft."""
        return self.ops.sample(logits, self.at_depth(sampling, depth))

    def sample_with_confidence(self, logits: Tensor, sampling: SamplingMetadata, depth: int) -> tuple[Tensor, Tensor]:
        """Sample as `sample` does; return also the acceptance probability of each token, given its parent: [B] f32."""
        tokens, logprobs = self.sample_children(logits, sampling, depth, 1)
        return tokens[:, 0].contiguous(), logprobs[:, 0].exp()

    def sample_children(
        self, logits: Tensor, sampling: SamplingMetadata, depth: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """Sample siblings [B, count] int32 from each row of logits [B, V], in their order; -1: there are no more.

        Return also [B, count] f32, at most 0: the logarithm of their acceptance probability, as the drafter knows it.
        """
        sampling = self.at_depth(sampling, depth)
        children = self.ops.sample_children(logits, sampling, count)
        tokens, logprobs = children.tokens, children.logprobs.clamp(max=0.0)
        if not self.sampled or sampling is self._greedy.get(len(tokens)):
            return tokens, logprobs
        noisy = (sampling.temperature > 0)[:, None]  # [B, 1]
        if self.keeps_logits and self.replacement and count > 1:
            # At temperature 0 all independent samples would be the same token.
            independent = torch.where(noisy, self._independent(logits, sampling, count), tokens)
            temperature = torch.where(noisy, sampling.temperature[:, None], 1.0)
            logprobs = torch.log_softmax(logits / temperature, -1).gather(1, independent.long().clamp(min=0))
            return independent, logprobs
        if self.coupled:
            logprobs = torch.where(noisy, _with_shared_noise(logprobs), logprobs)
        return tokens, logprobs

    def _independent(self, logits: Tensor, sampling: SamplingMetadata, count: int) -> Tensor:
        """Sample siblings independently of each other: [B, count]."""
        streams = [sampling.stream + SIBLING * sibling for sibling in range(count)]
        return torch.stack([self.ops.sample(logits, replace(sampling, stream=stream)) for stream in streams], 1)

    def at_depth(self, sampling: SamplingMetadata, depth: int) -> SamplingMetadata:
        """Move the noise to the position at `depth`; without noise positions do not matter."""
        noisy = depth and self.sampled and sampling is not self._greedy.get(sampling.temperature.shape[0])
        return replace(sampling, positions=sampling.positions + depth) if noisy else sampling

    def is_greedy(self, contexts: Sequence[DraftContext]) -> bool:
        """Return whether drafts are the argmax: nothing is sampled, and no logits are kept."""
        if self.keeps_logits:
            return False
        if self.sampled:
            for context in contexts:
                if context.request.params.temperature != 0:
                    return False
        return True

    def sampling(self, contexts: Sequence[DraftContext]) -> SamplingMetadata:
        """Return how to sample the first token after each text: [B]."""
        if self.is_greedy(contexts):
            return self.greedy_sampling(len(contexts))
        params, upload = [context.request.params for context in contexts], self.device.upload
        lengths = upload([context.length for context in contexts], torch.int32)
        return self.adapt(
            SamplingMetadata(
                temperature=upload([p.temperature for p in params], torch.float32),
                top_k=upload([p.top_k for p in params], torch.int32),
                top_p=upload([p.top_p for p in params], torch.float32),
                min_p=upload([p.min_p for p in params], torch.float32),
                seeds=upload([context.request.seed for context in contexts], torch.int64),
                positions=lengths,
            ),
            lengths,
        )

    def greedy_sampling(self, rows: int) -> SamplingMetadata:
        """Return the same tensors for every call: without noise seeds and positions do not matter."""
        if rows not in self._greedy:
            upload = self.device.upload
            zeros, floats = upload([0] * rows, torch.int32), upload([0.0] * rows, torch.float32)
            seeds = upload([0] * rows, torch.int64)
            ones = torch.ones_like(floats)
            self._greedy[rows] = SamplingMetadata(floats, zeros, ones, floats, seeds, zeros, greedy=True)
        return self._greedy[rows]

    def adapt(self, sampling: SamplingMetadata, lengths: Tensor) -> SamplingMetadata:
        """Return the drafter's sampling metadata for the target's, after texts of these lengths [B]."""
        if not self.coupled:
            # A position may be drafted more than once, after different texts: each draft has other noise.
            sampling = replace(sampling, stream=DRAFT, epochs=lengths)
        if not self.sampled:
            sampling = replace(sampling, temperature=torch.zeros_like(sampling.temperature))
        if self.sampled and self.coupled:
            # Exact match compares with the target's own token, so the draft has the target's top-k, top-p and min-p.
            return sampling
        # Else the draft has the drafter's whole distribution: verification rejects tokens that the target excludes.
        ones, zeros = torch.ones_like(sampling.top_p), torch.zeros_like(sampling.top_k)
        return replace(sampling, top_k=zeros, top_p=ones, min_p=torch.zeros_like(sampling.min_p))


def to_target_ids(tokens: Tensor, ids: Tensor) -> Tensor:
    """Translate tokens that were sampled among `ids` [U] to the target's ids; -1 stays: there was none."""
    return torch.where(tokens < 0, -1, ids[tokens.clamp(min=0).long()].to(torch.int32))


def _with_shared_noise(logprobs: Tensor) -> Tensor:
    """Estimate the acceptance [B, count] of tokens that were sampled with the target's own noise.

    If both models agree, the first token is the target's, however improbable it was. If they differ, the target's is
    most often one of the next. So the rejection probability of the first is halved, and each further token gets half
    of the rest.
    """
    rejection = (1 - logprobs[:, :1].exp()) / 2  # [B, 1]
    ranks = torch.arange(logprobs.shape[1], device=logprobs.device)
    estimates = torch.where(ranks == 0, 1 - rejection, rejection * 0.5**ranks).log()
    return estimates.masked_fill(logprobs == -torch.inf, -torch.inf)
