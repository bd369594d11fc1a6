"""Read a tokenizer: from tokenizer.json in a Hugging Face folder, or from the metadata of a GGUF file.

GGUF files hold a vocabulary and not a pipeline, so the pipeline is rebuilt here for the two kinds that they have:
`gpt2`, byte-level BPE with the merges in the file, and `llama`, SentencePiece BPE with scores, from which the merges
are derived.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..errors import UserError
from .library import check_character_map, check_pipeline, refused_as

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # token types of GGUF; the others never come from text
SPACE = "\u2581"  # a space in SentencePiece vocabularies
HARMONY_ENDS = ("<|return|>", "<|call|>")  # of gpt-oss, whose GGUF files name the first alone
MAX_TOKEN = 2**12  # characters; deriving merges takes quadratic time, and real vocabularies have up to 512

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GAPS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True)
class TokenizerParts:
    """The parts of a tokenizer, from a folder or a GGUF file."""

    backend: Tokenizer
    bos: str | None = None
    eos: str | None = None
    ends: tuple[str, ...] = ()  # further end-of-text tokens
    prefix: tuple[int, ...] = ()  # added before a text, besides what the backend's post-processor adds
    suffix: tuple[int, ...] = ()
    chat_template: str | None = None


def read_folder(folder: Path) -> TokenizerParts:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"`{folder}` has no `tokenizer.json`: save the model with a fast tokenizer, or fetch the file")
    with refused_as(lambda reason: UserError(f"`{path}` is not a usable tokenizer ({reason}): fetch it again")):
        check_character_map(path)
        backend = Tokenizer.from_file(str(path))
        # Training settings that would truncate or pad a prompt.
        backend.no_truncation()
        backend.no_padding()
        check_pipeline(backend)
    config = _settings(folder / "tokenizer_config.json")
    return TokenizerParts(
        backend=backend,
        bos=_content(folder, config, "bos_token"),
        eos=_content(folder, config, "eos_token"),
        chat_template=_chat_template(folder, config),
    )


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"`{path}` is not valid JSON ({error}): fetch it again") from None
    return value if isinstance(value, dict) else {}


def _content(folder: Path, config: dict[str, Any], key: str) -> str | None:
    """Return the text of a token, which older files wrap in an object."""
    token = config.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    return _valid_text(folder / "tokenizer_config.json", key, text) if isinstance(text, str) else None


def _valid_text(path: Path, key: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"`{path}`: `{key}` holds a lone surrogate, which is no text: fetch it again") from None
    return text


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"`{file}` is not UTF-8 text: fetch it again") from None
        except OSError as error:
            raise UserError(f"cannot read `{file}`: {error.strerror}") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    path = folder / "tokenizer_config.json"
    return _valid_text(path, "chat_template", template) if isinstance(template, str) else None


@dataclass(frozen=True)
class Splitting:
    """How text is split into words before byte-level BPE."""

    pattern: str | None = None  # None: GPT-2's, which is built into the library
    digits: bool = False  # every digit is a word, split off first
    normal_form: bool = False  # normalize to NFC first
    whole_words: bool = False  # a word that is a token is not merged
    adds_bos: bool = False  # the default if the file does not say


def _cased(ending: str = "") -> str:
    """Return the pattern of words in which upper case comes before lower case, with an ending."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}{_UPPER}*{_LOWER}+{ending}|{first}{_UPPER}+{_LOWER}*{ending}"


_GPT2 = Splitting()
_DIGITS = Splitting(digits=True)
_LLAMA3 = Splitting(f"{_CONTRACTIONS}|{_WORD}|\\p{{N}}{{1,3}}|{_SIGNS}|{_GAPS}", whole_words=True, adds_bos=True)
_QWEN2 = Splitting(f"{_CONTRACTIONS}|{_WORD}|\\p{{N}}|{_SIGNS}|{_GAPS}", normal_form=True)
_QWEN35 = replace(  # combining marks belong to words
    _QWEN2, pattern=rf"{_CONTRACTIONS}|{_MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_GAPS}"
)
_TEKKEN = Splitting(f"{_cased()}|\\p{{N}}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n/]*|{_GAPS}", whole_words=True, adds_bos=True)
_GPT4O = Splitting(rf"{_cased(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_GAPS}")

SPLITTINGS = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": replace(_LLAMA3, whole_words=False, adds_bos=False),  # OLMo 2, Phi-4
    "olmo": _GPT2,
    "gpt-4o": _GPT4O,  # gpt-oss
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


