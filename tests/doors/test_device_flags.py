"""The flags of the device reach the engine, and left out they are the engine's own defaults."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cli import options
from outrider.config import EngineConfig

COMMANDS = [("generate", "hello"), ("chat",)]
FLAGS = (
    "--backend",
    "cuda",
    "--deterministic",
    "--cudagraph-mode",
    "FULL_DECODE_ONLY",
    "--enforce-eager",
    "--rounds",
    "3",
)
MEANT = {
    "backend": "cuda",
    "deterministic": True,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "enforce_eager": True,
    "rounds": 3,
}


class OpenedError(Exception):
    """What the command asked for; nothing is opened."""


@pytest.fixture
def asked(outrider: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def refuse(model: str, **fields: Any) -> None:
        raise OpenedError(fields)

    monkeypatch.setattr(options, "open_model", refuse)

    def ask(*arguments: str) -> dict[str, Any]:
        with pytest.raises(OpenedError) as found:
            outrider(*arguments)
        fields: dict[str, Any] = found.value.args[0]
        return fields

    return ask


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_flags_reach_the_engine(asked: Any, command: tuple[str, ...]) -> None:
    assert MEANT.items() <= asked(*command, *FLAGS).items()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_left_out_they_are_the_engines(asked: Any, command: tuple[str, ...]) -> None:
    fields = asked(*command)
    assert {name: fields[name] for name in MEANT} == {name: getattr(EngineConfig(), name) for name in MEANT}
