"""Load the backend of a device."""

from __future__ import annotations

import torch

from .protocol import Kernels


def load(backend: str, threads: int | None = None, deterministic: bool = False) -> Kernels:
    """Import the backend `backend`. threads: of the host; None: unchanged. deterministic: batch-invariant kernels
    (`cpu` and `reference` always are).
    """
    if backend == "cpu":
        from . import cpu

        if threads is not None:
            cpu.set_threads(threads)
        return cpu
    if threads is not None:
        torch.set_num_threads(threads)
    if backend == "reference":
        from . import reference

        return reference
    if backend == "cuda":
        from . import cuda
        from .cuda import batch_invariant

        return batch_invariant if deterministic else cuda
    raise ValueError(f"no kernels called `{backend}`: expected `cpu`, `cuda` or `reference`")
