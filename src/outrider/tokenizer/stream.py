"""Incremental decoding: text as soon as it is certain, in whole characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import Tokenizer

UNFINISHED = "\ufffd"  # what the bytes of half a character decode to


class Stream:
    """Push tokens, get text. All pieces and the flush together equal `decode` of all tokens.

    Only a short window of tokens is decoded again at each push: those since the last certain text, behind an anchor
    of tokens that have text. Without the anchor a decoder that strips the first space of a text would strip it here.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._anchor: list[int] = []
        self._pending: list[int] = []
        self._given = ""  # text of the anchor, all of it given out
        self._text = ""  # text of anchor and pending

    def push(self, token: int) -> str:
        """The text that this token makes certain, often none."""
        self._pending.append(token)
        text = self._decode(self._anchor + self._pending)
        unchanged, self._text = text == self._text, text
        # A run of byte tokens is valid or not as a whole; a token without text, a skipped one, does not end it.
        if unchanged or token in self._tokenizer.byte_ids or text.endswith(UNFINISHED):
            return ""
        return self._give()

    def whole(self, tokens: list[int]) -> str:
        """What pushing all of them and a flush would give together."""
        return self._decode(tokens)

    def flush(self) -> str:
        """What is left at the end: the replacement character for what never became whole."""
        return self._give()

    def _give(self) -> str:
        piece = self._text[len(self._given) :]
        self._anchor, self._pending = self._pending, []
        self._given = self._text = self._decode(self._anchor)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)
