"""How many drafted tokens pay: from what passes have cost so far, and from how often drafts were kept.

Each step takes the widths that promise the most tokens a second, and zero is a width. A choice is left for one that
promises clearly more, or a little more for long. What does not seem to pay is tried again from time to time, because
the text may change: what trials may lose is earned as a small share of the time, and what they win is theirs to spend.

Admission looks at a guess after it was drawn. That is lossless with exact match, where the text does not depend on
what is drafted; the modes that draw their own coins run without control.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..types import Guess, Request
from .costs import Cost, Curve
from .odds import Calibration, Odds, Places, falling, products
from .offer import Offer

CLEARLY = 0.03  # another choice must promise this much more
FOR_LONG = 0.15  # or that much more, added up over the steps that it did
ALLOWANCE = 0.003  # share of the time that trials may lose
PATIENCE = 16  # steps before more than what pays is tried
MEMORY = 0.98
RESTS, DEAR = 128, 0.05  # turns without a draft, and share of a plain pass, that are too much for a drafter to follow
START, MOST = 2.0, 4.0  # plain passes that trials may lose at first, and may have saved up


class Drafter:
    """What is known of a method."""

    def __init__(self) -> None:
        self.odds = Odds()
        self.places = Places()
        self.branches = False  # its guesses are trees that do not say how sure they are
        self.calibration = Calibration()
        self.curve = Curve()
        self.confident = False  # its guesses say how sure they are
        self.regret = 0.0  # what other choices promised beyond the present one, added up
        self.purse = 0.0  # seconds that trials may lose
        self.opened = False  # the purse has its first money
        self.spent = 0.0  # seconds of the last draft that was planned
        self.tokens, self.seconds = 0.0, 0.0  # of a step: what each request could expect, and what it took; both fade
        self.width = 0.0  # mean of the last choice

    @property
    def pace(self) -> float:
        """Tokens a second of each request."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def note(self, offer: Offer, widths: Sequence[int]) -> None:
        """What a step came to."""
        seconds = offer.seconds(sum(widths), max(widths))
        self.tokens = MEMORY * self.tokens + offer.expected(widths) / offer.crowd
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

    __slots__ = ("calibration", "drafter", "odds", "places", "planned", "rests", "trial", "waited", "width")

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.odds = Odds(drafter.odds)
        self.places = Places(drafter.places)
        self.calibration = Calibration(drafter.calibration)
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


