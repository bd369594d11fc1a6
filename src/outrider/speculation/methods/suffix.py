"""Suffix decoding: guess what most often followed the longest ends of this text, here and in other answers.

One tree holds the request's own text, one the answers of all requests, so that what one user was told helps the next.
A draft is as long as the past was unanimous: the longer the match and the steadier the counts, the more is drafted.
With `verify=rejection` and `block`, where the text depends on the drafts, it thus depends on the answers before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ...types import Request, UserError
from .. import MethodOptions, Target, Turn
from ..lookup import FAR, Likely, Lookup, Odds, Record, by_agreement
from ..suffixes import SuffixTree, Text, Walk


@dataclass(frozen=True)
class Options(MethodOptions):
    width: int = 24  # tokens that it drafts at most
    depth: int = 24  # tokens of a match and its draft together, at most
    factor: float = 1.0  # tokens drafted for each token that matched, at most
    least: float = 0.1  # a draft ends where it is less likely than this to be kept whole
    cached_requests: int = 10_000  # finished answers that are remembered
    cached_nodes: int = 400_000  # and what they may take: about 300 bytes each

    def __post_init__(self) -> None:
        if self.depth < 2:
            raise UserError(f"`depth` is {self.depth}: it must be at least 2, one token to match and one to draft")
        if self.factor <= 0:
            raise UserError(f"`factor` is {self.factor}: it must be above 0")


def build(options: Options, target: Target) -> Suffix:
    return Suffix(options)


class History:
    """What is kept of one request."""

    def __init__(self, depth: int) -> None:
        self.tree = SuffixTree(depth)
        self.text = Text()  # prompt and answer, in its own tree
        self.answer = Text()  # in everyone's
        self.record = Record()


class Suffix(Lookup[History]):
    def __init__(self, options: Options) -> None:
        super().__init__(options.width)
        self.options = options
        self.answers = SuffixTree(options.depth)
        self.finished: deque[Text] = deque()
        unanimous = by_agreement()
        self.odds = Odds([*unanimous, *[0.6 * rate for rate in unanimous]])

    def begin(self, request: Request) -> History:
        return History(self.options.depth)

    def guess(self, history: History, turn: Turn, width: int) -> Likely:
        self._catch_up(history, turn)
        walk = history.tree.expect(history.text, width, self.options.factor, self.options.least)
        other = self.answers.expect(history.answer, width, self.options.factor, self.options.least)
        if other.score > walk.score:
            walk = other
        return history.record.note(self.odds, len(history.text.tokens), walk.tokens, _levels(walk), self.options.least)

    def _catch_up(self, history: History, turn: Turn) -> None:
        known = len(history.text.tokens)
        prompt = len(turn.request.prompt)
        for place, token in enumerate(turn.tokens(known, turn.length), known):
            history.tree.extend(history.text, token)
            if place >= prompt:
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
    """The evidence for each token: how long the match is by then, and in the upper half whether the past disagrees."""
    return [
        min(match, FAR) if chance == 1 else FAR + 1 + min(match, FAR)
        for match, chance in enumerate(walk.chances, walk.match)
    ]
