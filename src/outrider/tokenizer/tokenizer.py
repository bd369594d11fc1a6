"""Text to tokens and back, whole or incrementally."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import UserError
from .chat import ChatTemplate
from .library import first_line, is_library_error
from .loading import SPACE, TokenizerParts, read_folder, read_gguf

# Tokens that end a chat message. They count as end-of-text if the chat template contains them.
MESSAGE_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_turn|>", "<|end|>")
INCOMPLETE = "\ufffd"  # the replacement character, which the bytes of an incomplete character decode to
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# Byte-level BPE writes a printable byte as the character with that code, and the other bytes as characters from 256 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}


class Tokenizer:
    def __init__(self, parts: TokenizerParts) -> None:
        self._backend: tokenizers.Tokenizer = parts.backend
        self._prefix = parts.prefix
        self._suffix = parts.suffix
        self._lock = threading.Lock()
        self._template = ChatTemplate(parts.chat_template) if parts.chat_template is not None else None
        self.chat_template: str | None = parts.chat_template
        self.bos_id = self._id(parts.bos)
        self.eos_id = self._id(parts.eos)
        self.unknown_id = self._id(getattr(self._backend.model, "unk_token", None))
        self.vocabulary_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, content in added.items() if content.special)
        named = [parts.eos, *parts.ends, *(end for end in MESSAGE_ENDS if end in (parts.chat_template or ""))]
        ends = (self._id(text) for text in named)
        self.end_ids = frozenset(token for token in ends if token is not None)
        bytes_ids = (self._id(f"<0x{byte:02X}>") for byte in range(256))
        # Tokens of single bytes, for characters without a token.
        self.byte_ids = frozenset(token for token in bytes_ids if token is not None)

    @classmethod
    def open(cls, source: str | Path | Mapping[str, Any]) -> Tokenizer:
        """Open a Hugging Face folder, or the metadata of a GGUF file (Checkpoint.tokenizer_source)."""
        if isinstance(source, Mapping):
            return cls(read_gguf(source))
        return cls(read_folder(Path(source)))

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Tokenize a text.

        add_special: add the tokens that the model expects around a text, such as the beginning-of-text token.
        parse_special: read special tokens that are spelled out in the text, such as `<|im_end|>`.
        """
        if not isinstance(text, str):
            raise UserError(f"the text is a {type(text).__name__}: expected a string")
        try:
            with self._lock:  # the flag belongs to the shared backend
                self._backend.encode_special_tokens = not parse_special
                ids: list[int] = self._backend.encode(text, add_special_tokens=add_special).ids
        except (TypeError, UnicodeEncodeError):
            raise UserError("the text holds a lone surrogate: pass valid Unicode") from None
        except BaseException as error:
            raise _refusal(error, "encode this text") from None
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        checked = self._checked(ids)
        try:
            text: str = self._backend.decode(checked, skip_special_tokens=skip_special)
        except BaseException as error:
            raise _refusal(error, "decode these tokens") from None
        return text

    def token_text(self, token: int) -> str:
        """Decode one token as part of a text; an incomplete character gives the replacement character."""
        text = self.decode([token], skip_special=False)
        # SentencePiece decoders strip the first space of a text: restore it.
        spaced = (self.spelling(token) or "").startswith(SPACE)
        return f" {text}" if spaced and not text.startswith(" ") else text

    def spelling(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it; None for an id without a token."""
        text: str | None = self._backend.id_to_token(token)
        return text

    def spellings(self) -> list[bytes]:
        """Return the bytes of every token, by id; empty for an id without a token."""
        return _token_bytes(self._backend)

    def apply_chat(
        self,
        messages: Any,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation as a prompt. It contains the special tokens: encode it with `add_special=False`.

        continue_final_message: end the prompt within the last message, for the model to continue it.
        variables: further variables of the model's template.
        """
        if self._template is None:
            raise UserError("the model has no chat template: pass a plain prompt instead")
        given = {
            "bos_token": "" if self.bos_id is None else self.spelling(self.bos_id),
            "eos_token": "" if self.eos_id is None else self.spelling(self.eos_id),
            **(variables or {}),
        }
        for name, value in (("tools", tools), ("documents", documents)):
            if value is not None:
                given[name] = list(value)
        return self._template.render(messages, add_generation_prompt, given, continue_final_message)

    @property
    def chat_names(self) -> frozenset[str]:
        """Return the variables that the chat template reads, such as `tools`; empty without a template."""
        return self._template.names if self._template is not None else frozenset()

    def stream(self, skip_special: bool = True) -> Stream:
        return Stream(self, skip_special)

    def _checked(self, ids: Iterable[int]) -> list[int]:
        checked = [int(token) for token in ids]
        for token in checked:
            if not 0 <= token < 2**31:
                raise UserError(f"the token {token} is out of range: ids lie between 0 and {self.vocabulary_size - 1}")
        return checked

    def _id(self, text: str | None) -> int | None:
        token: int | None = self._backend.token_to_id(text) if text is not None else None
        return token


def _refusal(error: BaseException, task: str) -> BaseException:
    """Return the UserError for an error or a panic of the library; anything else, such as an interrupt, as it is."""
    if not is_library_error(error):
        return error
    return UserError(f"the model's tokenizer cannot {task} ({first_line(error)}): check the files of the model")


class Stream:
    """Incremental decoding. All pieces and the flush together equal `decode` of all tokens.

    Each push decodes a short window: the tokens since the last returned text, after an anchor of tokens whose text was
    returned. Without the anchor, a decoder that strips the first space of a text would strip it here.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._anchor: list[int] = []
        self._undecoded: list[int] = []  # tokens whose text was not returned
        self._returned = ""  # text of the anchor
        self._text = ""  # text of the anchor and the undecoded tokens

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain, often none."""
        self._undecoded.append(token)
        text = self._decode(self._anchor + self._undecoded)
        unchanged, self._text = text == self._text, text
        # A run of byte tokens is valid or invalid as a whole. A token without text, a skipped one, does not end it.
        if unchanged or token in self._tokenizer.byte_ids or text.endswith(INCOMPLETE):
            return ""
        return self._take()

    def whole(self, tokens: list[int]) -> str:
        """Decode all tokens at once: the same text as pushing all of them and a flush."""
        return self._decode(tokens)

    def flush(self) -> str:
        """Return the remaining text, with the replacement character for an incomplete one."""
        return self._take()

    def _take(self) -> str:
        piece = self._text[len(self._returned) :]
        self._anchor, self._undecoded = self._undecoded, []
        self._returned = self._text = self._decode(self._anchor)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)