class Control:
    def __init__(self) -> None:
        self.cost = Cost()
        self._drafters: dict[str, Drafter] = {}
        self._requests: dict[Request, Past] = {}

    def drafting(self, method: str) -> Curve:
        """Seconds of a call of the method by the width of its widest guess; 0: it only followed."""
        return self._drafter(method).curve

    # ---- what became of guesses ----

    def learn(self, request: Request, guess: Guess, path: Sequence[int]) -> None:
        """Of a guess that was verified the places in `path` were kept."""
        past = self._past(request)
        if past.trial is not None:
            past.drafter.purse += past.trial.worth * sum(place >= past.trial.beyond for place in path)
            past.trial = None
        if guess.confidence is None:
            survivals = [0.0] * len(guess.tokens)
            for place in path:
                survivals[place] = 1.0
            past.drafter.branches = guess.parents is not None
            (past.odds if guess.parents is None else past.places).learn(survivals)
            return
        kept = {-1, *path}
        learn = past.calibration.learn
        for place, (before, confidence) in enumerate(zip(guess.before(), guess.confidence, strict=True)):
            if before in kept:
                learn(confidence, place in kept)

    def rest(self, request: Request, turns: int) -> None:
        """So many more turns went by without a draft."""
        self._past(request).rests += turns

    def forget(self, request: Request) -> None:
        self._requests.pop(request, None)

    # ---- before a draft ----

    def plan(self, requests: Sequence[Request], rooms: Sequence[int], others: int = 0) -> list[int]:
        """How many tokens each request may draft, of `rooms`. All have one method, whose drafts cost time.

        others: requests of the step that are not among these.
        """
        crowd = len(requests) + others
        if not requests or not self.cost.covers(crowd):
            return [0] * len(requests)  # a step shows what a plain one costs
        pasts = [self._past(request) for request in requests]
        drafter = pasts[0].drafter
        offer = Offer(
            [past.survivals(room) for past, room in zip(pasts, rooms, strict=True)],
            self.cost.table(crowd, sum(rooms)),
            drafter.curve.table(0, max(rooms)) if drafter.curve.known else [0.0] * (max(rooms) + 1),
            crowd,
        )
        widths = self._settle(drafter, pasts, rooms, offer)
        if not any(widths):
            drafter.note(offer, widths)
        idle = []
        for row, past in enumerate(pasts):
            past.trial, past.width = None, widths[row]
            if past.waits(widths[row], rooms[row]):
                idle.append(row)
        self._try(drafter, pasts, idle, rooms, widths, offer)
        if drafter.confident:
            self._widen(rooms, widths, offer.drafting)
        for past, width in zip(pasts, widths, strict=True):
            past.rests = 0 if width else past.rests + 1
        drafter.spent = offer.drafting[max(widths)]
        for past, width in zip(pasts, widths, strict=True):
            past.planned = width > 0
        return widths

    @staticmethod
    def _settle(drafter: Drafter, pasts: list[Past], rooms: Sequence[int], offer: Offer) -> list[int]:
        """The best widths, unless the last ones are nearly as good."""
        best, pace = offer.best()
        last = [
            width if past.width < 0 else min(past.width, room)
            for past, width, room in zip(pasts, best, rooms, strict=True)
        ]
        if last == best:
            drafter.regret = 0.0
            return best
        present = offer.pace(last)
        drafter.regret += pace / present - 1 if present else 1.0
        if pace <= present * (1 + CLEARLY) and drafter.regret <= FOR_LONG:
            return last
        drafter.regret = 0.0
        return best

    @staticmethod
    def _widen(rooms: Sequence[int], widths: list[int], drafting: list[float]) -> None:
        """A drafter that says how sure it is may draft what costs it nothing: there is more to choose from."""
        deepest = max(widths)
        if deepest == 0:
            return
        while deepest + 1 < len(drafting) and drafting[deepest + 1] <= drafting[deepest] * 1.001:
            deepest += 1
        for row, width in enumerate(widths):
            if width:
                widths[row] = min(deepest, rooms[row])

    def floor(self, method: str, requests: int) -> float:
        """The chance below which one token more for each of `requests` does not pay, at the present tokens a second."""
        drafter = self._drafter(method)
        if not self.cost.known or requests < 1:
            return 0.0
        width = max(round(drafter.width), 1)
        rows = requests * width
        more = (self.cost.seconds(requests, rows + requests) - self.cost.seconds(requests, rows)) / requests
        if drafter.curve.known:
            more += (drafter.curve.seconds(width + 1) - drafter.curve.seconds(width)) / requests
        return min(more * self.pace(method, requests) * requests, 1.0)

    def pace(self, method: str, requests: int) -> float:
        """Tokens a second that each of `requests` makes at present; 0: not known yet."""
        if not self.cost.known or requests < 1:
            return 0.0
        return self._drafter(method).pace or 1 / self.cost.seconds(requests, 0)

    def lets_go(self, request: Request, requests: int) -> bool:
        """Whether a drafter that has not been asked for long should no longer follow: that alone is dear."""
        past = self._past(request)
        if past.rests < RESTS:
            return False
        return past.drafter.curve.seconds(0) > DEAR * self.cost.seconds(requests, 0)

    # ---- after a draft ----

    def trim(self, requests: Sequence[Request], guesses: Sequence[Guess | None], others: int = 0) -> list[int]:
        """How many tokens of each guess pay: those that bring more than the time of their verification is worth."""
        crowd = len(requests) + others
        if not any(guesses) or not self.cost.covers(crowd):
            return [0] * len(requests)
        pasts = [self._past(request) for request in requests]
        survivals = [
            [] if guess is None else self._survivals(past, guess) for past, guess in zip(pasts, guesses, strict=True)
        ]
        widths = self._admit(pasts, survivals, crowd)
        for past in pasts:
            past.planned = False
        return widths

    def _survivals(self, past: Past, guess: Guess) -> list[float]:
        """The chance of each token to be kept."""
        if guess.confidence is None:
            return past.survivals(len(guess.tokens))
        chances = products([past.calibration.rate(said) for said in guess.confidence], guess.parents)
        past.odds.learn(falling(chances))
        past.drafter.confident = True
        return chances

    def _admit(self, pasts: list[Past], survivals: list[list[float]], crowd: int) -> list[int]:
        rooms = [len(chances) for chances in survivals]
        drafter = pasts[0].drafter
        spent = drafter.spent if any(past.planned for past in pasts) else 0.0
        offer = Offer(survivals, self.cost.table(crowd, sum(rooms)), [spent], crowd)
        widths = offer.worth(drafter.pace * crowd)
        drafter.note(offer, widths)
        idle = []
        for row, past in enumerate(pasts):
            if not past.planned:
                past.trial = None
                if past.waits(widths[row], rooms[row]):
                    idle.append(row)
            elif past.trial is not None:
                widths[row] = max(widths[row], min(1 if drafter.confident else past.trial.width, rooms[row]))
            elif widths[row] == 0 and rooms[row]:
                idle.append(row)
        self._try(drafter, pasts, idle, rooms, widths, offer)
        return widths

    # ---- trials ----

    @staticmethod
    def _try(
        drafter: Drafter, pasts: list[Past], idle: list[int], rooms: Sequence[int], widths: list[int], offer: Offer
    ) -> None:
        """Widen some guesses beyond what seems to pay, while there is something to lose: longest waiting first.

        Where nothing is drafted, one token tells most; where something is, all that there is room for.
        """
        if not idle:
            return
        if len(idle) > 1:
            idle.sort(key=lambda row: -pasts[row].waited)
        drafted, deepest = sum(widths), max(widths)
        now = offer.seconds(drafted, deepest)
        worth = 1 / (max(drafter.pace, 1 / offer.seconds(0, 0)) * offer.crowd)
        for row in idle:
            beyond = widths[row]
            width = rooms[row] if beyond else 1
            drafted, deepest = drafted + width - beyond, max(deepest, width)
            loss = offer.seconds(drafted, deepest) - now
            if loss > drafter.purse:
                return
            drafter.purse -= loss
            now += loss
            widths[row] = width
            pasts[row].waited = 0
            pasts[row].trial = Trial(width, beyond, worth)

    def _drafter(self, method: str) -> Drafter:
        found = self._drafters.get(method)
        if found is None:
            found = self._drafters[method] = Drafter()
        return found

    def _past(self, request: Request) -> Past:
        found = self._requests.get(request)
        if found is None:
            found = self._requests[request] = Past(self._drafter(request.method))
        return found
