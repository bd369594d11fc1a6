"""Shapes that an answer must have, as masks over the vocabulary along the drafted path. No torch here.

One backend, llguidance, behind an interface of our own: Compiler -> Grammar -> Matcher, and a Follower that keeps a
matcher beside the output of one request. The end of the text is ours: the backend never sees an end token.
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
Words = np.ndarray[Any, np.dtype[np.int32]]  # a bit for each token, 32 in a word, the lowest first
KEPT = 64  # compiled grammars
LONGEST = 2**17  # characters of a shape: what is longer may take many seconds to compile
# Of the backend, a fifth of its own: about 0.2 s of work up to the first mask, and 100 MB of memory.
FUEL, STATES = 200_000, 50_000
ANY_OBJECT = '{"type": "object"}'
# A small model may write blanks for ever where it is let, so there are only so many between two words.
BLANKS = r"[ \t\n\r]{1,24}"
NAMES = {
    "json": "JSON schema",
    "json_object": "JSON schema",
    "regex": "regular expression",
    "grammar": "grammar",
    "choice": "list of choices",
}


class Matcher:
    """Follows one text through a grammar, forth and back."""

    def __init__(self, origin: Any, ends: frozenset[int], end_mask: Words) -> None:
        self.end_mask = end_mask
        self._origin, self._ends = origin, ends
        self._native = origin.deep_copy()
        self._path: list[int] = []  # tokens that were accepted, but for the end
        self._ended = False

    @property
    def finished(self) -> bool:
        """Nothing but the end may follow."""
        return self._ended or bool(self._native.is_stopped())

    @property
    def ended(self) -> bool:
        """The text is whole, and its end was accepted."""
        return self._ended

    def accept(self, token: int) -> bool:
        """Go on with this token, or say that it may not come next and stay."""
        if self._ended:
            return False
        if token in self._ends:
            self._ended = bool(self._native.is_accepting())
            return self._ended
        if int(self._native.try_consume_tokens([token])) == 1:
            self._path.append(token)
            return True
        if self._native.is_error():
            self._renew()
        return False

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens that were accepted."""
        if count and self._ended:
            self._ended, count = False, count - 1
        if count:
            self._native.rollback(count)
            del self._path[-count:]

    def fill(self, row: Words) -> None:
        """The tokens that may come next; where there are none, the end, which then is no whole text."""
        if not self.finished:
            self._native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if not self._native.is_error() and row.any():
                return
            self._renew()
        row[:] = self.end_mask

    def _renew(self) -> None:
        """Where nothing can follow, or finding it took more work than it may, the backend gives up for good."""
        self._native = self._origin.deep_copy()
        self._native.try_consume_tokens(self._path)


class Grammar:
    """A compiled shape; it gives out as many matchers as there are texts to follow."""

    def __init__(self, native: Any, ends: frozenset[int], end_mask: Words) -> None:
        self._native, self._ends, self._end_mask = native, ends, end_mask

    def matcher(self) -> Matcher:
        return Matcher(self._native, self._ends, self._end_mask)


class GrammarMatcher:
    """A grammar beside the growing output of one request."""

    def __init__(self, grammar: Grammar) -> None:
        self._matcher = grammar.matcher()
        self._read, self._lost = 0, False

    @property
    def end_mask(self) -> Words:
        return self._matcher.end_mask

    def masks(self, output: Sequence[int], draft: Draft, room: Words) -> list[int]:
        """Fill a row of room [1 + guessed, words] for each place of the guess that can be reached; which these are.

        Place 0 is before all guessed tokens, place n after guessed token n - 1. The choice before a place that is not
        among them never takes the token that leads there.
        """
        if not self._follow(output):
            room[0] = self.end_mask
            return [0]
        places: list[int] = []
        with closing(self._walk(draft)) as walk:
            for place in walk:
                self._matcher.fill(room[len(places)])
                places.append(place)
        return places

    def prune(self, output: Sequence[int], draft: Draft) -> Draft:
        """The guess without what the grammar refuses; nothing of it where the backend fails, as `masks` will tell."""
        try:
            return self._prune(output, draft)
        except Exception:  # the other requests of the step have no part in it
            log.exception("a draft cannot be followed through its grammar")
            return draft.cut(0)

    def _prune(self, output: Sequence[int], draft: Draft) -> Draft:
        if not self._follow(output):
            return draft.cut(0)
        with closing(self._walk(draft)) as walk:
            reached = {place - 1 for place in walk}
        kept = sorted(reached - {-1})
        if draft.logits is not None:
            # Whether a token that was drawn stays to be rejected may not depend on what was drawn.
            kept = [place for place, before in enumerate(draft.before()) if before in reached]
        if len(kept) == len(draft.tokens):
            return draft
        return draft.cut(len(kept)) if draft.parents is None else draft.pick(kept)

    def complete(self, output: Sequence[int]) -> bool:
        """Whether an output that ended is a whole text of the grammar."""
        try:
            return self._follow(output) and self._matcher.ended
        except Exception:
            log.exception("an output cannot be followed through its grammar")
            return False

    def _follow(self, output: Sequence[int]) -> bool:
        """Catch up with the output; False once it left the grammar."""
        for token in output[self._read :]:
            if self._lost or not self._matcher.accept(token):
                self._lost = True
                return False
            self._read += 1
        return not self._lost

    def _walk(self, draft: Draft) -> Generator[int, None, None]:
        """Let the matcher stand at each place that can be reached, children after their parents, and come back: at
        the end, and wherever it is left.
        """
        following: dict[int, list[int]] = {}
        for place, before in enumerate(draft.before()):
            following.setdefault(before + 1, []).append(place + 1)
        depth = 0  # tokens that were accepted
        branches = [iter(following.get(0, ()))]
        try:
            yield 0
            while branches:
                place = next(branches[-1], 0)
                if not place:
                    branches.pop()
                    self._matcher.rollback(1 if branches else 0)
                    depth -= 1 if branches else 0
                elif self._matcher.accept(draft.tokens[place - 1]):
                    depth += 1
                    yield place
                    branches.append(iter(following.get(place, ())))
        finally:
            self._matcher.rollback(depth)


