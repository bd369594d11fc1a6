"""How likely drafted tokens are to be kept: counts that fade, a request's own beside its method's."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Self

LEAST, MOST = 0.001, 0.999


class Counts:
    """How often the places of guesses were tried and kept. A request's own fade sooner than its method's."""

    PRIOR, PRIOR_WEIGHT, SHARE_WEIGHT = 0.7, 2.0, 10.0
    MEMORY, SHARE_MEMORY = 0.995, 0.98

    def __init__(self, method: Self | None = None) -> None:
        self.method = method
        self.kept: list[float] = []
        self.seen: list[float] = []

    def learn(self, survivals: Sequence[float]) -> None:
        """What became of the places of a guess: 0 or 1; or, for a drafter that knows, their chances."""
        memory = self.MEMORY if self.method is None else self.SHARE_MEMORY
        missing = len(survivals) - len(self.seen)
        self.kept = [value * memory for value in self.kept] + [0.0] * missing
        self.seen = [value * memory for value in self.seen] + [0.0] * missing
        for place, (chance, tried) in enumerate(zip(survivals, self.tried(survivals), strict=True)):
            self.kept[place] += chance
            self.seen[place] += tried
        if self.method is not None:
            self.method.learn(survivals)

    def tried(self, survivals: Sequence[float]) -> Sequence[float]:
        """How far each place counts as one that could have been kept."""
        return [1.0] * len(survivals)


class Odds(Counts):
    """The chance of the first, second, ... token of a guess to be kept.

    What is counted is how often a place is kept in proportion to the place before it: for a chain that is the rate at
    its depth, for a tree whose nodes are sorted it is how much less the next node promises. Places that nobody has
    looked at for long go by the place before them, so that a text that has become easy is drafted deeper again.
    """

    def tried(self, survivals: Sequence[float]) -> Sequence[float]:
        return [1.0, *survivals[:-1]] if survivals else []

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


class Places(Counts):
    """The chance of each node of a tree to be kept, by its place in the list; for trees that do not say it themselves.

    Such a list is sorted for the usual text, not for this one: the chances may rise.
    """

    FALL = 0.8

    def survivals(self, width: int) -> list[float]:
        known = len(self.seen)
        found: list[float] = []
        chance = self.PRIOR / self.FALL
        usual = [] if self.method is None else self.method.survivals(width)
        weight = self.PRIOR_WEIGHT if self.method is None else self.SHARE_WEIGHT
        mine = others = 1.0  # tokens so far: this request may do better than others, or worse
        for place in range(width):
            chance = min(usual[place] * mine / others, MOST) if usual else chance * self.FALL
            if place < known:
                chance = (self.kept[place] + weight * chance) / (self.seen[place] + weight)
            if usual:
                mine += chance
                others += usual[place]
            found.append(chance)
        return found


class Calibration:
    """From a drafter's own confidence to the rate at which such tokens were kept.

    At first they are taken for equal. Then a power of the confidence says how the drafter errs as a rule (tokens that
    it gives little chance are seldom verified, so that others must speak for them), and bins say where it errs more.
    """

    EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.96, 0.985)
    WEIGHT, MEMORY, SHARE_MEMORY = 8.0, 0.995, 0.98
    POWER_RATE, POWER_MOST = 0.02, 8.0

    def __init__(self, method: Calibration | None = None) -> None:
        self.method = method
        bins = len(self.EDGES) + 1
        self.kept = [0.0] * bins
        self.seen = [0.0] * bins
        self.power = 1.0
        self._learned = 0

    def learn(self, confidence: float, kept: bool) -> None:
        at = bisect_left(self.EDGES, confidence)
        memory = self.MEMORY if self.method is None else self.SHARE_MEMORY
        self.kept[at] = self.kept[at] * memory + kept
        self.seen[at] = self.seen[at] * memory + 1
        if self.method is not None:
            self.method.learn(confidence, kept)
        else:
            self._bend(min(max(confidence, LEAST), MOST), kept)

    def rate(self, confidence: float) -> float:
        at = bisect_left(self.EDGES, confidence)
        prior = confidence**self.power if self.method is None else self.method.rate(confidence)
        rate = (self.kept[at] + self.WEIGHT * prior) / (self.seen[at] + self.WEIGHT)
        return MOST if rate > MOST else LEAST if rate < LEAST else rate

    def _bend(self, confidence: float, kept: bool) -> None:
        """A step towards the power under which what was kept is likeliest."""
        self._learned += 1
        rate = confidence**self.power
        slope = (kept - rate) * self.power * math.log(confidence) / (1 - rate)
        step = max(self.POWER_RATE, 1 / (self._learned + 10)) * max(-2.0, min(2.0, slope))
        self.power = max(1 / self.POWER_MOST, min(self.POWER_MOST, self.power * math.exp(step)))


def products(rates: Sequence[float], before: Sequence[int] | None = None) -> list[float]:
    """Each rate times those of all that it follows; `before` as in a Guess, None: a chain."""
    found: list[float] = []
    for rate, parent in zip(rates, range(-1, len(rates) - 1) if before is None else before, strict=True):
        found.append(rate if parent < 0 else rate * found[parent])
    return found


def falling(chances: Sequence[float]) -> Sequence[float]:
    """Never rising, and with the same sums where it matters: what rises is pooled with what stands before it."""
    if all(after <= before for before, after in pairwise(chances)):
        return chances
    pools: list[tuple[float, int]] = []  # sum, how many it stands for
    for chance in chances:
        total, size = chance, 1
        while pools and pools[-1][0] * size < total * pools[-1][1]:
            before = pools.pop()
            total, size = total + before[0], size + before[1]
        pools.append((total, size))
    return [total / size for total, size in pools for _ in range(size)]
