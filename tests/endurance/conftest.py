"""Engines to be broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_heads
from endurance.sabotage import Fragile, Tight, Trap, Trapped
from outrider import LLM, engine


@pytest.fixture(scope="session")
def speculation(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The value of `speculate` for a method, with a tiny head or draft model where it reads one."""
    made: dict[str, str] = {"none": "none"}

    def describe(name: str) -> str:
        if name not in made:
            options = {"adaptive": "no", **tiny_heads.make(name, tmp_path_factory.mktemp(name))}
            made[name] = f"{name}:" + ",".join(f"{key}={value}" for key, value in options.items())
        return made[name]

    return describe


@pytest.fixture(scope="session")
def fragile(tiny_folder: Callable[..., Path], speculation: Callable[[str], str]) -> Callable[..., Fragile]:
    """An engine with a method, built once for all tests with the same options."""
    built: dict[object, Fragile] = {}

    def make(method: str = "none", **options: object) -> Fragile:
        key = (method, *sorted(options.items()))
        if key not in built:
            kernels, memory = Trap(), Trap()
            load, open_device = engine.load, engine.open_device
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine, "load", lambda *given: Trapped(load(*given), kernels))
                patch.setattr(engine, "open_device", lambda name: Tight(open_device(name), memory))
                settings = {"backend": "cpu", "page_size": 4, "cache_tokens": 512, "decode_steps": 1, **options}
                llm = LLM(str(tiny_folder()), speculate=speculation(method), **settings)
            built[key] = Fragile(llm, kernels, memory)
        return built[key]

    return make
