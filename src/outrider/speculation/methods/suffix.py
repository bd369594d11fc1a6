"""Suffix decoding: draft the tokens that most often followed the longest suffixes of this text and of other answers.

Each request has a tree of its own text. One more tree holds the answers of all requests with the same cache salt, so
that an answer speeds up similar ones. The longer a match and the more uniform its counts, the longer the draft. With
`verify=rejection` and `verify=block` the sampled text depends on the drafts, and thus on the answers before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

from ...errors import UserError
from ...request import Request
from ...types import Draft
from ..adaptive.acceptance_model import Rates
from ..drafters.lookup import (
    MAX_MATCH,
    TOKEN_BITS,
    AcceptanceTracker,
    LookupDrafter,
    grow_tree,
    match_length,
    min_path_acceptance,
    rates_by_match_length,
)
from ..interface import DraftContext, Target, TreeOptions

AMBIGUOUS = MAX_MATCH + 1  # evidence from here on: other tokens followed the n-gram too
AMBIGUOUS_RATE = 0.6  # acceptance rate of such a token, as a part of that of an unambiguous one
SIBLING = 2 * AMBIGUOUS  # evidence from here on: tokens that are tried after more frequent ones were rejected
SIBLING_RATES = (0.06, 0.13, 0.17, 0.2)  # by their share of the remaining occurrences, in quarters; measured
MAX_CURSORS = 8  # n-grams that a draft tree grows from
ROOT = 0  # the node of the empty n-gram
MAX_LISTED = 4  # occurrences in the list of a closed node; one more opens it
MAX_CHILDREN = 64  # children of a node that are ranked: a bound on time


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

    def __init__(self, depth: int, answers: SuffixTree) -> None:
        self.tree = SuffixTree(depth)
        self.text = Text()  # prompt and answer, in its own tree
        self.answers = answers  # the tree that it shares
        self.answer = Text()  # in the shared tree
        self.tracker = AcceptanceTracker()


class SuffixDrafter(LookupDrafter[SuffixState]):
    def __init__(self, options: Options, learns: bool = True) -> None:
        """learns: False if the text depends on the drafts: then requests may not influence each other."""
        super().__init__(options.width, trees=options.branches > 1)
        self.options, self.learns = options, learns
        self.least = min_path_acceptance(options)
        self.answers: dict[str, SuffixTree] = {}  # by cache salt
        self.finished: deque[tuple[str, Text]] = deque()
        prior = rates_by_match_length()
        self.rates = Rates([*prior, *[AMBIGUOUS_RATE * rate for rate in prior], *SIBLING_RATES], learns=learns)

    def new_state(self, request: Request) -> SuffixState:
        salt = request.params.cache_salt
        if salt not in self.answers:
            self.answers[salt] = SuffixTree(self.options.depth)
        return SuffixState(self.options.depth, self.answers[salt])

    def draft(self, state: SuffixState, context: DraftContext, width: int) -> Draft:
        self._read_new_tokens(state, context)
        depth = min(width, self.options.max_depth or width)
        if self.needs.trees:
            return self._draft_tree(state, width, depth)
        best = state.tree.best_continuation(state.text, depth, self.options.factor, self.least)
        shared = state.answers.best_continuation(state.answer, depth, self.options.factor, self.least)
        if shared.score > best.score:
            best = shared
        return state.tracker.start_draft(
            self.rates, len(state.text.tokens), best.tokens, _chain_evidence(best), self.least
        )

    def _draft_tree(self, state: SuffixState, width: int, depth: int) -> Draft:
        """Grow a draft from the longest n-grams of both trees, those of the request's own text first."""
        factor = self.options.factor
        cursors = state.tree.cursors(state.text, factor) + state.answers.cursors(state.answer, factor)
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
                state.answers.extend(state.answer, token)
        state.tracker.observe(self.rates, state.text.tokens)

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            state = self.states.pop(request, None)
            if state is not None:
                self.finished.append((request.params.cache_salt, state.answer))
        while self.finished and (
            len(self.finished) > self.options.cached_requests
            or sum(tree.nodes for tree in self.answers.values()) > self.options.cached_nodes
        ):
            salt, answer = self.finished.popleft()
            if (tree := self.answers.get(salt)) is None:
                continue  # the answer was empty
            tree.remove(answer)
            if not tree.nodes and all(one.params.cache_salt != salt for one in self.states):
                del self.answers[salt]


