"""Texts of single tokens. A character whose bytes span several tokens belongs to the token that completes it."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Sequence

from ..types import Draft
from .tokenizer import Tokenizer

TOKEN_CACHE = 65536  # cached token texts, a few megabytes
REPLACEMENT = "\ufffd"  # stands for bytes that are no character
LONGEST = 4  # bytes of a character in UTF-8, so at most as many tokens
_new_decoder = codecs.getincrementaldecoder("utf-8")


class TokenTexts:
    """Texts and bytes of tokens, alone and in a text. Cached, because logprobs and traces repeat them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text: Callable[[int], str] = functools.lru_cache(TOKEN_CACHE)(tokenizer.token_text)
        self._spellings = functools.cache(tokenizer.spellings)

    def spelling(self, token: int) -> bytes:
        spellings = self._spellings()
        return spellings[token] if token < len(spellings) else b""  # a model may have more rows than tokens

    def name(self, token: int) -> str:
        """Return the text of a token; if its bytes are no text, OpenAI's name for them, as in `bytes:\\xe2\\x82`."""
        text = self.text(token)
        if REPLACEMENT not in text:
            return text
        spelling = self.spelling(token)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)

    def of(self, tokens: Sequence[int], before: Sequence[int] = (), final: bool = False) -> list[str]:
        """Return the characters that each token completes, after the tokens `before`; often none for a part of one.

        final: the text ends here, so the last token also has the replacement character of an incomplete one.
        """
        texts: list[str] = []
        incomplete = self.incomplete(before)
        for token in tokens:
            text, incomplete = self._append(incomplete, token)
            texts.append(text)
        if final and texts:
            texts[-1] += incomplete.decode(errors="replace")
        return texts

    def of_draft(self, draft: Draft, before: Sequence[int] = ()) -> list[str]:
        """Return the characters that each drafted token completes on its path, after the tokens `before`."""
        texts: list[str] = []
        incomplete = [self.incomplete(before)]  # [index + 1], so that parent -1 is the text
        for token, parent in zip(draft.tokens, draft.parent_indices(), strict=True):
            text, rest = self._append(incomplete[parent + 1], token)
            texts.append(text)
            incomplete.append(rest)
        return texts

    def incomplete(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of an incomplete character at the end of these tokens."""
        incomplete = b""
        for token in tokens[-LONGEST:]:  # the bytes show where a character begins
            incomplete = self._append(incomplete, token)[1]
        return incomplete

    def _append(self, incomplete: bytes, token: int) -> tuple[str, bytes]:
        """Return the characters that `token` completes after `incomplete`, and the bytes that are incomplete then."""
        decoder = _new_decoder("replace")
        text = decoder.decode(incomplete + self.spelling(token))
        rest = decoder.getstate()[0]
        return (text if incomplete or rest else self.text(token)), rest


def spelled(text: str, spelling: bytes) -> str:
    """Return the text of a token for display; its bytes, as `<0xF0>`, if it completes no character."""
    return text or "".join(f"<0x{byte:02X}>" for byte in spelling)