def _token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Return the bytes of every token, by id; empty for an id without a token."""
    added = {token: content.content for token, content in backend.get_added_tokens_decoder().items()}
    spell = _speller(backend)
    spellings: list[bytes] = []
    for token in range(backend.get_vocab_size(with_added_tokens=True)):
        if token in added:
            spellings.append(added[token].encode())
        else:
            spellings.append(spell(backend.id_to_token(token) or ""))
    return spellings


def _speller(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return a function from a token of the vocabulary to its bytes, as the decoder reads them."""
    steps = _decoder_steps(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {})
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return from_byte_level
    replaced = {step["pattern"].get("String", ""): step["content"] for step in steps if step.get("type") == "Replace"}
    replaced |= {step["replacement"]: " " for step in steps if step.get("type") == "Metaspace"}

    def spell(text: str) -> bytes:
        if "ByteFallback" in kinds and (byte := BYTE_TOKEN.fullmatch(text)) is not None:
            return bytes([int(byte[1], 16)])
        for pattern, content in replaced.items():
            text = text.replace(pattern, content) if pattern else text
        return text.encode()

    return spell


def from_byte_level(text: str) -> bytes:
    """Return the bytes of a byte-level token. A token that was added to the vocabulary later is written as it is."""
    if all(character in BYTES for character in text):
        return bytes(BYTES[character] for character in text)
    return text.encode()


def _decoder_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _decoder_steps(part)]
    return [decoder]
