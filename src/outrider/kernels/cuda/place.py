"""Where the Triton kernels run: on the GPU, or, for tests, interpreted on the CPU."""

from __future__ import annotations

import os

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLACE = torch.device("cpu" if INTERPRETED else "cuda")


def vector(values: Tensor) -> Tensor:
    return values.to(PLACE)


def placed(values: Tensor | None) -> Tensor | None:
    """A norm, a bias or a table of a layer; one that is there already stays the one copy that layers share."""
    return None if values is None else values.to(PLACE, torch.float32).contiguous()
