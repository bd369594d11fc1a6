"""Every method, as the laws run over it."""

from __future__ import annotations

import pytest

import tiny_heads
from laws.mix import with_options
from outrider.speculation import available


@pytest.fixture(scope="module", params=available())
def method(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A method with what it needs: a tiny head or draft model where it reads one."""
    name: str = request.param
    return with_options(name, adaptive="false", **tiny_heads.make(name, tmp_path_factory.mktemp(name)))
