"""Wrap streamed text at spaces, for a terminal. Code between fences keeps its lines."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable

from rich.cells import cell_len

FENCE = "```"
MAX_HELD = 24  # characters of a word that are held back; longer ones, such as addresses, may end beyond the margin
PARTS = re.compile(r"\n|[^\S\n]+|\S+")  # a line break, a run of spaces, a word


class WordWrap:
    """Writes text as it arrives: a word is held back until its end is known, except in scripts without spaces."""

    def __init__(self, write: Callable[[str], None], width: Callable[[], int] | None = None) -> None:
        self.write = write
        self.width = width or (lambda: shutil.get_terminal_size().columns)
        self.rest = ""  # text that is not written yet
        self.space = ""  # before the next word
        self.column = 0
        self.line = ""  # text of the current line of the source
        self.in_code = False

    def add(self, text: str) -> None:
        parts = PARTS.findall(self.rest + text)
        self.rest = "" if not parts or parts[-1] == "\n" else parts.pop()
        for part in parts:
            self._put(part)
        if len(self.rest) > MAX_HELD or cell_len(self.rest) > len(self.rest):
            self._put(self.rest)
            self.rest = ""

    def close(self) -> None:
        """Write what was held back, and end the line."""
        if self.rest:
            self._put(self.rest)
        self.rest = ""
        self._put("\n")

    def _put(self, part: str) -> None:
        if part == "\n":
            if self.line.lstrip().startswith(FENCE):
                self.in_code = not self.in_code
            self.write(self.space + part)
            self.column, self.line, self.space = 0, "", ""
            return
        if part.isspace():
            self.space += part
            return
        wraps = not self.in_code and bool(self.space) and bool(self.line.strip())
        self.line += self.space + part
        size = cell_len(self.space + part)
        if wraps and self.column + size > self.width():
            self.write("\n" + part)
            self.column = cell_len(part)
        else:
            self.write(self.space + part)
            # The terminal breaks a word that is wider than the line; a line that is just full is not broken.
            self.column = (self.column + size - 1) % max(self.width(), 1) + 1
        self.space = ""
