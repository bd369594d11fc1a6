"""Edit method specifications as users write them (`METHOD:KEY=VALUE,...`): add or remove settings, shorten paths."""

from __future__ import annotations

from ..speculation.config import read


def with_settings(drafter: str, **settings: str) -> str:
    """Return the specification with those `settings` added that it does not set itself."""
    _, given = read(drafter)
    added = [f"{key}={value}" for key, value in settings.items() if key not in given]
    return drafter if not added else f"{drafter}{',' if given else ':'}{','.join(added)}"


def without(drafter: str, key: str) -> str:
    """Return the specification without the setting `key`."""
    method, given = read(drafter)
    rest = [f"{name}={setting.value}" for name, setting in given.items() if name != key]
    return f"{method}:{','.join(rest)}" if rest else method


def short(drafter: str) -> str:
    """Return the specification with model paths cut to their last component, for tables."""
    method, colon, settings = drafter.partition(":")
    parts = [part.partition("=") for part in settings.split(",")]
    cut = [(key, equals, value.rpartition("/")[2] if key.endswith("model") else value) for key, equals, value in parts]
    return f"{method}{colon}{','.join(''.join(part) for part in cut)}"
