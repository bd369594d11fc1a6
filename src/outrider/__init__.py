"""Outrider: LLM inference around speculative decoding."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .adapters import LoRARequest
from .errors import UserError
from .types import Completion, Output, SamplingParams, Stats, StructuredOutput, TokenLogprobs

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "LoRARequest",
    "Output",
    "SamplingParams",
    "Stats",
    "StructuredOutput",
    "TokenLogprobs",
    "UserError",
]
_LAZY = {"LLM": "outrider.llm", "AsyncLLM": "outrider.async_llm"}  # these import torch, which takes a second


def __getattr__(name: str) -> Any:
    """Import `LLM` and `AsyncLLM` on first use."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module `outrider` has no attribute `{name}`")
