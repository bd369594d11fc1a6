"""Suffix decoding: guess what most often followed the longest ends of this text, here and in other answers.

One tree holds the request's own text, one the answers of all requests, so that what one user was told helps the next.
A draft is as long as the past was unanimous: the longer the match and the steadier the counts, the more is drafted.
With `verify=rejection` and `block`, where the text depends on the drafts, it thus depends on the answers before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...errors import UserError
from ...request import Request
from ..adaptive.acceptance_model import Rates
from ..drafters.lookup import FAR, Likely, Lookup, Record, by_agreement, least_of, sketch
from ..drafters.suffix_tree import Cursor, SuffixTree, Text, Walk
from ..interface import DraftContext, Target, TreeOptions

TORN = FAR + 1  # levels from here on: the past disagrees about the token
OTHER = 2 * TORN  # and from here on: a more frequent one did not come
OTHER_RATES = (0.06, 0.13, 0.17, 0.2)  # by the share that it has of the rest, up to a quarter, a half, ...; measured
CURSORS = 8  # n-grams that a tree grows from


@dataclass(frozen=True)
class Options(TreeOptions):
    width: int = 24  # tokens that it drafts at most
    depth: int = 24  # tokens of a match and its draft together, at most
    factor: float = 1.0  # tokens drafted for each token that matched, at most
    least: float | None = None  # a path ends where it is less likely than this to be kept; default: 0.1, in trees 0.02
    cached_requests: int = 10_000  # finished answers that are remembered
    cached_nodes: int = 400_000  # and what they may take: about 300 bytes each

    def __post_init__(self) -> None:
        if self.depth < 2:
            raise UserError(f"`depth` is {self.depth}: it must be at least 2, one token to match and one to draft")
        if self.factor <= 0:
            raise UserError(f"`factor` is {self.factor}: it must be above 0")


def build(options: Options, target: Target) -> Suffix:
    options.check_tree()
    return Suffix(options, target.coupled)


class History:
    """What is kept of one request."""

    def __init__(self, depth: int) -> None:
        self.tree = SuffixTree(depth)
        self.text = Text()  # prompt and answer, in its own tree
        self.answer = Text()  # in everyone's
        self.record = Record()


class Suffix(Lookup[History]):
    def __init__(self, options: Options, learns: bool = True) -> None:
        """learns: else requests know nothing of each other, where what is drafted has a say in the text."""
        super().__init__(options.width, trees=options.branches > 1)
        self.options, self.learns = options, learns
        self.least = least_of(options)
        self.answers = SuffixTree(options.depth)
        self.finished: deque[Text] = deque()
        unanimous = by_agreement()
        self.odds = Rates([*unanimous, *[0.6 * rate for rate in unanimous], *OTHER_RATES], learns=learns)

    def begin(self, request: Request) -> History:
        return History(self.options.depth)

    def draft(self, history: History, context: DraftContext, width: int) -> Likely:
        self._catch_up(history, context)
        depth = min(width, self.options.max_depth or width)
        if self.needs.trees:
            return self._tree(history, width, depth)
        walk = history.tree.expect(history.text, depth, self.options.factor, self.least)
        other = self.answers.expect(history.answer, depth, self.options.factor, self.least)
        if other.score > walk.score:
            walk = other
        return history.record.note(self.odds, len(history.text.tokens), walk.tokens, _levels(walk), self.least)

    def _tree(self, history: History, width: int, depth: int) -> Likely:
        """Grown from the longest n-grams of both trees, this text's own first."""
        factor = self.options.factor
        found = history.tree.starts(history.text, factor) + self.answers.starts(history.answer, factor)
        found.sort(key=lambda one: -one.match)
        if len(found) > CURSORS:
            del found[CURSORS - 1 : -1]  # the shortest knows most
        tree = sketch(self.odds, found, self._following, width, depth)
        known = len(history.text.tokens)
        return history.record.note(self.odds, known, tree.tokens, tree.levels, self.least, tree.parents)

    def _following(self, cursors: list[Cursor]) -> Iterator[tuple[int, int, list[Cursor]]]:
        """What came after any of these n-grams, and after which of them."""
        most = self.options.branches
        levels: dict[int, int] = {}
        after: dict[int, list[Cursor]] = {}
        for cursor in cursors:
            options = cursor.following(most)
            left = 1 - sum(share for token, share, _ in options if token in levels)  # what is not tried by then
            for token, share, on in options:
                if token not in levels and len(levels) < most:
                    levels[token] = _other(share / left) if levels else _level(cursor.match, share)
                    left -= share
                after.setdefault(token, []).append(on)
        return ((token, level, after[token]) for token, level in levels.items())

    def _catch_up(self, history: History, context: DraftContext) -> None:
        known = len(history.text.tokens)
        prompt = len(context.request.prompt)
        for place, token in enumerate(context.tokens(known, context.length), known):
            history.tree.extend(history.text, token)
            if place >= prompt and self.learns:
                self.answers.extend(history.answer, token)
        history.record.judge(self.odds, history.text.tokens)

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            history = self.histories.pop(request, None)
            if history is not None:
                self.finished.append(history.answer)
        while self.finished and (
            len(self.finished) > self.options.cached_requests or self.answers.nodes > self.options.cached_nodes
        ):
            self.answers.remove(self.finished.popleft())


def _levels(walk: Walk) -> list[int]:
    return [_level(match, chance) for match, chance in enumerate(walk.chances, walk.match)]


def _level(match: int, share: float) -> int:
    """The evidence for a token: how long the match is by then, and in the upper half whether the past disagrees."""
    return min(match, FAR) if share == 1 else TORN + min(match, FAR)


def _other(share: float) -> int:
    """The evidence for a token that is tried when more frequent ones were wrong: its share of the rest."""
    return OTHER + min(int(share * len(OTHER_RATES)), len(OTHER_RATES) - 1)
