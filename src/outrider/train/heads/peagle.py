"""P-EAGLE in training: an EAGLE-3 head that drafts all tokens in one pass over mask tokens.

Step 0 is that of EAGLE-3. In later steps a row reads the mask token beside one learned state, instead of the token and
the output of the step before; it attends to the text up to its own entry and to its own masks before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..target import TargetInfo
from .autoregressive import EagleDraftHead, EagleOptions
from .layers import to_autocast


@dataclass(frozen=True)
class Options(EagleOptions):
    layers: int = 2  # one pass replaces several: published heads have up to 4


class PEagleDraftHead(EagleDraftHead):
    method = "peagle"

    def __init__(self, target_info: TargetInfo, options: Options, positions: int) -> None:
        super().__init__(target_info, options, positions)
        features = len(self.aux_layers) * target_info.config.width
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, features).to(target_info.torch_device))
        # The token that the target writes least often, of several the last: a text hardly ever contains it.
        counts = target_info.token_counts
        self.mask = int((counts == counts.min()).nonzero()[-1])

    def later_inputs(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        mask = to_autocast(self.token_norm(self.embedding[self.mask]))  # [E]
        state = self._fuse(self.mask_hidden.chunk(len(self.aux_layers), -1))  # [1, 1, E]
        return mask.expand_as(tokens), state.expand_as(states)

    def checkpoint_config(self) -> dict[str, Any]:
        return super().checkpoint_config() | {"norm_output": False, "mask_token_id": self.mask}
