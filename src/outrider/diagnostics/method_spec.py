"""Drafters as users write them, METHOD:KEY=VALUE,...: with settings added or taken off, and shortened for a table."""

from __future__ import annotations

from ..speculation.configure import read


def with_settings(drafter: str, **settings: str) -> str:
    """The drafter with what is not said of it yet."""
    _, told = read(drafter)
    more = [f"{key}={value}" for key, value in settings.items() if key not in told]
    return drafter if not more else f"{drafter}{',' if told else ':'}{','.join(more)}"


def without(drafter: str, key: str) -> str:
    method, told = read(drafter)
    kept = [f"{name}={setting.value}" for name, setting in told.items() if name != key]
    return f"{method}:{','.join(kept)}" if kept else method


def short(drafter: str) -> str:
    """The drafter as it was asked for, but of a path only its end."""
    method, colon, settings = drafter.partition(":")
    parts = [part.partition("=") for part in settings.split(",")]
    kept = [(key, equals, value.rpartition("/")[2] if key.endswith("model") else value) for key, equals, value in parts]
    return f"{method}{colon}{','.join(''.join(part) for part in kept)}"