def _chain_evidence(continuation: Continuation) -> list[int]:
    return [_evidence(match, share) for match, share in enumerate(continuation.shares, continuation.match)]


def _evidence(match: int, share: float) -> int:
    """Return the evidence for a token: the match length, in the upper half if other tokens followed as well."""
    return min(match, MAX_MATCH) if share == 1 else AMBIGUOUS + min(match, MAX_MATCH)


def _sibling_evidence(share: float) -> int:
    """Return the evidence for a token that is tried after others, by its share of the remaining occurrences."""
    return SIBLING + min(int(share * len(SIBLING_RATES)), len(SIBLING_RATES) - 1)


class Text:
    """A text in a tree."""

    __slots__ = ("open_suffixes", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.open_suffixes: list[tuple[int, int]] = []  # (depth, node) of the open n-grams that end it, longest first


class Continuation(NamedTuple):
    """Tokens that may follow a text."""

    match: int  # length of the suffix that occurred before
    tokens: list[int]
    shares: list[float]  # share of each token among those that followed the tokens before it
    score: float  # expected number of accepted tokens by these shares


NO_CONTINUATION = Continuation(0, [], [], 0.0)
Occurrence = tuple[Text, int]  # a text and a position in it


class Cursor(NamedTuple):
    """All occurrences of one n-gram, from which several continuations may start."""

    tree: SuffixTree
    match: int  # tokens of the n-gram
    budget: int  # tokens that may follow it in a draft
    node: int  # the n-gram's open node; ROOT: it is closed, or not in the tree
    occurrences: list[Occurrence]  # of a closed one: the positions after it

    def following(self, most: int) -> list[tuple[int, float, Cursor]]:
        """Return the most frequent next tokens, then the latest, with their shares and the cursors behind them."""
        if self.budget == 0:
            return []
        return self._in_texts(most) if self.node == ROOT else self._in_tree(most)

    def _in_tree(self, most: int) -> list[tuple[int, float, Cursor]]:
        tree, node, depth = self.tree, self.node, self.match + 1
        if not tree.followed[node]:
            return []
        best = tree.best[node]
        others = [child for child in islice(tree.children_of(node), MAX_CHILDREN) if child != best]
        next_tokens = []
        for child in [best, *nlargest(most - 1, others, key=tree._rank)]:
            listed = tree.occurrences[child]
            child_node = ROOT if listed is not None else child
            after = Cursor(tree, depth, self.budget - 1, child_node, _positions_after(listed or (), depth))
            next_tokens.append((tree.token[child], tree.count[child] / tree.followed[node], after))
        return next_tokens

    def _in_texts(self, most: int) -> list[tuple[int, float, Cursor]]:
        by_token = _group_by_token(self.occurrences)
        next_tokens = []
        for token in nlargest(most, reversed(by_token), key=lambda token: len(by_token[token])):
            after = Cursor(self.tree, self.match + 1, self.budget - 1, ROOT, _unfinished(by_token[token]))
            next_tokens.append((token, len(by_token[token]) / len(self.occurrences), after))
        return next_tokens


def _positions_after(starts: Iterable[Occurrence], depth: int) -> list[Occurrence]:
    """Return the positions `depth` tokens after these, without those that are at the end of their text."""
    return [(text, start + depth) for text, start in starts if start + depth < len(text.tokens)]


def _unfinished(occurrences: Iterable[Occurrence]) -> list[Occurrence]:
    """Return the positions that have a token."""
    return [(text, position) for text, position in occurrences if position < len(text.tokens)]


def _group_by_token(occurrences: Iterable[Occurrence]) -> dict[int, list[Occurrence]]:
    """Group positions by their token; return the positions after it."""
    by_token: dict[int, list[Occurrence]] = {}
    for text, position in occurrences:
        by_token.setdefault(text.tokens[position], []).append((text, position + 1))
    return by_token


def better(first: Continuation, second: Continuation) -> Continuation:
    """Return the continuation with the higher score, and the first if the scores differ in rounding alone."""
    return second if second.score > first.score * (1 + 1e-9) else first


class SuffixTree:
    """A tree of the n-grams of several texts, with counts. Texts grow token by token, and can be removed.

    A node is an n-gram. While it is rare it is closed: it lists its occurrences, and what followed is read in the
    texts. When it becomes frequent it is opened: each occurrence moves on to the child of its next token. So every
    suffix of a text is in one list, or ends at an open node. Adding a token takes a few operations, whatever the depth
    of the tree.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.edges: dict[int, int] = {}  # (node, token) -> node; with the lists below about 300 bytes a node
        # One entry a node:
        self.count = [0]  # occurrences
        self.followed = [0]  # of an open node: occurrences that a token follows
        self.best = [ROOT]  # of an open node: the most frequent child, the latest among equals; ROOT: none
        self.latest = [0]  # value of `clock` at its latest occurrence
        self.token = [-1]  # its last token
        self.occurrences: list[list[Occurrence] | None] = [None]  # of a closed node: where each starts
        self.child = [ROOT]  # its first child; ROOT: none. The root's children are not linked
        self.sibling = [ROOT]  # the next child of its parent
        self.free: list[int] = []  # nodes to reuse
        self.clock = 0  # tokens added so far

    @property
    def nodes(self) -> int:
        return len(self.edges)

    def extend(self, text: Text, token: int) -> None:
        """Append a token to a text."""
        self.clock += 1
        position = len(text.tokens)
        text.tokens.append(token)
        open_suffixes, text.open_suffixes = text.open_suffixes, []
        for depth, node in open_suffixes:
            self._descend(node, depth, text, position - depth)
        self._descend(ROOT, 0, text, position)

    def _descend(self, node: int, depth: int, text: Text, start: int) -> None:
        """Move an occurrence down from an open node: into a closed node's list, or as far as its text goes."""
        tokens, limit = text.tokens, self.depth
        while depth < limit:
            if start + depth == len(tokens):
                self._add_open_suffix(text, depth, node)
                return
            token = tokens[start + depth]
            depth += 1
            self.followed[node] += 1
            child = self.edges.get(node << TOKEN_BITS | token)
            if child is None:
                child = self._add(node, token, None if depth == limit else [])
            count = self.count[child] = self.count[child] + 1
            self.latest[child] = self.clock
            if count >= self.count[self.best[node]]:
                self.best[node] = child
            node = child
            occurrences = self.occurrences[node]
            if occurrences is not None:
                occurrences.append((text, start))
                if len(occurrences) > MAX_LISTED:
                    self._open(node, depth)
                return

    def _open(self, node: int, depth: int) -> None:
        """Turn a closed node into an open one."""
        occurrences = self.occurrences[node]
        assert occurrences is not None
        self.occurrences[node] = None
        for text, start in occurrences:
            self._descend(node, depth, text, start)

    def _add_open_suffix(self, text: Text, depth: int, node: int) -> None:
        suffixes = text.open_suffixes
        suffixes.append((depth, node))
        if len(suffixes) > 1 and suffixes[-2][0] < depth:
            suffixes.sort(reverse=True)

    def _add(self, parent: int, token: int, occurrences: list[Occurrence] | None) -> int:
        """Add a child; occurrences: None if it is open."""
        child = self.free.pop() if self.free else len(self.count)
        if child == len(self.count):
            for values in (self.count, self.followed, self.best, self.latest, self.token, self.child, self.sibling):
                values.append(0)
            self.occurrences.append(None)
        self.count[child] = self.followed[child] = 0
        self.best[child] = self.child[child] = ROOT
        self.token[child] = token
        self.occurrences[child] = occurrences
        if parent != ROOT:
            self.sibling[child] = self.child[parent]
            self.child[parent] = child
        self.edges[parent << TOKEN_BITS | token] = child
        return child

    def remove(self, text: Text) -> None:
        """Remove a text: all counts become those of the other texts."""
        for start in range(len(text.tokens)):
            node = ROOT
            for token in text.tokens[start : start + self.depth]:
                child = self.edges[node << TOKEN_BITS | token]
                self.count[child] -= 1
                self.followed[node] -= 1
                occurrences = self.occurrences[child]
                if occurrences is not None:
                    occurrences.remove((text, start))
                if not self.count[child]:
                    self._unlink(node, child)
                if self.best[node] == child:
                    self.best[node] = max(self.children_of(node), key=self._rank, default=ROOT)
                if occurrences is not None:
                    break
                node = child

    def _unlink(self, node: int, child: int) -> None:
        """Free a child without occurrences. If it is open, `remove` frees its children next, before a node is added."""
        del self.edges[node << TOKEN_BITS | self.token[child]]
        self.free.append(child)
        self.occurrences[child] = None if self.occurrences[child] is None else []
        if node == ROOT:
            return
        if self.child[node] == child:
            self.child[node] = self.sibling[child]
            return
        before = next(other for other in self.children_of(node) if self.sibling[other] == child)
        self.sibling[before] = self.sibling[child]

    def children_of(self, node: int) -> Iterator[int]:
        child = self.child[node]
        while child != ROOT:
            yield child
            child = self.sibling[child]

    def _rank(self, node: int) -> tuple[int, int]:
        return self.count[node], self.latest[node]

    def best_continuation(self, text: Text, width: int, factor: float, least: float) -> Continuation:
        """Return the continuation with the best score among those of all suffixes of the text, then the longest match.

        width, factor: it has at most `width` tokens and `factor` tokens for each that matched. least: it ends below
        this share of all occurrences.
        """
        best = NO_CONTINUATION
        matches = self._closed_matches(text)
        for match in sorted({match for match, _ in matches}, reverse=True):
            budget = min(width, int(match * factor))
            if best.score >= budget:  # no shorter match can do better
                return best
            continuation = Continuation(match, [], [], 0.0)
            occurrences = [occurrence for length, occurrence in matches if length >= match]
            copied = self._follow_texts(continuation, occurrences, budget, 1.0, least)
            best = better(best, copied)
        for match, node in text.open_suffixes:
            budget = min(width, int(match * factor))
            if best.score >= budget:
                break
            best = better(best, self._follow_tree(match, node, budget, least))
        return best

    def cursors(self, text: Text, factor: float) -> list[Cursor]:
        """Return the suffixes of the text that occurred before, longest first, each with more occurrences."""
        matches = self._closed_matches(text)
        cursors: list[Cursor] = []
        for match in sorted({match for match, _ in matches}, reverse=True):
            occurrences = [occurrence for length, occurrence in matches if length >= match]
            cursors.append(Cursor(self, match, int(match * factor), ROOT, occurrences))
        most = len(matches)
        for match, node in text.open_suffixes:
            if self.followed[node] > most:
                most = self.followed[node]
                cursors.append(Cursor(self, match, int(match * factor), node, []))
        return cursors

    def _closed_matches(self, text: Text) -> list[tuple[int, Occurrence]]:
        """Return the occurrences of the text's shortest closed suffix: match length, and the position after it."""
        size = len(text.open_suffixes) + 1
        start = len(text.tokens) - size
        if start < 0 or size >= self.depth:
            return []
        node = ROOT
        for token in text.tokens[start:]:
            node = self.edges[node << TOKEN_BITS | token]
            occurrences = self.occurrences[node]
            if occurrences is not None:
                break
        matches = []
        for other, begin in occurrences or ():
            position = begin + size
            if position < len(other.tokens):
                match = match_length(other.tokens, position, text.tokens, 0)
                if match >= size:
                    matches.append((match, (other, position)))
        return matches

    def _follow_tree(self, match: int, node: int, budget: int, least: float) -> Continuation:
        """Follow the most frequent children from an open node."""
        tokens: list[int] = []
        shares: list[float] = []
        path_share, score, depth = 1.0, 0.0, match
        while len(tokens) < budget and self.followed[node]:
            child = self.best[node]
            share = self.count[child] / self.followed[node]
            path_share *= share
            if path_share < least:
                break
            tokens.append(self.token[child])
            shares.append(share)
            score += path_share
            node = child
            depth += 1
            listed = self.occurrences[node]
            if listed is not None:
                continuation = Continuation(match, tokens, shares, score)
                return self._follow_texts(continuation, _positions_after(listed, depth), budget, path_share, least)
        return Continuation(match, tokens, shares, score)

    def _follow_texts(
        self, continuation: Continuation, occurrences: list[Occurrence], budget: int, path_share: float, least: float
    ) -> Continuation:
        """Extend a continuation by the most frequent next token at these positions of the texts."""
        match, tokens, shares, score = continuation
        while occurrences and len(tokens) < budget:
            if len(occurrences) == 1:
                (text, position) = occurrences[0]
                rest = text.tokens[position : position + budget - len(tokens)]
                tokens += rest
                shares += [1.0] * len(rest)
                return Continuation(match, tokens, shares, score + path_share * len(rest))
            by_token = _group_by_token(occurrences)
            token = max(reversed(by_token), key=lambda token: len(by_token[token]))
            share = len(by_token[token]) / len(occurrences)
            path_share *= share
            if path_share < least:
                break
            tokens.append(token)
            shares.append(share)
            score += path_share
            occurrences = _unfinished(by_token[token])
        return Continuation(match, tokens, shares, score)
