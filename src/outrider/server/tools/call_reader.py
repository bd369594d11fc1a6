"""Incremental readers: `JsonScanner` for JSON, and `CallReader` for one tool call in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Container
from enum import Enum, auto
from typing import Any

SPACE = " \t\r\n"
SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null", re.ASCII)
SCALAR_FIRST = frozenset("-0123456789tfn")
SCALAR_NEXT = frozenset("+-.0123456789Eaeflnrstu")
ESCAPED = frozenset('"\\/bfnrt')
HEX = frozenset("0123456789abcdefABCDEF")
CLOSER = {"{": "}", "[": "]"}


class JsonState(Enum):
    """The tokens that may come next."""

    VALUE = auto()
    FIRST_VALUE = auto()  # or the end of the list
    KEY = auto()
    FIRST_KEY = auto()  # or the end of the object
    COLON = auto()
    COMMA = auto()  # or the end of the open object or list
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()
    NOTHING = auto()  # the value is complete


class JsonScanner:
    """Checks character by character that a text is the beginning of one JSON value.

    Only objects and lists are known to be complete without the character that follows.
    """

    def __init__(self) -> None:
        self.state = JsonState.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._scalar = ""
        self._digits = 0  # hex digits of \\uXXXX that are still missing

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def done(self) -> bool:
        return self.state is JsonState.NOTHING

    @property
    def in_text(self) -> bool:
        return self.state is JsonState.STRING

    def feed(self, character: str) -> bool:
        """Return whether the text may continue with this character; after False the scanner is invalid."""
        match self.state:
            case JsonState.STRING:
                return self._string(character)
            case JsonState.ESCAPE | JsonState.HEX:
                return self._escape(character)
            case JsonState.SCALAR:
                return self._in_scalar(character)
        if character in SPACE:
            return True
        match self.state:
            case JsonState.VALUE:
                return self._begin(character)
            case JsonState.FIRST_VALUE:
                return self._close("]") if character == "]" else self._begin(character)
            case JsonState.FIRST_KEY | JsonState.KEY:
                return self._key(character)
            case JsonState.COLON:
                self.state = JsonState.VALUE
                return character == ":"
            case JsonState.COMMA:
                return self._after(character)
        return False

    def _begin(self, character: str) -> bool:
        if character in CLOSER:
            self._open.append(character)
            self.state = JsonState.FIRST_KEY if character == "{" else JsonState.FIRST_VALUE
        elif character == '"':
            self.state, self._is_key = JsonState.STRING, False
        elif character in SCALAR_FIRST:
            self.state, self._scalar = JsonState.SCALAR, character
        else:
            return False
        return True

    def _key(self, character: str) -> bool:
        if character == "}" and self.state is JsonState.FIRST_KEY:
            return self._close("}")
        self.state, self._is_key = JsonState.STRING, True
        return character == '"'

    def _string(self, character: str) -> bool:
        if character == '"':
            if self._is_key:
                self.state = JsonState.COLON
            else:
                self._value_ended()
        elif character == "\\":
            self.state = JsonState.ESCAPE
        return character >= " "

    def _escape(self, character: str) -> bool:
        if self.state is JsonState.ESCAPE and character == "u":
            self.state, self._digits = JsonState.HEX, 4
            return True
        if self.state is JsonState.ESCAPE:
            self.state = JsonState.STRING
            return character in ESCAPED
        self._digits -= 1
        self.state = JsonState.HEX if self._digits else JsonState.STRING
        return character in HEX

    def _in_scalar(self, character: str) -> bool:
        if character in SCALAR_NEXT:
            self._scalar += character
            return True
        if SCALAR.fullmatch(self._scalar) is None:
            return False
        self._value_ended()
        return character in SPACE or self._after(character)

    def _after(self, character: str) -> bool:
        if not self._open:
            return False
        if character == ",":
            self.state = JsonState.KEY if self._open[-1] == "{" else JsonState.VALUE
            return True
        return self._close(character)

    def _close(self, character: str) -> bool:
        if CLOSER[self._open[-1]] != character:
            return False
        self._open.pop()
        self._value_ended()
        return True

    def _value_ended(self) -> None:
        self.state = JsonState.COMMA if self._open else JsonState.NOTHING


ARGUMENTS = ("arguments", "parameters")
MEMBERS = frozenset(("name", *ARGUMENTS, "type", "id", "index"))


class CallReader:
    """Reads {"name": ..., "arguments": {...}}, with the other members that models add, in any order.

    The call is certain (`name` is set) once it names a tool and its arguments have begun: an empty object, or a key
    and the beginning of a value. From then on `take` returns the arguments as they arrive. Other orders and notations
    (arguments first, or as a string) are understood when the object is complete.
    """

    def __init__(self, names: Container[str], bare_arguments_of: str | None = None, may_omit: bool = False) -> None:
        self._names = names
        self._scanner = JsonScanner()
        self._raw: list[str] = []
        self._may_omit = may_omit  # accept a call without arguments
        self._only_arguments = bare_arguments_of is not None
        self._key: str | None = None  # key of the member that is being read
        self._begin = 0  # index in `_raw` where the current key or value begins
        self._candidate: str | None = None
        self._new_arguments: list[str] = []
        self.name: str | None = None
        self.inside = False  # within the arguments
        self.done = False
        if bare_arguments_of is not None:
            for character in f'{{"name": {json.dumps(bare_arguments_of)}, "arguments": ':
                self.feed(character)

    def feed(self, character: str) -> bool:
        """Return whether the text can still be a call."""
        # Models write line breaks into strings, which JSON wants escaped: escape them here.
        if self._scanner.in_text and character < " ":
            return all(self._feed(escaped) for escaped in json.dumps(character)[1:-1])
        return self._feed(character)

    def take(self) -> str:
        """Return the arguments that arrived since the last `take`."""
        text = "".join(self._new_arguments)
        self._new_arguments.clear()
        return text

    def _feed(self, character: str) -> bool:
        before, depth = self._scanner.state, self._scanner.depth
        if not self._scanner.feed(character):
            return False
        if self.name is None:
            self._raw.append(character)
        if self.inside:
            self._in_arguments(character, before, depth)
        elif self.name is None and depth == 1 and not self._member(character, before):
            return False
        if self._scanner.done:
            self.done = True
            return self.name is not None or self._complete()
        return True

    def _in_arguments(self, character: str, before: JsonState, depth: int) -> None:
        self._new_arguments.append(character)
        ended = self._scanner.depth == 1
        begun = depth == 2 and before is JsonState.VALUE and self._scanner.state is not JsonState.VALUE
        if self.name is None and (ended or begun):
            self.name = self._candidate
        if ended:
            self.inside = False
            self.done = self._only_arguments

    def _member(self, character: str, before: JsonState) -> bool:
        """Read the members of the call until its arguments begin."""
        now, last = self._scanner.state, len(self._raw) - 1
        if before in (JsonState.KEY, JsonState.FIRST_KEY) and now is JsonState.STRING:
            self._begin = last
        elif before is JsonState.STRING and now is JsonState.COLON:
            self._key = json.loads("".join(self._raw[self._begin :]))
            return self._key in MEMBERS
        elif before is JsonState.VALUE and now is not JsonState.VALUE:
            self._begin = last
            self.inside = character == "{" and self._key in ARGUMENTS and self._candidate is not None
            self._new_arguments = [character] if self.inside else []
        elif before is JsonState.STRING and now is JsonState.COMMA and self._key == "name":
            self._candidate = json.loads("".join(self._raw[self._begin :]))
            return self._candidate in self._names
        return True

    def _complete(self) -> bool:
        """Interpret the complete object, if the order of its members did not allow it earlier."""
        try:
            call = json.loads("".join(self._raw))
        except (ValueError, RecursionError):
            return False
        name = call.get("name")
        omitted: Any = {} if self._may_omit else None
        arguments = next((call[key] for key in ARGUMENTS if key in call), omitted)
        text = _as_text(arguments)
        if not isinstance(name, str) or name not in self._names or text is None:
            return False
        self.name, self._new_arguments = name, [text]
        return True


def _as_text(arguments: Any) -> str | None:
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, str):  # JSON in a string
        try:
            return arguments if isinstance(json.loads(arguments), dict) else None
        except (ValueError, RecursionError):
            return None
    return None
