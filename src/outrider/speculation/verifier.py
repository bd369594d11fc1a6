"""Which drafted tokens stay: the engine's verification mode, as operations on the logits of one step."""

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
    """Exact match keeps a draft while it is what the target itself would have chosen; with the same seed the text is
    that of plain decoding. Rejection and block keep more of drawn drafts: the distribution is the target's, the text
    is not. Synthetic forces a rate, to measure what it would give.
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
        """Whether it needs the distributions that drafts were drawn from."""
        return self.mode in ("rejection", "block")

    def verify(
        self, logits: Tensor, choice: SamplingMetadata, drafts: VerifyInputs, epochs: Tensor, sampled: Tensor
    ) -> VerifyOutput:
        """What stays of `drafts`, given edited logits [R, V]; `sampled` [R] int32 is room for the target's choices.

        epochs [B] int32: how long each text was when its draft was made. A draft may be dropped and its positions
        drafted again later; coins that were shown once must not be thrown again.
        """
        if self.mode in ("exact", "synthetic"):
            self.ops.sample(logits, self.ops.expand_sampling(choice, drafts), sampled)
            if self.mode == "exact":
                return self.ops.verify_exact(sampled, drafts)
        keyed = self.ops.expand_sampling(replace(choice, epochs=epochs), drafts)
        if self.mode == "synthetic":
            beyond = max(drafts.width - self.rates.shape[0], 0)  # depths without a rate are never kept
            rates = functional.pad(self.rates, (0, beyond))[: drafts.width]
            return self.ops.verify_synthetic(sampled, drafts, rates, keyed)
        return self.ops.verify_rejection(logits, drafts, keyed, self.mode == "block", self.replacement)
