"""Which backends the laws, and tests of whole engines, run on: the usual ones, and the GPU's where there is one.

OUTRIDER_TEST_BACKENDS=cuda restricts them; several are separated by commas. Asked for by name, `cuda` runs without a
GPU as well, if TRITON_INTERPRET=1 is set, and takes hours.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from carried import Carried
from outrider.config import BACKENDS
from outrider.kernels import load


def backends(*usual: str) -> list[str]:
    """Of the usual ones, and the GPU's, those that this run is for."""
    asked = os.environ.get("OUTRIDER_TEST_BACKENDS")
    if asked is None:
        return [*usual, "cuda"] if torch.cuda.is_available() else list(usual)
    names = asked.split(",")
    assert set(names) <= set(BACKENDS), f"OUTRIDER_TEST_BACKENDS is `{asked}`: expected some of {', '.join(BACKENDS)}"
    return [name for name in (*usual, "cuda") if name in names] or list(usual)  # a test without a backend would not run


def settings(backend: str) -> dict[str, Any]:
    """Options of an engine in which the laws hold to the bit, and whose steps a test can count."""
    return {"backend": backend, "decode_steps": 1, "deterministic": True}


def every_kernels() -> list[Any]:
    """The operations of each backend as parameters of a test, for tensors of the host."""
    return [pytest.param(_carried(name), id=name) for name in backends("cpu", "reference")]


def _carried(backend: str) -> Any:
    ops: Any = load(backend)
    return Carried(ops, ops.DEVICE) if backend == "cuda" else ops
