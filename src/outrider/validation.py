"""Checks of values that users pass against the annotations of a dataclass. No torch here."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from functools import cache
from numbers import Integral, Real

from .errors import UserError

KINDS: dict[str, tuple[tuple[type, ...], str, str]] = {  # annotation -> classes, name of one value, name of several
    "str": ((str,), "a text", "texts"),
    "int": ((int, Integral), "a whole number", "whole numbers"),
    "float": ((float, int, Real), "a number", "numbers"),
    "bool": ((bool,), "True or False", "booleans"),
    "Any": ((object,), "a value", "values"),
    "None": ((type(None),), "None", "None"),
}


def check_type(name: str, value: object, annotation: str) -> None:
    """Raise UserError if a value does not have the type of its annotation, such as `str | Sequence[int] | None`."""
    kinds = _alternatives(annotation)
    if not any(_matches(value, outer, inner) for outer, inner in kinds):
        expected = " or ".join(_describe(outer, inner) for outer, inner in kinds)
        raise UserError(f"`{name}` is {reprlib.repr(value)}: expected {expected}")


@cache
def _alternatives(annotation: str) -> list[tuple[str, tuple[str, ...]]]:
    """Split an annotation into its alternatives: the outer type, and the types of its items."""
    alternatives = []
    for kind in annotation.split(" | "):
        outer, _, inner = kind.removesuffix("]").partition("[")
        alternatives.append((outer, tuple(inner.split(", ")) if inner else ()))
    return alternatives


def _matches(value: object, outer: str, inner: tuple[str, ...]) -> bool:
    if outer == "Sequence":
        if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):  # a text is no list of texts
            return False
        return all(_matches(item, inner[0], ()) for item in value)
    if outer == "Mapping":
        return isinstance(value, Mapping) and all(
            _matches(key, inner[0], ()) and _matches(item, inner[1], ()) for key, item in value.items()
        )
    if isinstance(value, bool):  # a bool is an int to Python, but `n=True` is a mistake
        return outer in ("bool", "Any")
    return isinstance(value, KINDS[outer][0])


def _describe(outer: str, inner: tuple[str, ...]) -> str:
    if outer == "Sequence":
        return f"a list of {KINDS[inner[0]][2]}"
    if outer == "Mapping":
        return f"a mapping from {KINDS[inner[0]][2]} to {KINDS[inner[1]][2]}"
    return KINDS[outer][1]