class _GgufFields:
    """Checked access to the metadata below `tokenizer.ggml`."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.path = metadata.get("path", "the GGUF file")
        self.metadata = metadata
        self.tokens = self.texts("tokens")
        types = self.get("token_type") or [NORMAL] * len(self.tokens)
        if not isinstance(types, list):
            raise self.refuse("has a `tokenizer.ggml.token_type` that is not a list")
        if len(types) != len(self.tokens):
            raise self.refuse(f"has {len(self.tokens)} tokens, but {len(types)} token types")
        self.types: list[int] = types
        longest = max(map(len, self.tokens))
        if longest > MAX_TOKEN:
            raise self.refuse(
                f"has a token of {longest} characters (`tokenizer.ggml.tokens`), the limit is {MAX_TOKEN}"
            )

    def get(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def refuse(self, problem: str) -> UserError:
        return UserError(f"`{self.path}` {problem}: its tokenizer cannot be built")

    def texts(self, name: str) -> list[str]:
        values = self.get(name)
        if not isinstance(values, list) or not values or not isinstance(values[0], str):
            raise self.refuse(f"has no `tokenizer.ggml.{name}`")
        return values

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        return default if value is None else bool(value)

    def token(self, name: str) -> int | None:
        value = self.get(f"{name}_token_id")
        return value if type(value) is int and 0 <= value < len(self.tokens) else None

    def text(self, name: str) -> str | None:
        token = self.token(name)
        return None if token is None else self.tokens[token]

    def of_type(self, wanted: int) -> list[str]:
        return [text for text, kind in zip(self.tokens, self.types, strict=True) if kind == wanted]


def read_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        known = "`gpt2` and `llama` are known"
        raise UserError(f"`{metadata.get('path')}` has a tokenizer of the kind `{model}`: only {known}")
    fields = _GgufFields(metadata)
    with refused_as(lambda reason: fields.refuse(f"has an unusable vocabulary ({reason})")):
        backend, adds_bos = _byte_level(fields) if model == "gpt2" else _sentence_piece(fields)
        control = [AddedToken(text, normalized=False, special=True) for text in fields.of_type(CONTROL)]
        backend.add_special_tokens(control)
        # Runs of spaces are left out: they are in the vocabulary and result from merges.
        whole = [text for text in fields.of_type(USER_DEFINED) if text.strip(" ")]
        backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in whole])
        check_pipeline(backend)
    bos, eos = fields.token("bos"), fields.token("eos")
    template = metadata.get("tokenizer.chat_template")
    control_texts = fields.of_type(CONTROL)
    ends = [
        fields.text("eot"),
        fields.text("eom"),
        "<|endoftext|>" if "<|endoftext|>" in control_texts else None,
        *(HARMONY_ENDS if set(HARMONY_ENDS) <= set(control_texts) else ()),
    ]
    return TokenizerParts(
        backend=backend,
        bos=fields.text("bos"),
        eos=fields.text("eos"),
        ends=tuple(text for text in ends if text is not None),
        prefix=(bos,) if bos is not None and fields.flag("add_bos_token", adds_bos) else (),
        suffix=(eos,) if eos is not None and fields.flag("add_eos_token", False) else (),
        chat_template=template if isinstance(template, str) else None,
    )


def _ids(fields: _GgufFields, spellings: list[str]) -> dict[str, int]:
    ids = {text: token for token, text in enumerate(spellings)}
    if len(ids) != len(spellings):
        twice = next(text for token, text in enumerate(spellings) if ids[text] != token)
        raise fields.refuse(f"has the token `{twice}` twice")
    return ids


def _byte_level(fields: _GgufFields) -> tuple[Tokenizer, bool]:
    name = fields.get("pre")
    if not isinstance(name, str) or name not in SPLITTINGS:
        given = (
            f"has the unknown pre-tokenizer `{name}`"
            if name
            else "does not say how to split text (`tokenizer.ggml.pre`)"
        )
        raise fields.refuse(given)
    splitting = SPLITTINGS[name]
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in fields.texts("merges"))]
    try:
        model = models.BPE(_ids(fields, fields.tokens), merges, ignore_merges=splitting.whole_words)
    except Exception as error:  # the library raises nothing more precise
        raise fields.refuse(f"has unusable merges ({error})") from None
    backend = Tokenizer(model)
    if splitting.normal_form:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.digits else []
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, splitting.adds_bos


def _sentence_piece(fields: _GgufFields) -> tuple[Tokenizer, bool]:
    scores = fields.get("scores")
    if not isinstance(scores, list) or len(scores) != len(fields.tokens) or isinstance(scores[0], str):
        raise fields.refuse("has no score for every token (`tokenizer.ggml.scores`)")
    # Files contain runs of plain spaces; the merges need them as the normalizer writes them.
    spellings = [SPACE * len(text) if text and not text.strip(" ") else text for text in fields.tokens]
    ids = _ids(fields, spellings)
    merges = derive_merges(spellings, ids, fields.types, scores)
    model = models.BPE(ids, merges, unk_token=fields.text("unknown"), fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    prefix_space = fields.flag("add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix_space else replace
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix_space else steps)
    return backend, True


def derive_merges(
    spellings: list[str], ids: dict[str, int], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Return every pair of tokens that joins into a third, by score, then by the longest left side."""
    pieces = [token for token, kind in enumerate(types) if kind in (NORMAL, USER_DEFINED)]
    # User-defined tokens have no meaningful score: they come first, in the order of the file.
    pieces.sort(key=lambda token: (-scores[token] if types[token] == NORMAL else -math.inf, token))
    merges: list[tuple[str, str]] = []
    for token in pieces:
        piece = spellings[token]
        for cut in range(len(piece) - 1, 0, -1):
            if (left := piece[:cut]) in ids and (right := piece[cut:]) in ids:
                merges.append((left, right))
    return merges
