"""Kernel tests run on every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outrider.kernels import Kernels, cpu, reference
from outrider.kernels.cpu import _native

LEVELS = cpu.facts()["levels"]


@contextmanager
def chosen(level: str) -> Iterator[None]:
    before = cpu.facts()["level"]
    _native.choose_level(level)
    yield
    _native.choose_level(before)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The cpu backend at one level, for one test."""
    with chosen(request.param):
        yield request.param


@pytest.fixture(params=["reference", *LEVELS])
def ops(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Every backend; the cpu's at each level."""
    if request.param == "reference":
        yield reference
        return
    with chosen(request.param):
        yield cpu
