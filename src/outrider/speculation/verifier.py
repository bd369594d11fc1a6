"""Verify drafts by the engine's verification mode, given the logits of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..device import Device
from ..kernels import Kernels, SamplingMetadata, VerifyInputs, VerifyOutput

Mode = Literal["exact", "rejection", "block", "synthetic"]


class Verifier:
    """Accepts or rejects drafted tokens.

    - exact: accept tokens that equal the target's own samples; with the same seed the text is that of plain decoding
    - rejection, block: accept more of the sampled drafts; the distribution is the target's, the text is another one
    - synthetic: accept at given rates, to measure the speed that they would give
    """

    def __init__(
        self,
        ops: Kernels,
        device: Device,
        mode: Mode = "exact",
        rates: Sequence[float] = (),
        replacement: bool = False,
    ) -> None:
        self.ops, self.mode, self.replacement = ops, mode, replacement
        self.rates = device.upload(list(rates), torch.float32)  # [depths]

    @property
    def reads_drafts(self) -> bool:
        """Return whether the mode reads the distributions that drafts were sampled from."""
        return self.mode in ("rejection", "block")

    def verify(self, logits: Tensor, sampling: SamplingMetadata, drafts: VerifyInputs, sampled: Tensor) -> VerifyOutput:
        """Return the accepted tokens, given processed logits [R, V]; sampled [R] int32: storage for the target tokens.

        sampling [B]: of the texts when their drafts were made, so its positions are those of the first draft tokens.
        """
        if self.mode in ("exact", "synthetic"):
            self.ops.sample(logits, self.ops.expand_sampling(sampling, drafts), sampled)
            if self.mode == "exact":
                return self.ops.verify_exact(sampled, drafts)
        # A draft may be dropped, and its positions drafted again: noise that was used once must not be used again. So
        # it also depends on the length of the text when the draft was made, which is the position of its first token.
        keyed = self.ops.expand_sampling(replace(sampling, epochs=sampling.positions), drafts)
        if self.mode == "synthetic":
            missing = max(drafts.width - self.rates.shape[0], 0)  # tokens at depths without a rate are rejected
            rates = functional.pad(self.rates, (0, missing))[: drafts.width]
            return self.ops.verify_synthetic(sampled, drafts, rates, keyed)
        return self.ops.verify_rejection(logits, drafts, keyed, self.mode == "block", self.replacement)
