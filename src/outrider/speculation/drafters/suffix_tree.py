"""A tree of the n-grams of several texts, with counts. Texts grow token by token, and can be removed.

A node is an n-gram. While it is rare it is closed: it lists its occurrences, and what followed is read in the texts.
When it becomes frequent it is opened: each occurrence moves on to the child of its next token. So every suffix of a
text is in one list, or ends at an open node. Adding a token takes a few operations, whatever the depth of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

from .lookup import TOKEN_BITS, match_length

ROOT = 0
MAX_LISTED = 4  # occurrences in the list of a closed node; one more opens it
MAX_CHILDREN = 64  # children of a node that are ranked: a bound on time


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
        others = [child for child in islice(tree._children(node), MAX_CHILDREN) if child != best]
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


class SuffixTree:
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
                    self.best[node] = max(self._children(node), key=self._rank, default=ROOT)
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
        before = next(other for other in self._children(node) if self.sibling[other] == child)
        self.sibling[before] = self.sibling[child]

    def _children(self, node: int) -> Iterator[int]:
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
            best = max(best, copied, key=lambda one: one.score)
        for match, node in text.open_suffixes:
            budget = min(width, int(match * factor))
            if best.score >= budget:
                break
            best = max(best, self._follow_tree(match, node, budget, least), key=lambda one: one.score)
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
