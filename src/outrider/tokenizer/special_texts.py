"""Special tokens that messages spell out: they stay plain text, so that no message can imitate the template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

CUT = "\ufdd0"  # a Unicode noncharacter, which no text contains
# Templates look for these in earlier answers, to leave out their reasoning.
KEPT = frozenset(("<think>", "</think>"))


class ChatPrompt(NamedTuple):
    """A conversation as the chat template writes it."""

    text: str
    pieces: list[str]  # of the text, to be tokenized one by one: no special token of a message is whole in any of them


class Cutter:
    """Cuts special tokens in the texts of messages, behind their first character."""

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self.pattern = pattern
        self.used = False

    def cut(self, value: Any) -> Any:
        """Return the value with CUT in each special token that one of its texts spells out."""
        if isinstance(value, str):
            return self._cut_text(value)
        if isinstance(value, Mapping):
            return {self.cut(key): self.cut(item) for key, item in value.items()}
        return [self.cut(item) for item in value] if isinstance(value, list | tuple) else value

    def _cut_text(self, text: str) -> str:
        if self.pattern is None or self.pattern.search(text) is None:
            return text
        self.used = True
        return self.pattern.sub(lambda match: match[0][0] + CUT + match[0][1:], text.replace(CUT, ""))

    def prompt(self, rendered: str) -> ChatPrompt:
        """Return the prompt of a conversation whose messages were cut."""
        pieces = rendered.split(CUT) if self.used else [rendered]
        return ChatPrompt("".join(pieces), pieces)


def any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern for any of these texts, the longest first; None if there is none."""
    found = sorted(filter(None, set(texts)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found))) if found else None


def can_cut(text: str) -> bool:
    """Return whether a special token is cut in messages. One character cannot be."""
    return len(text) > 1 and text not in KEPT
