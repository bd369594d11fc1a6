"""One tool call as it is being written: its name, and its arguments exactly as they come."""

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


class Place(Enum):
    """What may come next."""

    VALUE = auto()
    FIRST_VALUE = auto()  # or the end of the list
    KEY = auto()
    FIRST_KEY = auto()  # or the end of the object
    COLON = auto()
    COMMA = auto()  # or the end of what is open
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()
    NOTHING = auto()  # the value is complete


class JsonScanner:
    """One value, of which only an object or a list is known to be complete without seeing what follows."""

    def __init__(self) -> None:
        self.place = Place.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._scalar = ""
        self._digits = 0  # still to come of \\uXXXX

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def done(self) -> bool:
        return self.place is Place.NOTHING

    @property
    def in_text(self) -> bool:
        return self.place is Place.STRING

    def feed(self, character: str) -> bool:
        """Whether the text may go on with this character. After a no, the scanner is of no further use."""
        match self.place:
            case Place.STRING:
                return self._string(character)
            case Place.ESCAPE | Place.HEX:
                return self._escape(character)
            case Place.SCALAR:
                return self._in_scalar(character)
        if character in SPACE:
            return True
        match self.place:
            case Place.VALUE:
                return self._begin(character)
            case Place.FIRST_VALUE:
                return self._close("]") if character == "]" else self._begin(character)
            case Place.FIRST_KEY | Place.KEY:
                return self._key(character)
            case Place.COLON:
                self.place = Place.VALUE
                return character == ":"
            case Place.COMMA:
                return self._after(character)
        return False

    def _begin(self, character: str) -> bool:
        if character in CLOSER:
            self._open.append(character)
            self.place = Place.FIRST_KEY if character == "{" else Place.FIRST_VALUE
        elif character == '"':
            self.place, self._is_key = Place.STRING, False
        elif character in SCALAR_FIRST:
            self.place, self._scalar = Place.SCALAR, character
        else:
            return False
        return True

    def _key(self, character: str) -> bool:
        if character == "}" and self.place is Place.FIRST_KEY:
            return self._close("}")
        self.place, self._is_key = Place.STRING, True
        return character == '"'

    def _string(self, character: str) -> bool:
        if character == '"':
            if self._is_key:
                self.place = Place.COLON
            else:
                self._value_ended()
        elif character == "\\":
            self.place = Place.ESCAPE
        return character >= " "

    def _escape(self, character: str) -> bool:
        if self.place is Place.ESCAPE and character == "u":
            self.place, self._digits = Place.HEX, 4
            return True
        if self.place is Place.ESCAPE:
            self.place = Place.STRING
            return character in ESCAPED
        self._digits -= 1
        self.place = Place.HEX if self._digits else Place.STRING
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
            self.place = Place.KEY if self._open[-1] == "{" else Place.VALUE
            return True
        return self._close(character)

    def _close(self, character: str) -> bool:
        if CLOSER[self._open[-1]] != character:
            return False
        self._open.pop()
        self._value_ended()
        return True

    def _value_ended(self) -> None:
        self.place = Place.COMMA if self._open else Place.NOTHING


ARGUMENTS = ("arguments", "parameters")
MEMBERS = frozenset(("name", *ARGUMENTS, "type", "id", "index"))


class CallReader:
    """Reads {"name": ..., "arguments": {...}} in any order, with what else models put beside them.

    The call counts as made (`name` is set) once it names a tool and its arguments have begun as JSON does: an object
    that is empty, or has a key and the beginning of a value. From there on `take` gives the arguments as they come.
    Other orders and spellings (arguments first, or as a string) are understood when the object is complete.
    """

    def __init__(self, names: Container[str], bare_arguments_of: str | None = None, may_omit: bool = False) -> None:
        self._names = names
        self._scanner = JsonScanner()
        self._raw: list[str] = []
        self._may_omit = may_omit  # a call without arguments is one all the same
        self._only_arguments = bare_arguments_of is not None
        self._key: str | None = None  # of the member of the call that is being read
        self._begin = 0  # where in `_raw` the current key or value begins
        self._candidate: str | None = None
        self._pending: list[str] = []
        self.name: str | None = None
        self.inside = False  # the arguments
        self.done = False
        if bare_arguments_of is not None:
            for character in f'{{"name": {json.dumps(bare_arguments_of)}, "arguments": ':
                self.feed(character)

    def feed(self, character: str) -> bool:
        """Whether this is still a call."""
        # Models write line breaks into strings where JSON wants them escaped; the meaning is clear.
        if self._scanner.in_text and character < " ":
            return all(self._feed(each) for each in json.dumps(character)[1:-1])
        return self._feed(character)

    def take(self) -> str:
        """The arguments that came since the last call of this."""
        text = "".join(self._pending)
        self._pending.clear()
        return text

    def _feed(self, character: str) -> bool:
        before, depth = self._scanner.place, self._scanner.depth
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
            return self.name is not None or self._whole()
        return True

    def _in_arguments(self, character: str, before: Place, depth: int) -> None:
        self._pending.append(character)
        ended = self._scanner.depth == 1
        begun = depth == 2 and before is Place.VALUE and self._scanner.place is not Place.VALUE
        if self.name is None and (ended or begun):
            self.name = self._candidate
        if ended:
            self.inside = False
            self.done = self._only_arguments

    def _member(self, character: str, before: Place) -> bool:
        """Follow the members of the call itself, until its arguments begin."""
        now, last = self._scanner.place, len(self._raw) - 1
        if before in (Place.KEY, Place.FIRST_KEY) and now is Place.STRING:
            self._begin = last
        elif before is Place.STRING and now is Place.COLON:
            self._key = json.loads("".join(self._raw[self._begin :]))
            return self._key in MEMBERS
        elif before is Place.VALUE and now is not Place.VALUE:
            self._begin = last
            self.inside = character == "{" and self._key in ARGUMENTS and self._candidate is not None
            self._pending = [character] if self.inside else []
        elif before is Place.STRING and now is Place.COMMA and self._key == "name":
            self._candidate = json.loads("".join(self._raw[self._begin :]))
            return self._candidate in self._names
        return True

    def _whole(self) -> bool:
        """What the members say together, where their order told nothing on the way."""
        try:
            call = json.loads("".join(self._raw))
        except (ValueError, RecursionError):
            return False
        name = call.get("name")
        omitted: Any = {} if self._may_omit else None
        arguments = next((call[key] for key in ARGUMENTS if key in call), omitted)
        written = _written(arguments)
        if not isinstance(name, str) or name not in self._names or written is None:
            return False
        self.name, self._pending = name, [written]
        return True


def _written(arguments: Any) -> str | None:
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, str):  # JSON in a string
        try:
            return arguments if isinstance(json.loads(arguments), dict) else None
        except (ValueError, RecursionError):
            return None
    return None
