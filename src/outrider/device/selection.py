"""Choose a backend, open its device, and explain when its memory is too small."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import UserError
from .cpu import HOST
from .interface import Device

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")  # messages of CUDA, Triton and torch

NO_THREADS = "cannot start"  # how the message of csrc/threads.cpp begins; it also names the remedy


def choose_backend(requested: str) -> str:
    """Resolve `auto` to `cuda` if a supported GPU is present, else to `cpu`."""
    if requested != "auto":
        return requested
    from .cuda import why_unavailable

    return "cpu" if why_unavailable() is not None else "cuda"


def open_device(backend: str) -> Device:
    """Open the device that the kernels of `backend` run on."""
    if backend in ("cpu", "reference"):
        return HOST
    if backend == "cuda":
        if os.environ.get("TRITON_INTERPRET") == "1":  # Triton's interpreter runs on the host
            return HOST
        from .cuda import Cuda, why_unavailable

        if (reason := why_unavailable()) is not None:
            raise UserError(f"`backend` is `cuda`, but {reason}: use `backend=cpu`, which works without")
        return Cuda()
    raise ValueError(f"no device for the kernels `{backend}`: expected `cpu`, `cuda` or `reference`")


def check_kv_dtype(backend: str, dtype: str) -> None:
    """Refuse fp8 keys and values on a GPU that cannot convert them."""
    if dtype == "fp8" and (reason := _why_no_fp8(backend)) is not None:
        raise UserError(f"`kv_dtype` is fp8, but {reason}: pass `kv_dtype=int8`")


def check_activations(backend: str, activations: str) -> None:
    """Refuse fast activations, which are e4m3 on a GPU, on one that cannot convert them."""
    if activations == "fast" and (reason := _why_no_fp8(backend)) is not None:
        raise UserError(f"`activations` is fast, but {reason}: pass `activations=high`")


def _why_no_fp8(backend: str) -> str | None:
    if backend != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    from .cuda import why_no_fp8

    return why_no_fp8()


@contextmanager
def within_memory() -> Iterator[None]:
    """Turn missing memory or threads in the block into a UserError that names the options to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if str(error).startswith(NO_THREADS):
            raise UserError(str(error)) from error
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        device, instead = ("the GPU", ", or use `backend=cpu`") if "CUDA" in str(error) else ("this machine", "")
        raise UserError(
            f"model, cache and the largest step take more memory than {device} has left: use a smaller model or "
            f"one with fewer bits, lower `cache_tokens`, `max_requests` or `max_step_tokens`{instead}"
        ) from error
