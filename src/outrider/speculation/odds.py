"""How likely drafted tokens are to be kept: counts that fade, a request's own beside its method's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LEAST, MOST = 0.001, 0.999


class Odds:
    """The chance of the first, second, ... token of a guess to be kept.

    What is counted is how often a place is kept in proportion to the place before it: for a chain that is the rate at
    its depth, for a tree whose nodes are sorted it is how much less the next node promises. Places that nobody has
    looked at for long go by the place before them, so that a text that has become easy is drafted deeper again.
    """

    PRIOR, PRIOR_WEIGHT, SHARE_WEIGHT = 0.7, 2.0, 4.0
    MEMORY, SHARE_MEMORY = 0.995, 0.96

    def __init__(self, method: Odds | None = None) -> None:
        self.method = method
        self.kept: list[float] = []
        self.seen: list[float] = []

    def learn(self, survivals: Sequence[float]) -> None:
        """What became of the places of a guess: 0 or 1; or, for a drafter that knows, their chances."""
        memory = self.MEMORY if self.method is None else self.SHARE_MEMORY
        missing = len(survivals) - len(self.seen)
        self.kept = [value * memory for value in self.kept] + [0.0] * missing
        self.seen = [value * memory for value in self.seen] + [0.0] * missing
        before = 1.0
        for place, chance in enumerate(survivals):
            self.kept[place] += chance
            self.seen[place] += before
            before = chance
        if self.method is not None:
            self.method.learn(survivals)

    def rates(self, width: int) -> list[float]:
        """By place: its chance in proportion to the place before."""
        known = len(self.seen)
        found: list[float] = []
        if self.method is None:
            rate, weight = self.PRIOR, self.PRIOR_WEIGHT
            for place in range(width):
                if place < known:
                    rate = (self.kept[place] + weight * rate) / (self.seen[place] + weight)
                    if rate > MOST:
                        rate = MOST
                found.append(rate)
            return found
        ahead, weight = 0.0, self.SHARE_WEIGHT  # ahead: how much better this request does than others at the place
        for place, usual in enumerate(self.method.rates(width)):
            rate = usual + ahead
            if place < known:
                rate = (self.kept[place] + weight * rate) / (self.seen[place] + weight)
            rate = MOST if rate > MOST else LEAST if rate < LEAST else rate
            ahead = rate - usual
            found.append(rate)
        return found

    def survivals(self, width: int) -> list[float]:
        return products(self.rates(width))


class Calibration:
    """From a drafter's own confidence to the rate at which such tokens were kept; at first they are taken for equal."""

    EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.96, 0.985)
    WEIGHT, MEMORY, SHARE_MEMORY = 4.0, 0.995, 0.98

    def __init__(self, method: Calibration | None = None) -> None:
        self.method = method
        bins = len(self.EDGES) + 1
        self.kept = [0.0] * bins
        self.seen = [0.0] * bins

    def learn(self, confidence: float, kept: bool) -> None:
        at = bisect_left(self.EDGES, confidence)
        memory = self.MEMORY if self.method is None else self.SHARE_MEMORY
        self.kept[at] = self.kept[at] * memory + kept
        self.seen[at] = self.seen[at] * memory + 1
        if self.method is not None:
            self.method.learn(confidence, kept)

    def rate(self, confidence: float) -> float:
        at = bisect_left(self.EDGES, confidence)
        prior = confidence if self.method is None else self.method.rate(confidence)
        rate = (self.kept[at] + self.WEIGHT * prior) / (self.seen[at] + self.WEIGHT)
        return MOST if rate > MOST else LEAST if rate < LEAST else rate


def products(rates: Sequence[float]) -> list[float]:
    found: list[float] = []
    chance = 1.0
    for rate in rates:
        chance *= rate
        found.append(chance)
    return found
