"""What a tokenizer is made of, wherever it was read from."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True)
class Parts:
    backend: tokenizers.Tokenizer
    bos: str | None = None
    eos: str | None = None
    ends: tuple[str, ...] = ()  # further tokens that end a text
    prefix: tuple[int, ...] = ()  # put before a text, beyond what the backend's own post-processor adds
    suffix: tuple[int, ...] = ()
    chat_template: str | None = None
