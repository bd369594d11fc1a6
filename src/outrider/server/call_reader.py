"""One tool call as it is being written: its name, and its arguments exactly as they come."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

from .json_scan import JsonScanner, Place

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
