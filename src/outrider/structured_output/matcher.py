"""Follow a grammar: Grammar -> Matcher, and a GrammarMatcher that keeps a matcher in step with one request's output.

End tokens are handled here; the backend never sees one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from ..types import Draft

log = logging.getLogger(__name__)
Bitmask = np.ndarray[Any, np.dtype[np.int32]]  # one bit per token, 32 to an element, lowest bit first


class Grammar:
    """A compiled grammar. It makes one matcher per text."""

    def __init__(self, native: Any, ends: frozenset[int], end_mask: Bitmask, build: Callable[[], Any] | None) -> None:
        self.native, self.ends, self.end_mask = native, ends, end_mask
        self._build = build  # compiles it again; None if that would take too long for a step

    def matcher(self) -> Matcher:
        return Matcher(self)

    def renew(self, exhausted: Any) -> Any:
        """Replace a backend whose lexer has reached its limit of states, and return the new one.

        All matchers of a grammar share the lexer. Without a new one, a text would end early because of what other
        texts needed.
        """
        if self._build is not None and self.native is exhausted:
            self.native = self._build()
        return self.native


class Matcher:
    """Steps through a grammar token by token, with rollback."""

    def __init__(self, grammar: Grammar) -> None:
        self.end_mask = grammar.end_mask
        self._grammar, self._ends = grammar, grammar.ends
        self._compiled = grammar.native
        self._native = self._compiled.deep_copy()
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
        for _ in range(2):  # the second time on a fresh backend
            if int(self._native.try_consume_tokens([token])) == 1:
                self._path.append(token)
                return True
            if not self._native.is_error():
                break
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
        for _ in range(2):  # the second time on a fresh backend
            if self.finished:
                break
            self._native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            failed = self._native.is_error()
            if not failed and row.any():
                return
            self._restart()
            if not failed:
                break
        row[:] = self.end_mask

    def _restart(self) -> None:
        """Replay the path on a fresh backend: after an error, or past its work limit, it answers nothing more."""
        if self._native.is_error():
            self._compiled = self._grammar.renew(self._compiled)
        self._native = self._compiled.deep_copy()
        self._native.try_consume_tokens(self._path)


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
        """Advance the matcher to the end of the output; return False once the output has left the grammar.

        The output lacks tokens that the matcher has read if the step after them failed.
        """
        if len(output) <= self._num_read:
            self._matcher.rollback(self._num_read - len(output))
            self._num_read, self._invalid = len(output), False
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
