"""JSON read character by character: is what came so far the beginning of a valid text, and how deep are we in it?"""

from __future__ import annotations

import re
from enum import Enum, auto

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
