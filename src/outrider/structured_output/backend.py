"""llguidance: the vocabulary as it expects it, its limits, and how each kind of grammar is written for it.

The worker process imports this module, so it imports neither numpy nor the tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..errors import UserError

MAX_CHARACTERS = 2**17  # of a grammar; longer ones may take many seconds to compile
# Limits of llguidance's lexer, a fifth of its defaults: about 0.2 s up to the first mask, and 40 MB of memory.
LEXER_FUEL, LEXER_STATES = 200_000, 50_000
# Work for one mask, half of llguidance's defaults: about 20 ms for the lexer and 3 ms for the parser (Neoverse-N1).
STEP_FUEL, STEP_ITEMS = 100_000, 25_000
ANY_OBJECT = '{"type": "object"}'
# Whitespace between two JSON tokens is limited: small models may otherwise write it without end.
WHITESPACE = r"[ \t\n\r]{1,24}"


def load_library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError("`structured` needs llguidance: run `pip install 'outrider[structured]'`") from None
    return llguidance


class BackendVocabulary:
    """The tokenizer interface that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokens: list[bytes],
        special_token_ids: list[int],
        end_tokens: Collection[int],
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.tokens, self.special_token_ids, self.end_tokens = tokens, special_token_ids, sorted(end_tokens)
        self.eos_token_id = self.end_tokens[0]
        self._encode = encode
        self._longest = max(map(len, tokens))
        excluded = frozenset(special_token_ids)
        self._ids = {spelling: token for token, spelling in enumerate(tokens) if token not in excluded and spelling}

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize a text as the model would within another text, such that the bytes are exactly the same."""
        data = text.encode() if isinstance(text, str) else text
        if self._encode is None:
            return self._greedy(data)
        written = data.decode(errors="ignore")
        # SentencePiece tokenizers add a space before a text, but not after a line break.
        for lead in ("", "\n"):
            ids = self._encode(lead + written)
            for skipped in range(3 if lead else 1):
                if b"".join(self.tokens[token] for token in ids[skipped:]) == data:
                    return ids[skipped:]
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """Take the longest matching token repeatedly, up to a byte that no token begins with."""
        tokens, start = [], 0
        while start < len(data):
            sizes = range(min(self._longest, len(data) - start), 0, -1)
            size = next((size for size in sizes if data[start : start + size] in self._ids), 0)
            if not size:
                break
            tokens.append(self._ids[data[start : start + size]])
            start += size
        return tokens


class Backend:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: BackendVocabulary) -> None:
        self._library = load_library()
        self._end_bits = sum(1 << token for token in vocabulary.end_tokens)
        self._limits = self._library.LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL,
            max_lexer_states=LEXER_STATES,
            step_lexer_fuel=STEP_FUEL,
            step_max_items=STEP_ITEMS,
            verbose_errors=False,
        )
        self._tokens = self._library.LLTokenizer(
            vocabulary, n_vocab=len(vocabulary.tokens), eos_token=vocabulary.end_tokens
        )

    def build(self, kind: str, text: str) -> Any:
        """Compile a grammar. Raise ValueError with the reason if it is refused or exceeds the limits."""
        try:
            source = self._source(kind, text)
            native = self._library.LLMatcher(self._tokens, source, log_level=0, limits=self._limits)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(_one_line(str(error))) from None
        if native.is_error():
            raise ValueError(_one_line(native.get_error()))
        if self._follow(native, 1).is_error():  # the backend reports exceeded limits only after a token
            raise ValueError("it takes too much work to follow")
        return native

    def explore(self, native: Any, steps: int) -> None:
        """Follow a grammar for some tokens, such that a part of what is built on demand is built."""
        self._follow(native, steps)

    def _follow(self, native: Any, steps: int) -> Any:
        """Return a copy that has accepted some tokens, or has failed."""
        copy = native
        for step in range(steps):
            mask = copy.compute_bitmask()
            if step == 0:  # the first mask is computed for all copies
                copy = copy.deep_copy()
            token = self._choose(mask, step)
            if token is None or copy.is_stopped() or not copy.try_consume_tokens([token]):
                break
        return copy

    def _choose(self, mask: bytes, step: int) -> int | None:
        """Return an allowed token that is no end, from another part of the vocabulary at each step."""
        text = (int.from_bytes(mask, "little") & ~self._end_bits).to_bytes(len(mask), "little")
        start = step * 7919 % len(text)  # any large prime
        rest = text[start:].lstrip(b"\0") or text.lstrip(b"\0")
        if not rest:
            return None
        index = len(text) - len(rest)
        lowest = rest[0] & -rest[0]
        return 8 * index + lowest.bit_length() - 1

    def _source(self, kind: str, text: str) -> str:
        """Convert to the grammar format of llguidance."""
        matcher = self._library.LLMatcher
        if kind in ("json", "json_object"):
            schema = json.loads(text if kind == "json" else ANY_OBJECT)
            if not isinstance(schema, dict | bool):
                raise ValueError("a schema is an object or a boolean")
            options: Any = {"whitespace_pattern": WHITESPACE}
            return str(matcher.grammar_from_json_schema(json.dumps({} if schema is True else schema), defaults=options))
        if kind == "regex":
            return str(matcher.grammar_from_regex(text))
        if kind == "choice":
            return str(matcher.grammar_from_lark(_choices(json.loads(text))))
        return str(self._library.grammar_from("grammar", text))


def _choices(texts: Any) -> str:
    """Write a list of choices as a Lark grammar."""
    if not isinstance(texts, Sequence) or isinstance(texts, str) or not texts:
        raise ValueError("it must be a list of non-empty strings, at least one")
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("it must be a list of non-empty strings, at least one")
    # One terminal with many alternatives: a rule for each would take a hundred times the work.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _one_line(reason: str) -> str:
    """Return the line of the backend's message that tells the reason."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    if reason.startswith("panic"):
        lines = ["it is too large"]
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), (lines or [""])[0])