class Compiler:
    """Compiles shapes for one vocabulary, and keeps the latest. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_tokens: Collection[int]) -> None:
        if not end_tokens:
            raise UserError("`structured` needs a model with an end-of-text token: a whole answer could not end")
        try:
            import llguidance
        except ImportError:
            raise UserError("`structured` needs llguidance: run `pip install outrider[structured]`") from None
        self._backend = llguidance
        self._ends = frozenset(end_tokens)
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._limits = llguidance.LLParserLimits(initial_lexer_fuel=FUEL, max_lexer_states=STATES, verbose_errors=False)
        self._end_mask: Words = np.zeros(-(-vocabulary // 32), np.int32)
        for token in self._ends:
            self._end_mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._alive: WeakValueDictionary[StructuredOutput, Grammar] = WeakValueDictionary()

    def find(self, structured: StructuredOutput) -> Grammar | None:
        """What was compiled before, if it is still there."""
        with self._lock:
            return self._alive.get(structured)

    def compile(self, structured: StructuredOutput) -> Grammar:
        """May take seconds, in which others find what is there. Whoever keeps the result can rely on finding it."""
        grammar = self.find(structured) or self._compile(structured)
        with self._lock:
            self._known[structured] = self._alive[structured] = grammar
            self._known.move_to_end(structured)
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return grammar

    @cached_property
    def _tokens(self) -> Any:
        words: Any = Vocabulary(self._tokenizer, self._vocabulary, self._ends)
        return self._backend.LLTokenizer(words, n_vocab=self._vocabulary, eos_token=sorted(self._ends))

    def _compile(self, structured: StructuredOutput) -> Grammar:
        if len(structured.value) > LONGEST:
            raise _refusal(structured, f"it has {len(structured.value)} characters, and {LONGEST} is the limit")
        try:
            text = self._text(structured)
            native: Any = self._backend.LLMatcher(self._tokens, text, log_level=0, limits=self._limits)
        except (ValueError, TypeError, RecursionError) as error:
            raise _refusal(structured, str(error)) from None
        if native.is_error():
            raise _refusal(structured, native.get_error())
        if not self._bearable(native):
            raise _refusal(structured, "it takes too much work to follow")
        return Grammar(native, self._ends, self._end_mask)

    def _bearable(self, native: Any) -> bool:
        """Whether a text can begin within the limits: the backend tells only after a token that it has given up."""
        row = np.zeros_like(self._end_mask)
        native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        allowed = np.flatnonzero(np.unpackbits((row & ~self._end_mask).view(np.uint8), bitorder="little"))
        trial = native.deep_copy()
        trial.try_consume_tokens([int(token) for token in allowed[:1]])
        return not trial.is_error()

    def _text(self, structured: StructuredOutput) -> str:
        """The grammar as the backend reads it."""
        kind, value, matcher = structured.kind, structured.value, self._backend.LLMatcher
        if kind in ("json", "json_object"):
            schema = json.loads(value if kind == "json" else ANY_OBJECT)
            if not isinstance(schema, dict | bool):
                raise ValueError("a schema is an object or a boolean")
            options: Any = {"whitespace_pattern": BLANKS}
            return str(matcher.grammar_from_json_schema(json.dumps({} if schema is True else schema), defaults=options))
        if kind == "regex":
            return str(matcher.grammar_from_regex(value))
        if kind == "choice":
            return str(matcher.grammar_from_lark(_choices(json.loads(value))))
        return str(self._backend.grammar_from("grammar", value))


class Vocabulary:
    """A tokenizer as llguidance wants to see it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: frozenset[int]) -> None:
        known = tokenizer.spellings()[:vocabulary]
        self._tokenizer = tokenizer
        self.tokens = known + [b""] * (vocabulary - len(known))  # rows of logits without a token are never allowed
        apart = tokenizer.special_ids | ends | {token for token in [tokenizer.unknown_id] if token is not None}
        self.special_token_ids = sorted(token for token in apart if token < vocabulary)
        self.eos_token_id = min(ends)
        self._longest = max(map(len, self.tokens))
        self._ids = {spelling: token for token, spelling in enumerate(self.tokens) if token not in apart and spelling}

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens whose bytes are exactly the text's, as the model would write it inside another text."""
        data = text.encode() if isinstance(text, str) else text
        written = data.decode(errors="ignore")
        # Tokenizers of the SentencePiece kind put a space before a text, but not after a line.
        for lead in ("", "\n"):
            ids = self._tokenizer.encode(lead + written, add_special=False, parse_special=False)
            for skipped in range(3 if lead else 1):
                if b"".join(self.tokens[token] for token in ids[skipped:]) == data:
                    return ids[skipped:]
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token again and again, up to a byte that no token begins with."""
        found, at = [], 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((size for size in sizes if data[at : at + size] in self._ids), 0)
            if not size:
                break
            found.append(self._ids[data[at : at + size]])
            at += size
        return found


def _choices(texts: Any) -> str:
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("it must be a list of texts, at least one, none of them empty")
    # One word with many spellings: as many rules would be a hundred times the work.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _refusal(structured: StructuredOutput, reason: str) -> UserError:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    if reason.startswith("panic"):
        lines = ["it is too large"]
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), (lines or [""])[0])
    return UserError(
        f"`structured` holds a {NAMES[structured.kind]} that cannot be used ({told.rstrip('.')}): correct it"
    )
