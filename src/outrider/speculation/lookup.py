"""What the drafters without a model share: where a text said the same before, and how often such guesses come true."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor

from ..types import Request
from . import Draft, Needs, Turn

TOKEN_BITS = 24  # more than any vocabulary needs; an n-gram's key is its tokens side by side, so none collide
FAR = 24  # evidence beyond this many tokens tells nothing more
NEARBY = 32  # tokens after the last copy in which it is looked for again
PRIOR_TRIES = 16.0  # what a prior is worth, in guesses
KEEP = 0.998  # old guesses fade: a rate follows about the last 500
REQUEST_TRIES = 8.0
REQUEST_KEEP = 0.97

History = TypeVar("History")
Likely = tuple[list[int], list[float]]  # tokens, and how likely each is kept if those before it are


class Lookup(ABC, Generic[History]):
    """A Proposer that reads texts and nothing else. What it keeps of each request, it begins with the first draft."""

    def __init__(self, width: int) -> None:
        self.needs = Needs(width=width)
        self.histories: dict[Request, History] = {}

    @abstractmethod
    def begin(self, request: Request) -> History: ...

    @abstractmethod
    def guess(self, history: History, turn: Turn, width: int) -> Likely: ...

    def propose(self, turns: Sequence[Turn], last: Tensor, hidden: Tensor | None) -> Draft:
        found = [self._guess(turn) if turn.width and turn.fresh else ([], []) for turn in turns]
        return Draft([tokens for tokens, _ in found], confidence=[likely for _, likely in found])

    def _guess(self, turn: Turn) -> Likely:
        history = self.histories.get(turn.request)
        if history is None:
            history = self.histories[turn.request] = self.begin(turn.request)
        return self.guess(history, turn, min(turn.width, self.needs.width))

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        """Nothing to rewind: only text that stands was ever read."""

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.histories.pop(request, None)


class Grams:
    """A growing text, and where each n-gram of it was seen last. Only what is new is ever read."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest = shortest
        self.longest = longest
        self.text: list[int] = []
        self.ends: list[int] = []  # keys of the n-grams that end the text, shortest first
        self.places: dict[int, int] = {}  # n-gram -> where its last follower stands; 100 to 300 bytes a token

    def extend(self, tokens: Sequence[int]) -> None:
        places, ends, short, rest = self.places, self.ends, self.shortest - 1, self.longest - 1
        for place, token in enumerate(tokens, len(self.text)):
            # The n-grams at the end join only now that they have a follower: until then they are the question.
            for key in ends[short:]:
                places[key] = place
            last = token + 1  # never 0, so that n-grams of different lengths differ too
            ends = [last, *[key << TOKEN_BITS | last for key in ends[:rest]]]
        self.text.extend(tokens)
        self.ends = ends

    def match(self, near: int | None) -> tuple[int, int] | None:
        """Where to copy from, and how many tokens before that place agree with the text's end.

        The longest n-gram wins; among its occurrences the one where the last copy (`near`) would go on, else the
        latest.
        """
        text, place, size = self.text, None, self.shortest - 1
        for key in self.ends[size:]:
            found = self.places.get(key)
            if found is None:
                break
            place = found
            size += 1
        if place is None:
            return None
        if near is not None and place != near:
            place = self._ahead(near, size) or place
        return place, agreement(text, place, text, size)

    def _ahead(self, near: int, size: int) -> int | None:
        text = self.text
        stop = min(near + NEARBY, len(text)) - 1
        at = max(near, size) - 1
        while at < stop:
            try:
                at = text.index(text[-1], at, stop) + 1
            except ValueError:
                return None
            if text[at - size : at] == text[-size:]:
                return at
        return None


def agreement(text: Sequence[int], place: int, other: Sequence[int], known: int) -> int:
    """How many tokens before `place` equal the last of `other`, at most FAR; `known` of them surely do."""
    limit = min(place, len(other), FAR)
    while known < limit and text[place - known - 1] == other[-known - 1]:
        known += 1
    return known


class Odds:
    """How often a guess comes true, by level: how much evidence stood behind it. All requests share them."""

    def __init__(self, prior: Sequence[float]) -> None:
        self.prior = tuple(prior)
        self.rates = list(prior)
        self.tries = [PRIOR_TRIES] * len(self.rates)

    def learn(self, level: int, right: bool) -> None:
        tries = self.tries[level] = self.tries[level] * KEEP + 1
        self.rates[level] += (right - self.rates[level]) / tries


def by_agreement() -> list[float]:
    """How often a copied token is right after so many that were; measured on SmolLM2's code, chats and sums."""
    return [0.1] + [1 - 0.8 * count**-0.8 for count in range(1, FAR + 1)]


def rising(width: int) -> list[int]:
    """Levels by agreement: each guess that comes true is evidence for the next, up to FAR."""
    return [min(count, FAR) for count in range(FAR + width + 1)]


class Record:
    """A request's last draft, judged by the text that came; and how its drafts fare beside everyone's.

    The text itself says which guesses were right, those included that were cut before they ran.
    """

    __slots__ = ("expected", "levels", "right", "start", "tokens", "tries")

    def __init__(self) -> None:
        self.start = 0
        self.tokens: Sequence[int] = ()
        self.levels: Sequence[int] = ()
        self.tries = self.right = self.expected = 0.0

    def note(self, odds: Odds, start: int, tokens: list[int], levels: Sequence[int], least: float) -> Likely:
        """Remember a guess for the text from `start` on. What of it to draft, and how likely each token is kept.

        A draft ends where the chance that all of it is kept falls below `least`. That chance is taken from the prior,
        so that drafts do not depend on what other requests were about; how likely they are is learned.
        """
        self.start, self.tokens, self.levels = start, tokens, levels
        luck = self._luck()
        confidence: list[float] = []
        whole = 1.0
        for level in levels:
            whole *= odds.prior[level]
            if whole < least:
                break
            rate = odds.rates[level]
            confidence.append(rate * luck / (1 - rate + rate * luck))
        return tokens[: len(confidence)], confidence

    def _luck(self) -> float:
        """By what the odds of this request's guesses differ from everyone's."""
        right, wrong = self.right + REQUEST_TRIES, self.tries - self.right + REQUEST_TRIES
        expected, unexpected = self.expected + REQUEST_TRIES, self.tries - self.expected + REQUEST_TRIES
        return right / expected * unexpected / wrong

    def judge(self, odds: Odds, text: Sequence[int]) -> int:
        """Learn from what came. How many tokens of the guess were right."""
        count = 0
        for guess, level, came in zip(self.tokens, self.levels, text[self.start :], strict=False):
            self.tries = self.tries * REQUEST_KEEP + 1
            self.expected = self.expected * REQUEST_KEEP + odds.rates[level]
            self.right = self.right * REQUEST_KEEP + (guess == came)
            odds.learn(level, guess == came)
            if guess != came:
                break
            count += 1
        self.tokens = self.levels = ()
        return count
