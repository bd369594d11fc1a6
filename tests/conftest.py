"""Fixtures that several rooms share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny
from backends import backends, settings
from outrider import LLM

pytest.register_assert_rewrite("laws.mix")  # so that what differs is shown


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU there is nothing that its tests could say."""
    useless = [] if torch.cuda.is_available() else [item for item in items if item.get_closest_marker("cuda")]
    if useless:
        config.hook.pytest_deselected(items=useless)
        items[:] = [item for item in items if item not in useless]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny random model in a folder as users have them, with a tokenizer of single characters."""

    def make(name: str = "llama") -> Path:
        folder = tmp_path_factory.getbasetemp() / f"whole-{name}"
        if not folder.exists():
            tiny.copy(name, folder)
        return folder

    return make


@pytest.fixture(scope="module", params=backends("cpu", "reference"))
def tiny_llm(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path]) -> Callable[..., LLM]:
    """Make an LLM over a tiny model, on each backend in turn."""

    def make(name: str = "llama", **options: object) -> LLM:
        return LLM(str(tiny_folder(name)), **{**settings(request.param), **options})

    return make
