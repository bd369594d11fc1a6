"""Text to tokens and back, whole or incrementally."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import UserError
from .chat import ChatTemplate
from .library import first_line, is_library_error
from .loading import SPACE, TokenizerParts, read_folder, read_gguf
from .special_texts import ChatPrompt, Cutter, any_of, can_cut

# Tokens that end a chat message. They count as end-of-text if the chat template contains them.
MESSAGE_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_turn|>", "<|end|>")
LONG_TEXT = 4096  # characters from which a text is tokenized without the interpreter lock
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
        self._template = ChatTemplate(parts.chat_template) if parts.chat_template is not None else None
        self.chat_template: str | None = parts.chat_template
        self.bos_id = self._id(parts.bos)
        self.eos_id = self._id(parts.eos)
        self.unknown_id = self._id(getattr(self._backend.model, "unk_token", None))
        self.vocabulary_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, content in added.items() if content.special)
        specials = [content.content for content in added.values() if content.special]
        self._specials = any_of(specials)
        self._cut_specials = any_of(filter(can_cut, specials))
        named = [parts.eos, *parts.ends, *(end for end in MESSAGE_ENDS if end in (parts.chat_template or ""))]
        ends = (self._id(text) for text in named)
        self.end_ids = frozenset(token for token in ends if token is not None)
        kinds = [step.get("type") for step in _decoder_steps(_decoder_state(self._backend))]
        self.is_byte_level = kinds == ["ByteLevel"]  # the decoder joins the bytes of all tokens, and nothing else
        self.has_byte_level = "ByteLevel" in kinds
        self._token_bytes: dict[int, bytes] = {}
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
        spelled = not parse_special and self._specials is not None and self._specials.search(text)
        backend = self._literal_backend if spelled else self._backend
        try:
            if len(text) < LONG_TEXT:
                ids: list[int] = backend.encode(text, add_special_tokens=add_special).ids
            else:  # unlike `encode`, this releases the interpreter lock, so that other threads run meanwhile
                ids = backend.encode_batch([text], add_special_tokens=add_special)[0].ids
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

    def apply_chat(self, messages: Any, *arguments: Any, **settings: Any) -> str:
        """Return the text of `chat_prompt`."""
        return self.chat_prompt(messages, *arguments, **settings).text

    def chat_prompt(
        self,
        messages: Any,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Render a conversation as a prompt; `encode_chat` tokenizes it.

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
        cutter = Cutter(self._cut_specials)
        for name, value in (("tools", tools), ("documents", documents)):
            if value is not None:
                given[name] = cutter.cut(list(value))
        text = self._template.render(messages, add_generation_prompt, given, continue_final_message, cutter.cut)
        return cutter.prompt(text)

    def encode_chat(self, prompt: ChatPrompt, add_special: bool = False) -> list[int]:
        """Tokenize a rendered conversation. Special tokens of the template count, those in messages are plain text."""
        first, *rest = prompt.pieces
        tokens = self.encode(first, add_special)
        for piece in rest:
            tokens += self.encode(piece, add_special=False)
        return tokens

    @property
    def chat_names(self) -> frozenset[str]:
        """Return the variables that the chat template reads, such as `tools`; empty without a template."""
        return self._template.names if self._template is not None else frozenset()

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """A copy of the backend that reads special tokens as plain text: a flag of the shared one would need a lock."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token as a byte-level decoder reads them; none for an id without a token."""
        if (known := self._token_bytes.get(token)) is None:
            (checked,) = self._checked([token])
            known = self._token_bytes[token] = from_byte_level(self.spelling(checked) or "")
        return known

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

    A byte-level decoder joins the bytes of the tokens, so they are decoded as they come. With other decoders, each push
    decodes a short window: the tokens since the last returned text, after an anchor of tokens whose text was returned.
    Without the anchor, a decoder that strips the first space of a text would strip it here.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        self._anchor: list[int] = []
        self._undecoded: list[int] = []  # tokens whose text was not returned
        self._returned = ""  # text of the anchor
        self._text: str | None = ""  # text of the anchor and the undecoded tokens; None: not decoded yet

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain, often none."""
        if self._skip_special and token in self._tokenizer.special_ids:
            return ""
        if self._bytes is not None:
            return self._bytes.decode(self._tokenizer.token_bytes(token))
        self._undecoded.append(token)
        if token in self._tokenizer.byte_ids:
            # A run of byte tokens is valid or invalid as a whole: to decode it at each token would take quadratic time.
            self._text = None
            return ""
        before = self._text if self._text is not None else self._decode(self._anchor + self._undecoded[:-1])
        self._text = text = self._decode(self._anchor + self._undecoded)
        # A token without text does not end a run of byte tokens.
        if text == before or (self._tokenizer.has_byte_level and text.endswith(INCOMPLETE)):
            return ""
        return self._take()

    def whole(self, tokens: list[int]) -> str:
        """Decode all tokens at once: the same text as pushing all of them and a flush."""
        return self._decode(tokens)

    def flush(self) -> str:
        """Return the remaining text, with the replacement character for an incomplete one."""
        return self._bytes.decode(b"", final=True) if self._bytes is not None else self._take()

    def _take(self) -> str:
        text = self._text if self._text is not None else self._decode(self._anchor + self._undecoded)
        piece = text[len(self._returned) :]
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
    steps = _decoder_steps(_decoder_state(backend))
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


def _decoder_state(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return the decoder's settings; empty without a decoder."""
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    return state


def _decoder_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _decoder_steps(part)]
    return [decoder]
