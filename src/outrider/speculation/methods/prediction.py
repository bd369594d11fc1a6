"""Predicted outputs: the request brings the text that it expects back, and the answer is guessed to follow it.

Where the answer departs, the place is looked for again: most edits replace or insert a little and then go on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UserError
from ...request import Request
from ..adaptive.acceptance_model import Rates
from ..drafters.lookup import FAR, NEARBY, Likely, Lookup, Record, by_agreement, rising
from ..interface import DraftContext, MethodOptions, Target

DRAFTS_FROM = "prediction"

LOST = FAR + 1  # levels from here on: the answer left the prediction one token ago, two, ...
LOST_LEVELS = 4
START = 4  # how many matching tokens the user's word is worth


@dataclass(frozen=True)
class Options(MethodOptions):
    width: int = 16  # tokens that it drafts at most
    longest: int = 4  # tokens by which a lost place is found again; at most
    least: float = 0.1  # a draft ends where it is less likely than this to be kept whole

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise UserError(f"`longest` is {self.longest}: it must be at least 1")


def build(options: Options, target: Target) -> Prediction:
    return Prediction(options, target.coupled)


class Follower:
    """Where in its prediction an answer stands."""

    def __init__(self, text: list[int], longest: int) -> None:
        self.text = text
        self.longest = longest
        self.answer: list[int] = []
        self.torch_device = 0  # the token that is expected next; of a lost answer: the first that did not come
        self.run = START  # tokens that agreed up to the place; 0: lost
        self.lost = 0  # tokens since then
        self.record = Record()
        self.places: dict[tuple[int, ...], list[int]] | None = None  # n-gram -> where its followers stand, rising

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.answer.append(token)
            if self.run and self.torch_device < len(self.text) and self.text[self.torch_device] == token:
                self.torch_device += 1
                self.run += 1
            else:
                self.run = 0
                self.lost += 1
                self._find()

    def _find(self) -> None:
        """The longest n-gram at the answer's end decides; of its places the next one, else the last one before.

        A single token says little: it counts only where it is due soon.
        """
        places = self._places()
        for size in range(min(self.longest, len(self.answer)), 0, -1):
            found = places.get(tuple(self.answer[-size:]))
            if not found:
                continue
            # The nearest is right behind the token that did not come: something stood before it, and now it came.
            ahead = bisect_left(found, self.torch_device + 1)
            if ahead < len(found) and (size > 1 or found[ahead] <= self.torch_device + NEARBY):
                self.torch_device = found[ahead]
            elif size > 1:
                self.torch_device = found[-1]
            else:
                continue
            self.run, self.lost = size, 0
            return

    def _places(self) -> dict[tuple[int, ...], list[int]]:
        if self.places is None:  # an answer that never departs does not need it
            self.places = {}
            for place in range(1, len(self.text) + 1):
                for size in range(1, min(self.longest, place) + 1):
                    self.places.setdefault(tuple(self.text[place - size : place]), []).append(place)
        return self.places

    def expect(self, width: int) -> tuple[list[int], int]:
        """What comes next, and the level of the first token of it. A lost answer may have replaced one token."""
        if self.run:
            return self.text[self.torch_device : self.torch_device + width], min(self.run, FAR)
        return self.text[self.torch_device + 1 : self.torch_device + 1 + width], LOST + min(self.lost, LOST_LEVELS) - 1


class Prediction(Lookup[Follower]):
    def __init__(self, options: Options, learns: bool = True) -> None:
        """learns: else requests know nothing of each other, where what is drafted has a say in the text."""
        super().__init__(options.width)
        self.options = options
        self.odds = Rates([*by_agreement(), *[0.15] * LOST_LEVELS], learns=learns)
        self.levels = rising(options.width)

    def begin(self, request: Request) -> Follower:
        return Follower(request.prediction, self.options.longest)

    def draft(self, history: Follower, context: DraftContext, width: int) -> Likely:
        if not history.text:
            return Likely([], [])
        answer = history.answer
        history.extend(context.tokens(len(context.request.prompt) + len(answer), context.length))
        history.record.judge(self.odds, answer)
        draft, level = history.expect(width)
        levels = [level, *self.levels[1:width]] if level >= LOST else self.levels[level : level + width]
        return history.record.note(self.odds, len(answer), draft, levels[: len(draft)], self.options.least)
