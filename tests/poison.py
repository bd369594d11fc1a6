"""New memory that holds garbage, so that what no kernel writes shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nan

GARBAGE = 0x7FFFFF00  # no token, no position, no row


def poisoned(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*shape: Any, **options: Any) -> Tensor:
        fresh = empty(*shape, **options)
        if fresh.is_floating_point():
            return fresh.fill_(nan)
        return fresh.fill_(min(GARBAGE, torch.iinfo(fresh.dtype).max))

    return made
