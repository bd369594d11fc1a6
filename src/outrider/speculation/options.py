"""Convert settings, given as text or as JSON values, to the typed fields of a dataclass."""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ..errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """One setting as the user wrote it."""

    name: str
    value: Any  # text, or a JSON value


def fill(kind: type[T], settings: Mapping[str, Setting]) -> T:
    """Build a `kind` from settings, each converted to the type of its field; other fields keep their defaults."""
    hints = typing.get_type_hints(kind)
    return kind(**{field: convert(setting, hints[field]) for field, setting in settings.items()})


def convert(setting: Setting, wanted: Any) -> Any:
    """Convert a setting to the type of a field, or refuse it."""
    alternatives = typing.get_args(wanted) if is_union(wanted) else (wanted,)
    absent = setting.value is None or (setting.value == "none" and str not in alternatives)
    if absent and types.NoneType in alternatives:
        return None
    kinds = [kind for kind in alternatives if kind is not types.NoneType]
    for kind in kinds:
        try:
            return reader(kind)(setting.value)
        except (TypeError, ValueError, OverflowError):
            continue
    expected = " or ".join(described(kind) for kind in kinds)
    raise UserError(f"`{setting.name}` is `{setting.value}`: expected {expected}")


def is_union(wanted: Any) -> bool:
    return typing.get_origin(wanted) in (typing.Union, types.UnionType)


def reader(kind: Any) -> Callable[[Any], Any]:
    """Return the function that converts a value to `kind`; it raises ValueError or TypeError on a bad value."""
    if typing.get_origin(kind) is tuple:
        return lambda value: several(value, reader(typing.get_args(kind)[0]))
    if typing.get_origin(kind) is Literal:
        return lambda value: one_of(value, typing.get_args(kind))
    if kind not in READERS:
        raise UserError(f"an option of type `{kind}` cannot be set: use int, float, bool, str, a tuple or a Literal")
    return READERS[kind][0]


def described(kind: Any) -> str:
    """Describe the values of a type for an error message."""
    if typing.get_origin(kind) is tuple:
        return "numbers such as 0.9/0.5/0.1"
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(typing.get_args(kind))}"
    return READERS[kind][1]


def whole(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise TypeError
    return int(value)


def number(value: Any) -> float:
    result = float(value)
    if isinstance(value, bool) or not math.isfinite(result):
        raise TypeError
    return result


def truth(value: Any) -> bool:
    spelled = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if str(value).lower() not in spelled:
        raise ValueError
    return spelled[str(value).lower()]


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def several(value: Any, read: Callable[[Any], T]) -> tuple[T, ...]:
    parts = value.split("/") if isinstance(value, str) else value
    return tuple(read(part) for part in parts)


def one_of(value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise ValueError
    return value


READERS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    int: (whole, "a whole number"),
    float: (number, "a number"),
    bool: (truth, "true or false"),
    str: (text, "a text"),
}


def hint(name: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """Suggest a known name for an unknown one; `elsewhere` maps names of other engines to names here."""
    names = list(known)
    near = [elsewhere[name]] if elsewhere.get(name) in names else difflib.get_close_matches(name, names, n=1)
    return f" (did you mean `{near[0]}`?)" if near else ""
