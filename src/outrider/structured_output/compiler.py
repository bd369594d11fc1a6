"""Compile grammars for one vocabulary, and keep them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from functools import cache, cached_property, partial
from weakref import WeakValueDictionary

import numpy as np

from ..errors import UserError
from ..tokenizer import Tokenizer
from ..types import StructuredOutput
from .backend import LEXER_STATES, MAX_CHARACTERS, Backend, BackendVocabulary, load_library
from .checker import Checker, RefusedError, Vocabulary
from .matcher import Bitmask, Grammar
from .simple import is_simple

CACHE_SIZE = 64  # compiled grammars kept
CACHE_BYTES = 2**29  # of all kept grammars
# A grammar's lexer grows while it is followed, up to its limit of states: 0.3 to 0.75 kB each (measured).
GROWTH_BYTES = 750 * LEXER_STATES
SIMPLE_BYTES = 2**21  # of a simple grammar, at most; its lexer grows by less than 1 MB
RENEW_SECONDS = 0.1  # a grammar that compiles in this time may be compiled again between two steps
NAMES = {
    "json": "JSON schema",
    "json_object": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
    "choice": "list of choices",
}


class Compiler:
    """Compiles grammars for one vocabulary and caches them. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_tokens: Collection[int]) -> None:
        if not end_tokens:
            raise UserError(
                "`structured` needs a model with an end-of-text token, or the output could not end: use another model"
            )
        load_library()  # or raise
        self._ends = frozenset(end_tokens)
        # Made on first use, which takes some tenths of a second.
        self._vocabulary = cache(partial(backend_vocabulary, tokenizer, vocabulary, self._ends))
        self._end_mask: Bitmask = np.zeros(-(-vocabulary // 32), np.int32)
        for token in self._ends:
            self._end_mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutput, tuple[Grammar, int]] = OrderedDict()  # with their bytes
        self._alive: WeakValueDictionary[StructuredOutput, Grammar] = WeakValueDictionary()

    def find(self, structured: StructuredOutput) -> Grammar | None:
        """Return a compiled grammar, if it is still cached or in use."""
        with self._lock:
            return self._alive.get(structured)

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Compile a grammar, or find it. This may take seconds, without blocking `find`.

        While the caller holds the result, `find` returns it.
        """
        grammar = self.find(structured)
        if grammar is not None:
            return self._keep(structured, grammar, None)
        check = self.check(structured)
        try:
            size = check.result()
        except BaseException:
            check.cancel()  # after an interrupt
            raise
        return self.compile_checked(structured, size)

    def check(self, structured: StructuredOutput) -> Future[int]:
        """Return the future of the bytes that a grammar takes, or of UserError. Does not block.

        A grammar that may be expensive is compiled by another process first. Cancelling the future ends that.
        """
        checked: Future[int] = Future()
        if len(structured.text) > MAX_CHARACTERS:
            reason = f"it has {len(structured.text)} characters, and {MAX_CHARACTERS} is the limit"
            checked.set_exception(refusal(structured, reason))
            return checked
        if is_simple(structured.kind, structured.text):
            checked.set_result(SIMPLE_BYTES)
            return checked
        check = self._checker.check(structured.kind, structured.text)

        def report(done: Future[int]) -> None:
            if done.cancelled() or not checked.set_running_or_notify_cancel():
                return
            error = done.exception()
            if isinstance(error, RefusedError):
                error = refusal(structured, str(error))
            if error is not None:
                checked.set_exception(error)
            else:
                checked.set_result(done.result() + GROWTH_BYTES)

        checked.add_done_callback(lambda done: check.cancel() if done.cancelled() else None)
        check.add_done_callback(report)
        return checked

    def compile_checked(self, structured: StructuredOutput, size: int) -> Grammar:
        """Compile a grammar that passed `check` with this size, or find it."""
        return self._keep(structured, self.find(structured) or self.compile_uncached(structured), size)

    def compile_uncached(self, structured: StructuredOutput) -> Grammar:
        """Compile a grammar in this process, and raise UserError if the backend refuses it."""
        backend, began = self._backend, time.monotonic()
        kind, text = structured.kind, structured.text
        try:
            native = backend.build(kind, text)
        except ValueError as error:
            raise refusal(structured, str(error)) from None
        is_quick = time.monotonic() - began < RENEW_SECONDS
        return Grammar(native, self._ends, self._end_mask, (lambda: backend.build(kind, text)) if is_quick else None)

    def _keep(self, structured: StructuredOutput, grammar: Grammar, size: int | None) -> Grammar:
        """Put a grammar last in the cache, and drop the first ones until all keep within the limits."""
        with self._lock:
            _, known_size = self._known.pop(structured, (grammar, GROWTH_BYTES))
            self._known[structured] = grammar, known_size if size is None else size
            self._alive[structured] = grammar
            total = sum(each for _, each in self._known.values())
            while len(self._known) > 1 and (len(self._known) > CACHE_SIZE or total > CACHE_BYTES):
                _, (_, dropped) = self._known.popitem(last=False)
                total -= dropped
        return grammar

    @cached_property
    def _backend(self) -> Backend:
        return Backend(self._vocabulary())

    @cached_property
    def _checker(self) -> Checker:
        make = self._vocabulary  # without `self`, which the checker's thread would keep alive

        def parts() -> Vocabulary:
            vocabulary = make()
            return vocabulary.tokens, vocabulary.special_token_ids, vocabulary.end_tokens

        return Checker(parts)


def backend_vocabulary(tokenizer: Tokenizer, size: int, ends: frozenset[int]) -> BackendVocabulary:
    """Return the vocabulary for `size` rows of logits. Rows without a token are never allowed."""
    known = tokenizer.spellings()[:size]
    excluded = tokenizer.special_ids | ends | {token for token in [tokenizer.unknown_id] if token is not None}
    return BackendVocabulary(
        known + [b""] * (size - len(known)),
        sorted(token for token in excluded if token < size),
        ends,
        lambda text: tokenizer.encode(text, add_special=False, parse_special=False),
    )


def refusal(structured: StructuredOutput, reason: str) -> UserError:
    return UserError(
        f"`structured` holds a {NAMES[structured.kind]} that cannot be used ({reason.rstrip('.')}): correct it"
    )
