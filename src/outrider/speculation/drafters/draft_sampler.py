"""How drafted tokens are drawn from a drafter's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels import SamplingMetadata
from ...kernels.philox import DRAFT
from ..interface import DraftContext, Target

SIBLING = 256  # streams between those of a node's children, where each is drawn by itself


class DraftSampler:
    """The likeliest tokens, or tokens at the request's temperature, with the noise that the verification asks for."""

    def __init__(self, target: Target) -> None:
        self.ops, self.device = target.ops, target.device
        self.sampled, self.coupled = target.sampled, target.coupled
        self.replacement = target.replacement
        self.keeps = target.sampled and not target.coupled  # the verification asks for the logits as well
        self._sober: dict[int, SamplingMetadata] = {}  # by rows: how the likeliest are taken, with the target's noise

    def draw(self, logits: Tensor, choice: SamplingMetadata, depth: int) -> Tensor:
        """One token [B] int32 for each row of logits [B, V], `depth` tokens after the newest of its text."""
        return self.ops.sample(logits, self._deeper(choice, depth))

    def draft(self, logits: Tensor, choice: SamplingMetadata, depth: int) -> tuple[Tensor, Tensor]:
        """What `draw` gives, and how likely each is kept if those before it are [B] f32."""
        tokens, logprobs = self.branch(logits, choice, depth, 1)
        return tokens[:, 0].contiguous(), logprobs[:, 0].exp()

    def branch(self, logits: Tensor, choice: SamplingMetadata, depth: int, count: int) -> tuple[Tensor, Tensor]:
        """Siblings [B, count] int32 for each row of logits [B, V], in the order drawn; -1: there are no more.

        With them [B, count] f32, never above 0: the logarithm of the chance to be kept, as far as a drafter can tell.
        """
        choice = self._deeper(choice, depth)
        found = self.ops.sample_children(logits, choice, count)
        tokens, logprobs = found.tokens, found.logprobs.clamp(max=0.0)
        if not self.sampled or choice is self._sober.get(len(tokens)):
            return tokens, logprobs
        noisy = (choice.temperature > 0)[:, None]  # [B, 1]
        if self.keeps and self.replacement and count > 1:
            # At temperature 0 all would be one and the same.
            again = torch.where(noisy, self._independent(logits, choice, count), tokens)
            warm = torch.where(noisy, choice.temperature[:, None], 1.0)
            return again, torch.log_softmax(logits / warm, -1).gather(1, again.long().clamp(min=0))
        if self.coupled:
            logprobs = torch.where(noisy, _shared_noise(logprobs), logprobs)
        return tokens, logprobs

    def _independent(self, logits: Tensor, choice: SamplingMetadata, count: int) -> Tensor:
        """Siblings that know nothing of each other: [B, count]."""
        streams = [choice.stream + SIBLING * sibling for sibling in range(count)]
        return torch.stack([self.ops.sample(logits, replace(choice, stream=stream)) for stream in streams], 1)

    def _deeper(self, choice: SamplingMetadata, depth: int) -> SamplingMetadata:
        """What is not drawn needs no dice."""
        noisy = depth and self.sampled and choice is not self._sober.get(choice.temperature.shape[0])
        return replace(choice, positions=choice.positions + depth) if noisy else choice

    def likeliest(self, contexts: Sequence[DraftContext]) -> bool:
        """Whether nothing is drawn for these, and nobody asks for logits: which tokens are likeliest is all."""
        if self.keeps:
            return False
        return not self.sampled or all(context.request.params.temperature == 0 for context in contexts)

    def choice(self, contexts: Sequence[DraftContext]) -> SamplingMetadata:
        """How the first token after each context's text is drawn: [B]."""
        if self.likeliest(contexts):
            return self._soberly(len(contexts))
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

    def _soberly(self, rows: int) -> SamplingMetadata:
        """Without noise seeds and positions do not matter: the same tensors serve every call."""
        if rows not in self._sober:
            upload = self.device.upload
            whole, nothing = upload([0] * rows, torch.int32), upload([0.0] * rows, torch.float32)
            seeds = upload([0] * rows, torch.int64)
            self._sober[rows] = SamplingMetadata(nothing, whole, torch.ones_like(nothing), nothing, seeds, whole)
        return self._sober[rows]

    def adapt(self, choice: SamplingMetadata, lengths: Tensor) -> SamplingMetadata:
        """The target's choice after texts of these lengths [B] as the drafter's."""
        if not self.coupled:
            # A position may be drafted for more than once, after other texts: each draft has noise of its own.
            choice = replace(choice, stream=DRAFT, epochs=lengths)
        if not self.sampled:
            choice = replace(choice, temperature=torch.zeros_like(choice.temperature))
        if self.sampled and self.coupled:
            # Exact match asks for the target's own token, so the draft is cut as the target's choice is.
            return choice
        # Else the draft is as wide as its model: what the target would not say is rejected all the same.
        whole = torch.ones_like(choice.top_p)
        return replace(choice, top_k=torch.zeros_like(choice.top_k), top_p=whole, min_p=torch.zeros_like(choice.min_p))


def named(found: Tensor, ids: Tensor) -> Tensor:
    """The target's ids of tokens that were found among `ids` [U]; -1 stays: there was none."""
    return torch.where(found < 0, -1, ids[found.clamp(min=0).long()].to(torch.int32))


def _shared_noise(logprobs: Tensor) -> Tensor:
    """Chances [B, count] of tokens that were drawn with the target's own noise, which of them the drafter knows.

    Where both models agree, the first is the target's choice however unlikely it was; where they differ, it is most
    often one of the next. So the first is half sure from the start, and each further one has half of what is left.
    """
    doubt = (1 - logprobs[:, :1].exp()) / 2  # [B, 1]
    ranks = torch.arange(logprobs.shape[1], device=logprobs.device)
    chances = torch.where(ranks == 0, 1 - doubt, doubt * 0.5**ranks).log()
    return chances.masked_fill(logprobs == -torch.inf, -torch.inf)
