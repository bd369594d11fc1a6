"""Outrider: LLM inference around speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .types import Completion, Output, SamplingParams, Stats, StructuredOutput, TokenLogprobs, UserError

if TYPE_CHECKING:
    from .aio import AsyncLLM
    from .engine import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "Completion",
    "Output",
    "SamplingParams",
    "Stats",
    "StructuredOutput",
    "TokenLogprobs",
    "UserError",
]


def __getattr__(name: str) -> Any:
    # The engine brings torch along, which takes a second: only those who use it wait for it.
    if name == "LLM":
        from .engine import LLM

        return LLM
    if name == "AsyncLLM":
        from .aio import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module `outrider` has no attribute `{name}`")
