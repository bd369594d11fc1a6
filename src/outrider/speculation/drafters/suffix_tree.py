"""A tree of all that some texts said, with counts. It grows token by token and forgets whole texts.

A node stands for an n-gram. While it is rare it is closed: it only lists where it occurred, and what followed is read
there. When it becomes frequent it opens: each occurrence moves on to the child of its next token. So every suffix of a
text lies in one list, or stands at an open node where the text ends; a token costs a few steps, whatever the depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

from .lookup import TOKEN_BITS, agreement

ROOT = 0
RARE = 4  # occurrences that a closed node lists at most
CROWD = 64  # children of a node that are looked at


class Text:
    """A text in a tree."""

    __slots__ = ("standing", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.standing: list[tuple[int, int]] = []  # (depth, node), deepest first: the open n-grams that end it


class Walk(NamedTuple):
    """What may come next: the tokens, and how often each followed those before it."""

    match: int  # tokens of the text's end that were found
    tokens: list[int]
    chances: list[float]
    score: float  # tokens that come true if the past repeats itself


NOWHERE = Walk(0, [], [], 0.0)
Place = tuple[Text, int]


class Cursor(NamedTuple):
    """A place in a tree from which several walks may start: all occurrences of one n-gram."""

    tree: SuffixTree
    match: int  # tokens of the n-gram
    room: int  # tokens that may be walked from here
    node: int  # where it stands open; ROOT: it is rare, and only listed
    places: list[Place]  # of a rare one: what comes next

    def following(self, most: int) -> list[tuple[int, float, Cursor]]:
        """Tokens that came next, their shares, and the n-grams with them: the most frequent, of equals the latest."""
        if self.room == 0:
            return []
        return self._in_places(most) if self.node == ROOT else self._in_tree(most)

    def _in_tree(self, most: int) -> list[tuple[int, float, Cursor]]:
        tree, node, depth = self.tree, self.node, self.match + 1
        if not tree.followed[node]:
            return []
        best = tree.best[node]
        others = [child for child in islice(tree._children(node), CROWD) if child != best]
        found = []
        for child in [best, *nlargest(most - 1, others, key=tree._rank)]:
            rare = tree.places[child] or ()
            on = [(text, start + depth) for text, start in rare if start + depth < len(text.tokens)]
            after = Cursor(tree, depth, self.room - 1, ROOT if tree.places[child] is not None else child, on)
            found.append((tree.token[child], tree.count[child] / tree.followed[node], after))
        return found

    def _in_places(self, most: int) -> list[tuple[int, float, Cursor]]:
        votes: dict[int, list[Place]] = {}
        for text, at in self.places:
            votes.setdefault(text.tokens[at], []).append((text, at + 1))
        found = []
        for token in nlargest(most, reversed(votes), key=lambda one: len(votes[one])):
            on = [(text, at) for text, at in votes[token] if at < len(text.tokens)]
            after = Cursor(self.tree, self.match + 1, self.room - 1, ROOT, on)
            found.append((token, len(votes[token]) / len(self.places), after))
        return found


class SuffixTree:
    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.edges: dict[int, int] = {}  # (node, token) -> node; with the lists below about 300 bytes a node
        # One entry a node:
        self.count = [0]  # occurrences
        self.followed = [0]  # of an open node: those that something follows
        self.best = [ROOT]  # of an open node: the most frequent child, the latest among equals; ROOT: none
        self.latest = [0]  # when it was met
        self.token = [-1]  # its last
        self.places: list[list[Place] | None] = [None]  # of a closed node: text and start of each occurrence
        self.child = [ROOT]  # its first; ROOT: none. The root's own are not chained
        self.sibling = [ROOT]
        self.free: list[int] = []
        self.clock = 0

    @property
    def nodes(self) -> int:
        return len(self.edges)

    def extend(self, text: Text, token: int) -> None:
        self.clock += 1
        place = len(text.tokens)
        text.tokens.append(token)
        standing, text.standing = text.standing, []
        for depth, node in standing:
            self._settle(node, depth, text, place - depth)
        self._settle(ROOT, 0, text, place)

    def _settle(self, node: int, depth: int, text: Text, start: int) -> None:
        """Move an occurrence from an open node onward: into a closed node's list, or as far as its text goes."""
        tokens, limit = text.tokens, self.depth
        while depth < limit:
            if start + depth == len(tokens):
                self._stand(text, depth, node)
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
            places = self.places[node]
            if places is not None:
                places.append((text, start))
                if len(places) > RARE:
                    self._open(node, depth)
                return

    def _open(self, node: int, depth: int) -> None:
        places = self.places[node]
        assert places is not None
        self.places[node] = None
        for text, start in places:
            self._settle(node, depth, text, start)

    def _stand(self, text: Text, depth: int, node: int) -> None:
        standing = text.standing
        standing.append((depth, node))
        if len(standing) > 1 and standing[-2][0] < depth:
            standing.sort(reverse=True)

    def _add(self, node: int, token: int, places: list[Place] | None) -> int:
        fresh = self.free.pop() if self.free else len(self.count)
        if fresh == len(self.count):
            for numbers in (self.count, self.followed, self.best, self.latest, self.token, self.child, self.sibling):
                numbers.append(0)
            self.places.append(None)
        self.count[fresh] = self.followed[fresh] = 0
        self.best[fresh] = self.child[fresh] = ROOT
        self.token[fresh] = token
        self.places[fresh] = places
        if node != ROOT:
            self.sibling[fresh] = self.child[node]
            self.child[node] = fresh
        self.edges[node << TOKEN_BITS | token] = fresh
        return fresh

    def remove(self, text: Text) -> None:
        """Forget a text: all counts are as if it had never been there."""
        for start in range(len(text.tokens)):
            node = ROOT
            for token in text.tokens[start : start + self.depth]:
                child = self.edges[node << TOKEN_BITS | token]
                self.count[child] -= 1
                self.followed[node] -= 1
                places = self.places[child]
                if places is not None:
                    places.remove((text, start))
                if not self.count[child]:
                    self._unlink(node, child)
                if self.best[node] == child:
                    self.best[node] = max(self._children(node), key=self._rank, default=ROOT)
                if places is not None:
                    break
                node = child

    def _unlink(self, node: int, child: int) -> None:
        """Below an open node lies only what goes next, before anything takes the free places."""
        del self.edges[node << TOKEN_BITS | self.token[child]]
        self.free.append(child)
        self.places[child] = None if self.places[child] is None else []
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

    def expect(self, text: Text, width: int, factor: float, least: float) -> Walk:
        """How the text may go on: the best walk among those from all n-grams at its end, the longest among equals."""
        chosen = NOWHERE
        found = self._elsewhere(text)
        for match in sorted({match for match, _ in found}, reverse=True):
            budget = min(width, int(match * factor))
            if chosen.score >= budget:  # no shorter match can do better
                return chosen
            walk = Walk(match, [], [], 0.0)
            places = [place for size, place in found if size >= match]
            chosen = max(chosen, self._copy(walk, places, budget, 1.0, least), key=lambda one: one.score)
        for match, node in text.standing:
            budget = min(width, int(match * factor))
            if chosen.score >= budget:
                break
            walk = self._walk(match, node, budget, least)
            chosen = max(chosen, walk, key=lambda one: one.score)
        return chosen

    def starts(self, text: Text, factor: float) -> list[Cursor]:
        """The n-grams at the text's end that came before, longest first: each with more occurrences than the last."""
        elsewhere = self._elsewhere(text)
        found: list[Cursor] = []
        for match in sorted({match for match, _ in elsewhere}, reverse=True):
            places = [place for size, place in elsewhere if size >= match]
            found.append(Cursor(self, match, int(match * factor), ROOT, places))
        known = len(elsewhere)
        for match, node in text.standing:
            if self.followed[node] > known:
                known = self.followed[node]
                found.append(Cursor(self, match, int(match * factor), node, []))
        return found

    def _elsewhere(self, text: Text) -> list[tuple[int, Place]]:
        """The occurrences of the shortest n-gram at the text's end that is rare: how much agrees, and what follows."""
        size = len(text.standing) + 1
        start = len(text.tokens) - size
        if start < 0 or size >= self.depth:
            return []
        node = ROOT
        for token in text.tokens[start:]:
            node = self.edges[node << TOKEN_BITS | token]
            places = self.places[node]
            if places is not None:
                break
        found = []
        for other, begin in places or ():
            place = begin + size
            if place < len(other.tokens):
                match = agreement(other.tokens, place, text.tokens, 0)
                if match >= size:
                    found.append((match, (other, place)))
        return found

    def _walk(self, match: int, node: int, budget: int, least: float) -> Walk:
        """From an open node along its most frequent children."""
        tokens: list[int] = []
        chances: list[float] = []
        whole, score, depth = 1.0, 0.0, match
        while len(tokens) < budget and self.followed[node]:
            child = self.best[node]
            chance = self.count[child] / self.followed[node]
            whole *= chance
            if whole < least:
                break
            tokens.append(self.token[child])
            chances.append(chance)
            score += whole
            node = child
            depth += 1
            places = self.places[node]
            if places is not None:
                on = [(text, start + depth) for text, start in places if start + depth < len(text.tokens)]
                return self._copy(Walk(match, tokens, chances, score), on, budget, whole, least)
        return Walk(match, tokens, chances, score)

    def _copy(self, walk: Walk, places: list[Place], budget: int, whole: float, least: float) -> Walk:
        """On along places in the texts themselves, with the majority."""
        match, tokens, chances, score = walk
        while places and len(tokens) < budget:
            if len(places) == 1:
                (text, at) = places[0]
                rest = text.tokens[at : at + budget - len(tokens)]
                tokens += rest
                chances += [1.0] * len(rest)
                return Walk(match, tokens, chances, score + whole * len(rest))
            votes: dict[int, list[Place]] = {}
            for text, at in places:
                votes.setdefault(text.tokens[at], []).append((text, at + 1))
            token = max(reversed(votes), key=lambda one: len(votes[one]))
            chance = len(votes[token]) / len(places)
            whole *= chance
            if whole < least:
                break
            tokens.append(token)
            chances.append(chance)
            score += whole
            places = [(text, at) for text, at in votes[token] if at < len(text.tokens)]
        return Walk(match, tokens, chances, score)
