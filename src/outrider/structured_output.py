"""Structured output: grammars as masks over the vocabulary, along the drafted path. No torch here.

The backend is llguidance, behind this interface: Compiler -> Grammar -> Matcher, and a GrammarMatcher that keeps a
matcher in step with the output of one request. End tokens are handled here; the backend never sees one.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from .errors import UserError
from .tokenizer import Tokenizer
from .types import Draft, StructuredOutput

log = logging.getLogger(__name__)
Bitmask = np.ndarray[Any, np.dtype[np.int32]]  # one bit per token, 32 to an element, lowest bit first
CACHE_SIZE = 64  # compiled grammars kept
MAX_CHARACTERS = 2**17  # of a grammar; longer ones may take many seconds to compile
# Limits of llguidance's lexer, a fifth of its defaults: about 0.2 s up to the first mask, and 100 MB of memory.
LEXER_FUEL, LEXER_STATES = 200_000, 50_000
ANY_OBJECT = '{"type": "object"}'
# Whitespace between two JSON tokens is limited: small models may otherwise write it without end.
WHITESPACE = r"[ \t\n\r]{1,24}"
NAMES = {
    "json": "JSON schema",
    "json_object": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
    "choice": "list of choices",
}


class Matcher:
    """Steps through a grammar token by token, with rollback."""

    def __init__(self, compiled: Any, ends: frozenset[int], end_mask: Bitmask) -> None:
        self.end_mask = end_mask
        self._compiled, self._ends = compiled, ends
        self._native = compiled.deep_copy()
        self._path: list[int] = []  # accepted tokens, without the end
        self._ended = False

    @property
    def finished(self) -> bool:
        """Return True if only the end may follow."""
        return self._ended or bool(self._native.is_stopped())

    @property
    def ended(self) -> bool:
        """Return True if the text is complete and its end was accepted."""
        return self._ended

    def accept(self, token: int) -> bool:
        """Advance by a token; return False, without advancing, if it may not come next."""
        if self._ended:
            return False
        if token in self._ends:
            self._ended = bool(self._native.is_accepting())
            return self._ended
        if int(self._native.try_consume_tokens([token])) == 1:
            self._path.append(token)
            return True
        if self._native.is_error():
            self._restart()
        return False

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""
        if count and self._ended:
            self._ended, count = False, count - 1
        if count:
            self._native.rollback(count)
            del self._path[-count:]

    def fill(self, row: Bitmask) -> None:
        """Fill a mask with the tokens that may come next. If there are none, allow the end of an incomplete text."""
        if not self.finished:
            self._native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if not self._native.is_error() and row.any():
                return
            self._restart()
        row[:] = self.end_mask

    def _restart(self) -> None:
        """Replay the path on a fresh backend: after an error, or past its work limit, it answers nothing more."""
        self._native = self._compiled.deep_copy()
        self._native.try_consume_tokens(self._path)


class Grammar:
    """A compiled grammar. It makes one matcher per text."""

    def __init__(self, native: Any, ends: frozenset[int], end_mask: Bitmask) -> None:
        self._native, self._ends, self._end_mask = native, ends, end_mask

    def matcher(self) -> Matcher:
        return Matcher(self._native, self._ends, self._end_mask)


class GrammarMatcher:
    """Keeps a matcher in step with the output of one request."""

    def __init__(self, grammar: Grammar) -> None:
        self._matcher = grammar.matcher()
        self._num_read, self._invalid = 0, False  # output tokens that were read; one of them broke the grammar

    @property
    def end_mask(self) -> Bitmask:
        return self._matcher.end_mask

    def masks(self, output: Sequence[int], draft: Draft, masks: Bitmask) -> list[int]:
        """Fill a row of masks [1 + drafted, ceil(V / 32)] for each node of the draft that the grammar allows.

        Return these nodes. Node 0 is before all drafted tokens, node n after drafted token n - 1. A node that is left
        out needs no mask: the mask of its parent excludes the token that leads to it.
        """
        if not self._catch_up(output):
            masks[0] = self.end_mask
            return [0]
        nodes: list[int] = []
        with closing(self._allowed_nodes(draft)) as allowed:
            for node in allowed:
                self._matcher.fill(masks[len(nodes)])
                nodes.append(node)
        return nodes

    def prune(self, output: Sequence[int], draft: Draft) -> Draft:
        """Remove the tokens that the grammar excludes. Return an empty draft if the backend fails."""
        try:
            return self._prune(output, draft)
        except Exception:  # must not fail the other requests of the step; `masks` will report it for this one
            log.exception("a draft cannot be matched against its grammar")
            return draft.cut(0)

    def _prune(self, output: Sequence[int], draft: Draft) -> Draft:
        if not self._catch_up(output):
            return draft.cut(0)
        with closing(self._allowed_nodes(draft)) as allowed:
            reached = {node - 1 for node in allowed}
        kept = sorted(reached - {-1})
        if draft.logits is not None:
            # Sampled tokens: dropping an excluded one would bias rejection sampling, so verification rejects it.
            kept = [index for index, parent in enumerate(draft.parent_indices()) if parent in reached]
        if len(kept) == len(draft.tokens):
            return draft
        return draft.cut(len(kept)) if draft.parents is None else draft.pick(kept)

    def complete(self, output: Sequence[int]) -> bool:
        """Return True if a finished output is a complete text of the grammar."""
        try:
            return self._catch_up(output) and self._matcher.ended
        except Exception:
            log.exception("an output cannot be matched against its grammar")
            return False

    def _catch_up(self, output: Sequence[int]) -> bool:
        """Advance the matcher to the end of the output; return False once the output has left the grammar."""
        for token in output[self._num_read :]:
            if self._invalid or not self._matcher.accept(token):
                self._invalid = True
                return False
            self._num_read += 1
        return not self._invalid

    def _allowed_nodes(self, draft: Draft) -> Generator[int, None, None]:
        """Yield the draft's nodes that the grammar allows, depth first, with the matcher at each of them.

        The matcher is rolled back when the generator ends or is closed.
        """
        children: dict[int, list[int]] = {}
        for index, parent in enumerate(draft.parent_indices()):
            children.setdefault(parent + 1, []).append(index + 1)
        depth = 0  # drafted tokens that the matcher has accepted
        branches = [iter(children.get(0, ()))]
        try:
            yield 0
            while branches:
                node = next(branches[-1], 0)
                if not node:
                    branches.pop()
                    self._matcher.rollback(1 if branches else 0)
                    depth -= 1 if branches else 0
                elif self._matcher.accept(draft.tokens[node - 1]):
                    depth += 1
                    yield node
                    branches.append(iter(children.get(node, ())))
        finally:
            self._matcher.rollback(depth)


class Compiler:
    """Compiles grammars for one vocabulary and caches them. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_tokens: Collection[int]) -> None:
        if not end_tokens:
            raise UserError(
                "`structured` needs a model with an end-of-text token, or the output could not end: use another model"
            )
        try:
            import llguidance
        except ImportError:
            raise UserError("`structured` needs llguidance: run `pip install 'outrider[structured]'`") from None
        self._backend = llguidance
        self._ends = frozenset(end_tokens)
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL, max_lexer_states=LEXER_STATES, verbose_errors=False
        )
        self._end_mask: Bitmask = np.zeros(-(-vocabulary // 32), np.int32)
        for token in self._ends:
            self._end_mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._alive: WeakValueDictionary[StructuredOutput, Grammar] = WeakValueDictionary()

    def find(self, structured: StructuredOutput) -> Grammar | None:
        """Return a compiled grammar, if it is still cached or in use."""
        with self._lock:
            return self._alive.get(structured)

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Compile a grammar, or find it. This may take seconds, without blocking `find`.

        While the caller holds the result, `find` returns it.
        """
        grammar = self.find(structured) or self.compile_uncached(structured)
        with self._lock:
            self._known[structured] = self._alive[structured] = grammar
            self._known.move_to_end(structured)
            if len(self._known) > CACHE_SIZE:
                self._known.popitem(last=False)
        return grammar

    @cached_property
    def _tokens(self) -> Any:
        vocabulary: Any = LlguidanceVocabulary(self._tokenizer, self._vocabulary, self._ends)
        return self._backend.LLTokenizer(vocabulary, n_vocab=self._vocabulary, eos_token=sorted(self._ends))

    def compile_uncached(self, structured: StructuredOutput) -> Grammar:
        """Compile a grammar, and raise UserError if the backend refuses it or it exceeds the limits."""
        if len(structured.text) > MAX_CHARACTERS:
            raise _refusal(structured, f"it has {len(structured.text)} characters, and {MAX_CHARACTERS} is the limit")
        try:
            text = self._backend_grammar(structured)
            native: Any = self._backend.LLMatcher(self._tokens, text, log_level=0, limits=self._limits)
        except (ValueError, TypeError, RecursionError) as error:
            raise _refusal(structured, str(error)) from None
        if native.is_error():
            raise _refusal(structured, native.get_error())
        if not self._is_within_limits(native):
            raise _refusal(structured, "it takes too much work to follow")
        return Grammar(native, self._ends, self._end_mask)

    def _is_within_limits(self, native: Any) -> bool:
        """Return True if a first token can be matched: the backend reports exceeded limits only after a token."""
        row = np.zeros_like(self._end_mask)
        native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        allowed = np.flatnonzero(np.unpackbits((row & ~self._end_mask).view(np.uint8), bitorder="little"))
        copy = native.deep_copy()
        copy.try_consume_tokens([int(token) for token in allowed[:1]])
        return not copy.is_error()

    def _backend_grammar(self, structured: StructuredOutput) -> str:
        """Convert to the grammar format of llguidance."""
        kind, value, matcher = structured.kind, structured.text, self._backend.LLMatcher
        if kind in ("json", "json_object"):
            schema = json.loads(value if kind == "json" else ANY_OBJECT)
            if not isinstance(schema, dict | bool):
                raise ValueError("a schema is an object or a boolean")
            options: Any = {"whitespace_pattern": WHITESPACE}
            return str(matcher.grammar_from_json_schema(json.dumps({} if schema is True else schema), defaults=options))
        if kind == "regex":
            return str(matcher.grammar_from_regex(value))
        if kind == "choice":
            return str(matcher.grammar_from_lark(_choices(json.loads(value))))
        return str(self._backend.grammar_from("grammar", value))


class LlguidanceVocabulary:
    """The tokenizer interface that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: frozenset[int]) -> None:
        known = tokenizer.spellings()[:vocabulary]
        self._tokenizer = tokenizer
        self.tokens = known + [b""] * (vocabulary - len(known))  # rows of logits without a token: never allowed
        excluded = tokenizer.special_ids | ends | {token for token in [tokenizer.unknown_id] if token is not None}
        self.special_token_ids = sorted(token for token in excluded if token < vocabulary)
        self.eos_token_id = min(ends)
        self._longest = max(map(len, self.tokens))
        self._ids = {
            spelling: token for token, spelling in enumerate(self.tokens) if token not in excluded and spelling
        }

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize a text as the model would within another text, such that the bytes are exactly the same."""
        data = text.encode() if isinstance(text, str) else text
        written = data.decode(errors="ignore")
        # SentencePiece tokenizers add a space before a text, but not after a line break.
        for lead in ("", "\n"):
            ids = self._tokenizer.encode(lead + written, add_special=False, parse_special=False)
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


def _choices(texts: Any) -> str:
    """Write a list of choices as a Lark grammar."""
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("it must be a list of non-empty strings, at least one")
    # One terminal with many alternatives: a rule for each would take a hundred times the work.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _refusal(structured: StructuredOutput, reason: str) -> UserError:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    if reason.startswith("panic"):
        lines = ["it is too large"]
    message = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), (lines or [""])[0])
    return UserError(
        f"`structured` holds a {NAMES[structured.kind]} that cannot be used ({message.rstrip('.')}): correct it"
    )
