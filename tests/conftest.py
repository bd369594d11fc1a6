"""Fixtures that several folders share, and the choice of tests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        # Interpret Triton's own functions too: they are compiled if transformers imports Triton first.
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.language  # noqa: F401

import tiny
from backends import backends, settings
from outrider import LLM

pytest.register_assert_rewrite("laws.mix")  # so that what differs is shown

with suppress(ImportError):  # a machine with a GPU runs its tests without it
    from hypothesis import HealthCheck
    from hypothesis import settings as hypothesis_settings

    # The same examples in each run, however slow the machine is; other ones with OUTRIDER_ENDURANCE=1.
    hypothesis_settings.register_profile(
        "outrider",
        derandomize=os.environ.get("OUTRIDER_ENDURANCE") != "1",
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    hypothesis_settings.load_profile("outrider")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of the GPU where there is none, and most combinations on the reference backend."""
    dropped = covered(items)
    if not torch.cuda.is_available():
        dropped.update(item for item in items if item.get_closest_marker("cuda"))
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]


def covered(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return tests marked `pairwise` on the reference backend that hold no value which others do not hold.

    The other backends run all combinations, so that every pair of values is tested, the backend among them.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairwise"):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped: set[pytest.Item] = set()
    for group in groups.values():
        slow = [item for item in group if item.callspec.params["tiny_llm"] == "reference"]  # type: ignore[attr-defined]
        if len(slow) < len(group):
            dropped.update(set(slow).difference(covering(slow)))
    return dropped


def covering(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Choose one after the other the item with most values that no chosen one has, among equals with the rarest."""
    params = {item: item.callspec.params.items() for item in items}  # type: ignore[attr-defined]
    values = {item: {(name, repr(value)) for name, value in own} for item, own in params.items()}
    every, used, chosen = set().union(*values.values()), Counter[tuple[str, str]](), []
    while missing := every - used.keys():
        uses = {item: sum(used[each] for each in values[item]) for item in items}
        chosen.append(max(items, key=lambda item: (len(values[item] & missing), -uses[item])))
        used.update(values[chosen[-1]])
    return chosen


@pytest.fixture(scope="session", autouse=True)
def no_warm_up() -> None:
    """Capture and compile at first use: a test needs few of the shapes. tests/laws/test_warm_up.py tests the rest."""
    from outrider.device.cuda import (
        Cuda,
    )  # not above: tests/kernels/cuda sets the interpreter before Triton is imported

    Cuda.defaults = replace(Cuda.defaults, warms_up=False)


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

    def make(name: str | Path = "llama", **options: object) -> LLM:
        folder = name if isinstance(name, Path) else tiny_folder(name)
        return LLM(str(folder), **{**settings(request.param), **options})

    return make
