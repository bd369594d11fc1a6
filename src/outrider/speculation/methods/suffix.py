"""Suffix decoding: draft the tokens that most often followed the longest suffixes of this text and of other answers.

Each request has a tree of its own text. One more tree holds the answers of all requests, so that an answer speeds up
similar ones. The longer a match and the more uniform its counts, the longer the draft. With `verify=rejection` and
`verify=block` the sampled text depends on the drafts, and thus on the answers before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...errors import UserError
from ...request import Request
from ...types import Draft
from ..adaptive.acceptance_model import Rates
from ..drafters.lookup import (
    MAX_MATCH,
    AcceptanceTracker,
    LookupDrafter,
    grow_tree,
    min_path_acceptance,
    rates_by_match_length,
)
from ..drafters.suffix_tree import Continuation, Cursor, SuffixTree, Text
from ..interface import DraftContext, Target, TreeOptions

AMBIGUOUS = MAX_MATCH + 1  # evidence from here on: other tokens followed the n-gram too
AMBIGUOUS_RATE = 0.6  # acceptance rate of such a token, as a part of that of an unambiguous one
SIBLING = 2 * AMBIGUOUS  # evidence from here on: tokens that are tried after more frequent ones were rejected
SIBLING_RATES = (0.06, 0.13, 0.17, 0.2)  # by their share of the remaining occurrences, in quarters; measured
MAX_CURSORS = 8  # n-grams that a draft tree grows from


@dataclass(frozen=True)
class Options(TreeOptions):
    width: int = 24  # tokens that it drafts at most
    depth: int = 24  # tokens of a match and its draft together, at most
    factor: float = 1.0  # tokens drafted for each token that matched, at most
    least: float | None = None  # a path ends below this acceptance probability; default: 0.1, in trees 0.02
    cached_requests: int = 10_000  # finished answers that are kept
    cached_nodes: int = 400_000  # nodes of their tree at most: about 300 bytes each

    def __post_init__(self) -> None:
        if self.depth < 2:
            raise UserError(f"`depth` is {self.depth}: it must be at least 2, one token to match and one to draft")
        if self.factor <= 0:
            raise UserError(f"`factor` is {self.factor}: it must be above 0")


def build(options: Options, target: Target) -> SuffixDrafter:
    options.check_tree()
    return SuffixDrafter(options, target.coupled)


class SuffixState:
    """The texts of one request, and its last draft."""

    def __init__(self, depth: int) -> None:
        self.tree = SuffixTree(depth)
        self.text = Text()  # prompt and answer, in its own tree
        self.answer = Text()  # in the shared tree
        self.tracker = AcceptanceTracker()


class SuffixDrafter(LookupDrafter[SuffixState]):
    def __init__(self, options: Options, learns: bool = True) -> None:
        """learns: False if the text depends on the drafts: then requests may not influence each other."""
        super().__init__(options.width, trees=options.branches > 1)
        self.options, self.learns = options, learns
        self.least = min_path_acceptance(options)
        self.answers = SuffixTree(options.depth)
        self.finished: deque[Text] = deque()
        prior = rates_by_match_length()
        self.rates = Rates([*prior, *[AMBIGUOUS_RATE * rate for rate in prior], *SIBLING_RATES], learns=learns)

    def new_state(self, request: Request) -> SuffixState:
        return SuffixState(self.options.depth)

    def draft(self, state: SuffixState, context: DraftContext, width: int) -> Draft:
        self._read_new_tokens(state, context)
        depth = min(width, self.options.max_depth or width)
        if self.needs.trees:
            return self._draft_tree(state, width, depth)
        best = state.tree.best_continuation(state.text, depth, self.options.factor, self.least)
        shared = self.answers.best_continuation(state.answer, depth, self.options.factor, self.least)
        if shared.score > best.score:
            best = shared
        return state.tracker.start_draft(
            self.rates, len(state.text.tokens), best.tokens, _chain_evidence(best), self.least
        )

    def _draft_tree(self, state: SuffixState, width: int, depth: int) -> Draft:
        """Grow a draft from the longest n-grams of both trees, those of the request's own text first."""
        factor = self.options.factor
        cursors = state.tree.cursors(state.text, factor) + self.answers.cursors(state.answer, factor)
        cursors.sort(key=lambda cursor: -cursor.match)
        if len(cursors) > MAX_CURSORS:
            del cursors[MAX_CURSORS - 1 : -1]  # the shortest n-gram has the most occurrences
        tree = grow_tree(self.rates, cursors, self._children, width, depth)
        length = len(state.text.tokens)
        return state.tracker.start_draft(self.rates, length, tree.tokens, tree.evidence, self.least, tree.parents)

    def _children(self, cursors: list[Cursor]) -> Iterator[tuple[int, int, list[Cursor]]]:
        """Return the tokens that followed any of these n-grams, their evidence, and the cursors after them."""
        branches = self.options.branches
        evidence: dict[int, int] = {}
        after: dict[int, list[Cursor]] = {}
        for cursor in cursors:
            next_tokens = cursor.following(branches)
            remaining = 1 - sum(share for token, share, _ in next_tokens if token in evidence)  # share of other tokens
            for token, share, next_cursor in next_tokens:
                if token not in evidence and len(evidence) < branches:
                    key = _sibling_evidence(share / remaining) if evidence else _evidence(cursor.match, share)
                    evidence[token] = key
                    remaining -= share
                after.setdefault(token, []).append(next_cursor)
        return ((token, key, after[token]) for token, key in evidence.items())

    def _read_new_tokens(self, state: SuffixState, context: DraftContext) -> None:
        """Add the tokens since the last call to both trees, and learn which of the last draft they contain."""
        known = len(state.text.tokens)
        prompt_length = len(context.request.prompt)
        for position, token in enumerate(context.tokens(known, context.length), known):
            state.tree.extend(state.text, token)
            if position >= prompt_length and self.learns:
                self.answers.extend(state.answer, token)
        state.tracker.observe(self.rates, state.text.tokens)

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            state = self.states.pop(request, None)
            if state is not None:
                self.finished.append(state.answer)
        while self.finished and (
            len(self.finished) > self.options.cached_requests or self.answers.nodes > self.options.cached_nodes
        ):
            self.answers.remove(self.finished.popleft())


def _chain_evidence(continuation: Continuation) -> list[int]:
    return [_evidence(match, share) for match, share in enumerate(continuation.shares, continuation.match)]


def _evidence(match: int, share: float) -> int:
    """Return the evidence for a token: the match length, in the upper half if other tokens followed as well."""
    return min(match, MAX_MATCH) if share == 1 else AMBIGUOUS + min(match, MAX_MATCH)


def _sibling_evidence(share: float) -> int:
    """Return the evidence for a token that is tried after others, by its share of the remaining occurrences."""
    return SIBLING + min(int(share * len(SIBLING_RATES)), len(SIBLING_RATES) - 1)
