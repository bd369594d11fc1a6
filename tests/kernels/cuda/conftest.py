"""The Triton kernels: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anyone imports triton

import bounds

from carried import Carried
from outrider.kernels import Kernels
from poison import poisoned

if not torch.cuda.is_available():
    bounds.install()


@pytest.fixture(scope="session", params=["fast", "batch-invariant"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    """The backend in both modes. Its operations take tensors of the host and give such back."""
    from outrider.kernels import cuda
    from outrider.kernels.cuda import batch_invariant, matrices

    matrices.EXPANDED = 0  # the kernels that unpack short rows are to be tested as well

    return Carried(cuda if request.param == "fast" else batch_invariant, cuda.DEVICE)  # type: ignore[return-value]


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
