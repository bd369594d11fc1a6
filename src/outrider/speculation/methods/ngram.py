"""Prompt lookup: find where the text said its last tokens before, and guess that it goes on in the same way.

vLLM takes the earliest place of the longest n-gram. Here it is the latest, or the one where the last good copy goes
on: 1 to 6 percent more tokens a step on edits, chats, sums and translations by SmolLM2, as many on code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...types import Request, UserError
from .. import Draft, MethodOptions, Needs, Target, Turn
from ..lookup import Grams, Odds, Record, by_agreement, rising


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


class Ngram:
    def __init__(self, options: Options) -> None:
        self.needs = Needs(width=options.width)
        self.options = options
        self.odds = Odds(by_agreement())
        self.levels = rising(options.width)
        self.histories: dict[Request, History] = {}

    def propose(self, turns: Sequence[Turn], last: Tensor, hidden: Tensor | None) -> Draft:
        guesses: list[list[int]] = []
        confidence: list[list[float]] = []
        for turn in turns:
            guess, likely = self._guess(turn) if turn.width and turn.fresh else ([], [])
            guesses.append(guess)
            confidence.append(likely)
        return Draft(guesses, confidence=confidence)

    def _guess(self, turn: Turn) -> tuple[list[int], list[float]]:
        history = self.histories.get(turn.request)
        if history is None:
            history = self.histories[turn.request] = History(self.options)
        self._catch_up(history, turn)
        text = history.grams.text
        found = history.grams.match(history.near)
        if found is None:
            history.place = None
            return [], []
        history.place, level = found
        width = min(turn.width, self.needs.width)
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

    def accept(self, requests: Sequence[Request], kept: Sequence[int]) -> None:
        """Nothing to rewind: only text that stands was ever read."""

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.histories.pop(request, None)
