"""What the control knows: of a method, and of each request that it drafts for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .acceptance_model import Calibration, Odds, Places
from .latency_model import LatencyCurve
from .suspension import SHORTEST, Rest, Yields
from .width_search import Offer

ALLOWANCE = 0.003  # share of the time that trials may lose
PATIENCE = 16  # steps before more than what pays is tried
MEMORY = 0.98
START, MOST = 2.0, 4.0  # plain passes that trials may lose at first, and may have saved up


class Drafter:
    """What is known of a method."""

    def __init__(self) -> None:
        self.odds = Odds()
        self.places = Places()
        self.branches = False  # its guesses are trees that do not say how sure they are
        self.calibration = Calibration()
        self.curve = LatencyCurve()
        self.confident = False  # its guesses say how sure they are
        self.regret = 0.0  # what other choices promised beyond the present one, added up
        self.purse = 0.0  # seconds that trials may lose
        self.opened = False  # the purse has its first money
        self.spent = 0.0  # seconds of the last draft that was planned
        self.usual = 0.0  # seconds of a draft, of late; 0: not known
        self.yields = Yields()
        self.patience = SHORTEST  # steps of a new request's first rest
        self.tokens, self.seconds = 0.0, 0.0  # of a step: what each request could expect, and what it took; both fade
        self.width = 0.0  # mean of the last choice

    @property
    def pace(self) -> float:
        """Tokens a second of each request."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def note(self, offer: Offer, widths: Sequence[int]) -> None:
        """What a step came to."""
        seconds = offer.seconds(sum(widths), max(widths))
        self.tokens = MEMORY * self.tokens + offer.expected(widths) / offer.batch_size
        self.seconds = MEMORY * self.seconds + seconds
        self.width = sum(widths) / len(widths)
        plain = offer.verification[0]
        if not self.opened:
            self.purse, self.opened = START * plain, True
        self.purse = min(self.purse + ALLOWANCE * seconds, MOST * plain)


class Trial(NamedTuple):
    """Tokens that did not seem to pay, drafted to see whether they do."""

    width: int  # tokens, those that seemed to pay included
    beyond: int  # how many of them seemed to pay
    worth: float  # seconds that each kept token beyond them is worth


class Past:
    """What is known of a request."""

    __slots__ = (
        "calibration",
        "drafter",
        "odds",
        "places",
        "planned",
        "rest",
        "rests",
        "trial",
        "waited",
        "width",
        "yields",
    )

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.odds = Odds(drafter.odds)
        self.places = Places(drafter.places)
        self.calibration = Calibration(drafter.calibration)
        self.yields = Yields(drafter.yields)
        self.rest = Rest(drafter.patience)
        self.width = -1  # the last choice; -1: none yet
        self.planned = False  # the guess to come was asked for by plan
        self.rests = 0  # plans in a row that asked for nothing
        self.trial: Trial | None = None  # under way
        self.waited = 0  # steps since it drafted all that it could

    def waits(self, width: int, room: int) -> bool:
        """Whether more than `width` should be tried."""
        if width >= room:
            self.waited = 0
            return False
        self.waited += 1
        return width == 0 or self.waited >= PATIENCE

    def survivals(self, width: int) -> list[float]:
        """The chances of a guess that does not say them, or is not there yet."""
        return self.places.survivals(width) if self.drafter.branches else self.odds.survivals(width)
