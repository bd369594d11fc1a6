"""The bytes that each token stands for, whatever kind of vocabulary it comes from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# Byte-level vocabularies write a byte as the character of that number where it can be seen; the others follow at 256.
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNSEEN = [byte for byte in range(256) if byte not in _SEEN]
BYTES = {chr(byte): byte for byte in _SEEN} | {chr(256 + place): byte for place, byte in enumerate(_UNSEEN)}


def spellings(backend: tokenizers.Tokenizer) -> list[bytes]:
    """By id; empty for an id without a token. Special tokens are spelled as they are written."""
    added = {token: content.content for token, content in backend.get_added_tokens_decoder().items()}
    spell = _speller(backend)
    found: list[bytes] = []
    for token in range(backend.get_vocab_size(with_added_tokens=True)):
        if token in added:
            found.append(added[token].encode())
        else:
            found.append(spell(backend.id_to_token(token) or ""))
    return found


def _speller(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How the vocabulary's own tokens are spelled, as its decoder reads them."""
    steps = _decoder_steps(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {})
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _from_byte_level
    replaced = {step["pattern"].get("String", ""): step["content"] for step in steps if step.get("type") == "Replace"}
    replaced |= {step["replacement"]: " " for step in steps if step.get("type") == "Metaspace"}

    def spell(text: str) -> bytes:
        if "ByteFallback" in kinds and (byte := BYTE_TOKEN.fullmatch(text)) is not None:
            return bytes([int(byte[1], 16)])
        for pattern, content in replaced.items():
            text = text.replace(pattern, content) if pattern else text
        return text.encode()

    return spell


def _from_byte_level(text: str) -> bytes:
    if all(character in BYTES for character in text):
        return bytes(BYTES[character] for character in text)
    return text.encode()


def _decoder_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _decoder_steps(part)]
    return [decoder]
