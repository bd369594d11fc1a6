"""Run the target over a batch, and sample or verify its next tokens: for single steps and multi-step runs."""

from __future__ import annotations

from torch import Tensor

from .cache.pages import Pages
from .kernels import Batch, SamplingMetadata, VerifyInputs, VerifyOutput
from .models import Model
from .speculation.verifier import Verifier


class TargetPass:
    def __init__(self, model: Model, pages: Pages, verifier: Verifier) -> None:
        self.model, self.pages, self.verifier = model, pages, verifier

    def forward(self, batch: Batch, aux_layers: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
        """Run the batch; return the last hidden states and those that enter `aux_layers`: [T, E] each."""
        return self.model.forward(batch, self.pages.layers, aux_layers)

    def sample(self, logits: Tensor, sampling: SamplingMetadata, tokens: Tensor) -> Tensor:
        """Sample a token for each row of processed logits [R, V] into `tokens` [R] int32."""
        return self.model.ops.sample(logits, sampling, tokens)

    def verify(self, logits: Tensor, sampling: SamplingMetadata, drafts: VerifyInputs, tokens: Tensor) -> VerifyOutput:
        """Verify drafts, given processed logits [R, V]; `tokens` [R] int32 is storage for the target's samples."""
        # The noise of a draft depends on the length of the text when it was made: its first position.
        return self.verifier.verify(logits, sampling, drafts, sampling.positions, tokens)
