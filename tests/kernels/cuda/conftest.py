"""The Triton kernels: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

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


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Patch `triton.language` once for each launch; the interpreter does it again in each call of a device function."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patched_once(interpreter._patch_lang))
        yield


def patched_once(patch_language: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `patch_language` without effect while the modules that a function sees are patched for a launch."""
    import triton.language as tl

    patched: set[str] = set()  # names of modules

    @functools.cache
    def modules_of(function: Any) -> set[str]:
        return {
            module.__name__ for module in (tl, tl.core) if any(each is module for each in function.__globals__.values())
        }

    def patch(function: Any) -> Any:
        modules = modules_of(function)
        if modules <= patched:
            return SimpleNamespace(restore=lambda: None)
        is_launch, scope = not patched, patch_language(function)
        patched.update(modules)

        def restore() -> None:
            scope.restore()
            if is_launch:
                patched.clear()

        return SimpleNamespace(restore=restore)

    return patch


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
