"""Where the Triton kernels run: on the GPU, or, for tests, interpreted on the CPU."""

from __future__ import annotations

import os

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLACE = torch.device("cpu" if INTERPRETED else "cuda")


def vector(values: Tensor) -> Tensor:
    return values.to(PLACE)
