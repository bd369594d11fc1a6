"""Guards around the tokenizers library, whose Rust code panics on some files and may exhaust the memory on others."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..errors import UserError

MAX_STEPS = 100  # of a normalizer, pre-tokenizer or decoder
MAX_GROWTH = 64  # of a text, by the replacements of a normalizer or decoder
CHARACTER_MAP = "precompiled_charsmap"
ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")  # in JSON: a letter or an underscore that needs no escape
SAMPLE = "Hello, world 12!\n\tnaïve \u65e5\u672c \U000f0000"  # words, digits, blanks, and a character without a token


@contextmanager
def refused_as(refuse: Callable[[str], UserError]) -> Iterator[None]:
    """Turn errors and panics of the library into the UserError that `refuse` makes of their first line."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise refuse(first_line(error)) from None


def is_library_error(error: BaseException) -> bool:
    """Return True for an error or a panic. The library raises nothing more precise, and pyo3's class has no module."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def check_character_map(path: Path) -> None:
    """Refuse a precompiled character map whose header claims more than it has: the library would allocate that."""
    data = path.read_bytes()
    # Files have up to 30 MB and are not parsed twice without need. Writers of JSON escape no letters.
    if CHARACTER_MAP.encode() not in data and not ESCAPED_LETTER.search(data):
        return
    for encoded in _values(data, CHARACTER_MAP):
        try:
            decoded = base64.b64decode(encoded) if isinstance(encoded, str) else b""
        except (binascii.Error, ValueError):
            decoded = b""
        size = int.from_bytes(decoded[:4], "little")
        if len(decoded) < 4 or size > len(decoded) - 4 or size % 4:
            raise ValueError(f"`{CHARACTER_MAP}` is damaged")


def _values(data: bytes, key: str) -> list[Any]:
    """Return all values of a key, anywhere in a JSON document, also those of keys that a later one replaces."""
    found: list[Any] = []

    def collect(pairs: list[tuple[str, Any]]) -> None:
        found.extend(value for name, value in pairs if name == key)

    json.loads(data, object_pairs_hook=collect)
    return found


def check_pipeline(backend: Tokenizer) -> None:
    """Raise ValueError if a step of the pipeline fails, or if its replacements would make a text too large."""
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        part = getattr(backend, name)
        if part is None:
            continue
        steps = list(_steps(json.loads(part.__getstate__())))
        if len(steps) > MAX_STEPS:
            raise ValueError(f"`{name}` has {len(steps)} steps, and {MAX_STEPS} is the limit")
        growth = 1
        for step in steps:
            growth *= _growth(step)
            if growth > MAX_GROWTH:
                raise ValueError(f"the replacements of `{name}` make a text more than {MAX_GROWTH} times as long")
    backend.decode(backend.encode(SAMPLE).ids)


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(part, dict):
        return
    nested = [each for value in part.values() if isinstance(value, list) for each in value if isinstance(each, dict)]
    if nested:
        for each in nested:
            yield from _steps(each)
    else:
        yield part


def _growth(step: dict[str, Any]) -> int:
    """Return by how much a step makes a text longer, at most."""
    pattern, content = step.get("pattern"), step.get("content")
    if step.get("type") != "Replace" or not isinstance(pattern, dict) or not isinstance(content, str):
        return 1
    may_be_empty = "Regex" in pattern or pattern.get("String") == ""
    return max(1, len(content) + may_be_empty) if content else 1
