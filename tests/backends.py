"""Which backends the tests of whole engines run on: those that are asked for, and the GPU's where there is one.

OUTRIDER_TEST_BACKENDS=cuda restricts them; several are separated by commas. Asked for by name, `cuda` runs without a
GPU as well, if TRITON_INTERPRET=1 is set, and takes hours.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from outrider.config import BACKENDS


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
    return {"backend": backend, "rounds": 1, "deterministic": True}
