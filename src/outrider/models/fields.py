"""Checked access to the keys of a config.json, which may be damaged."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..errors import UserError

MAX_COUNT = (1 << 31) - 1
MAX_NUMBER = sys.float_info.max


class ConfigFields:
    """Checked access to the keys of a config.json."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.values = {**defaults, **values}

    def count(self, name: str, default: int | None = None, most: int = MAX_COUNT) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise UserError(f"the model's configuration lacks `{name}`: take config.json from the original checkpoint")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise UserError(
                f"the model's configuration says `{name}` is {value!r}: expected a whole number from 1 to {most}"
            )
        return value

    def items(self, name: str) -> list[Any] | None:
        """Return a list, or None if the key is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise UserError(f"the model's configuration says `{name}` is {value!r}: expected a list")
        return value

    def table(self, name: str) -> dict[str, Any]:
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise UserError(f"the model's configuration says `{name}` is {value!r}: expected keys and values")
        return value

    def number(self, name: str, default: float) -> float:
        return positive(self.values.get(name, default), name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)


def positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
        raise UserError(f"the model's configuration says `{name}` is {value!r}: expected a number above 0")
    return float(value)
