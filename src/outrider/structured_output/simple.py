"""Tell grammars that are certainly cheap from those that must be compiled in a child process first.

Cheap are the schemas that applications and their libraries write: objects, lists, enumerations and references, of
limited size and depth. Everything that makes the backend intersect or count is left to the check.
"""

from __future__ import annotations

import json
from typing import Any

MAX_CHARACTERS = 2**15  # of a cheap grammar: up to 0.1 s to compile, 2 MB of memory
MAX_SCHEMAS = 400  # subschemas of a cheap schema
MAX_DEPTH = 24  # nested subschemas; each takes some kB of stack
MAX_REFERENCES = 64  # in a chain, each takes 2.3 kB of stack
MAX_COUNT = 1000  # of characters or items

_ANNOTATIONS = frozenset(
    ["$schema", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "strict"]
)
_VALUES = frozenset(["type", "enum", "const", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
_COUNTS = frozenset(["minLength", "maxLength", "minItems", "maxItems"])
_NAMED = frozenset(["properties", "$defs", "definitions"])  # subschemas by name


def is_simple(kind: str, text: str) -> bool:
    """Return True if a grammar is certainly cheap to compile and to follow."""
    if kind == "json_object":
        return True
    if kind not in ("json", "choice") or len(text) > MAX_CHARACTERS:
        return False
    if kind == "choice":
        return True
    try:
        return _Count().allows(json.loads(text), 0)
    except (ValueError, RecursionError):
        return False


class _Count:
    """What a schema holds so far."""

    def __init__(self) -> None:
        self.schemas = self.references = 0

    def allows(self, schema: Any, depth: int) -> bool:
        """Return True if a schema, with all that it holds, is within the limits."""
        self.schemas += 1
        if isinstance(schema, bool):
            return True
        if not isinstance(schema, dict) or depth > MAX_DEPTH or self.schemas > MAX_SCHEMAS:
            return False
        keys = schema.keys() - _ANNOTATIONS
        if "$ref" in keys:
            self.references += 1
            # A reference or a union next to other keys is an intersection.
            if keys - {"$ref", "$defs", "definitions"} or self.references > MAX_REFERENCES:
                return False
        if "anyOf" in keys and keys - {"anyOf", "$defs", "definitions"}:
            return False
        return all(self._allows_key(key, schema[key], depth) for key in keys)

    def _allows_key(self, key: str, value: Any, depth: int) -> bool:
        if key in _VALUES or key == "$ref":
            return True
        if key in _COUNTS:
            return type(value) is int and 0 <= value <= MAX_COUNT
        if key in ("items", "additionalProperties"):
            return self.allows(value, depth + 1)
        if key == "anyOf":
            return isinstance(value, list) and all(self.allows(each, depth + 1) for each in value)
        return key in _NAMED and isinstance(value, dict) and all(self.allows(v, depth + 1) for v in value.values())
