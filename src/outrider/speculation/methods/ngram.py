"""Prompt lookup: find where the text said its last tokens before, and guess that it goes on in the same way.

vLLM takes the earliest place of the longest n-gram. Here it is the latest, or the one where the last good copy goes
on: 1 to 6 percent more tokens a step on edits, chats, sums and translations by SmolLM2, as many on code.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...types import Request, UserError
from .. import MethodOptions, Target, Turn
from ..lookup import Grams, Likely, Lookup, Odds, Record, by_agreement, rising


@dataclass(frozen=True)
class Options(MethodOptions):
    width: int = 8  # tokens that it drafts at most
    shortest: int = 1  # tokens that must have been said before
    longest: int = 3  # tokens by which places are told apart; at most
    least: float = 0.1  # a draft ends where it is less likely than this to be kept whole

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise UserError(
                f"`shortest` is {self.shortest} and `longest` is {self.longest}: "
                "both must be at least 1, and `longest` not below `shortest`"
            )


def build(options: Options, target: Target) -> Ngram:
    return Ngram(options)


class History:
    """What is kept of one request."""

    def __init__(self, options: Options) -> None:
        self.grams = Grams(options.shortest, options.longest)
        self.record = Record()
        self.place: int | None = None  # where the last draft was copied from
        self.near: int | None = None  # where the last good copy would go on


class Ngram(Lookup[History]):
    def __init__(self, options: Options) -> None:
        super().__init__(options.width)
        self.options = options
        self.odds = Odds(by_agreement())
        self.levels = rising(options.width)

    def begin(self, request: Request) -> History:
        return History(self.options)

    def guess(self, history: History, turn: Turn, width: int) -> Likely:
        self._catch_up(history, turn)
        text = history.grams.text
        found = history.grams.match(history.near)
        if found is None:
            history.place = None
            return [], []
        history.place, level = found
        guess = text[history.place : history.place + width]
        if len(guess) < width:  # the copy reaches the text's end and goes on with itself
            guess = (guess * width)[:width]
        levels = self.levels[level : level + width]
        return history.record.note(self.odds, len(text), guess, levels, self.options.least)

    def _catch_up(self, history: History, turn: Turn) -> None:
        text = history.grams.text
        history.grams.extend(turn.tokens(len(text), turn.length))
        if history.place is not None:
            right = history.record.judge(self.odds, text)
            if right:
                history.near = history.place + right + 1
            history.place = None
