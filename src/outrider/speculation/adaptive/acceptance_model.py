"""Acceptance rates: how probable it is that a drafted token is accepted if its parent is.

Rates are fading counts. Those of a request are drawn towards those of its method, which are drawn towards a prior.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

METHOD_MEMORY = 0.995  # share of a count left after one more: a method's rates average about 200
REQUEST_MEMORY = 0.97  # likewise, about 33: the text of one request changes
PRIOR_WEIGHT = 8.0  # observations that count as much as the prior, if that was measured
WEAK_PRIOR_WEIGHT = 2.0  # likewise, if the prior is a mere assumption
PRIOR_RATE = 0.7  # acceptance rate of a method before it is known: high enough to be tried
BIN_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.96, 0.985)  # of confidence


class Rates:
    """Fading means by key. A key that was never observed has its prior, which may be that of a method."""

    __slots__ = ("learns", "memory", "method", "prior", "totals", "weight", "weights")

    def __init__(
        self, prior: Sequence[float], method: Rates | None = None, weight: float = PRIOR_WEIGHT, learns: bool = True
    ) -> None:
        """weight: of the prior. learns: False keeps the prior, so that no request depends on others."""
        self.prior, self.method, self.weight, self.learns = tuple(prior), method, weight, learns
        self.memory = METHOD_MEMORY if method is None else REQUEST_MEMORY
        self.totals = [0.0] * len(self.prior)
        self.weights = [0.0] * len(self.prior)

    def learn(self, key: int, value: float) -> None:
        if self.learns:
            self.totals[key] = self.totals[key] * self.memory + value
            self.weights[key] = self.weights[key] * self.memory + 1
            if self.method is not None:
                self.method.learn(key, value)

    def rate(self, key: int, prior: float | None = None) -> float:
        """Return the mean of a key; prior: instead of the one of the key."""
        if self.method is not None:
            prior = self.method.rate(key, prior)
        elif prior is None:
            prior = self.prior[key]
        return (self.totals[key] + self.weight * prior) / (self.weights[key] + self.weight)

    @property
    def rates(self) -> list[float]:
        return [self.rate(key) for key in range(len(self.prior))]

    def fade(self, left: float) -> None:
        """Return towards the rates of the method. left: share of the counts that is left."""
        self.totals = [left * total for total in self.totals]
        self.weights = [left * weight for weight in self.weights]


class Calibration:
    """Acceptance rates by a drafter's confidence. At first the confidence is taken as it is."""

    def __init__(self, method: Calibration | None = None) -> None:
        self._rates: Rates = Rates([0.0] * (len(BIN_EDGES) + 1), None if method is None else method._rates)

    def learn(self, confidence: float, accepted: bool) -> None:
        self._rates.learn(bisect_left(BIN_EDGES, confidence), accepted)

    def rate(self, confidence: float) -> float:
        return self._rates.rate(bisect_left(BIN_EDGES, confidence), confidence)


class IndexRates:
    """Acceptance rates by the index of a token in its draft; for chains that is the depth.

    An index that was not drafted for long goes by its parent, so that a text that became easy is drafted deeper again.
    """

    __slots__ = ("_cached", "accepted", "memory", "method", "tried")

    def __init__(self, method: IndexRates | None = None) -> None:
        self.method = method
        self.memory = METHOD_MEMORY if method is None else REQUEST_MEMORY
        self.accepted: list[float] = []
        self.tried: list[float] = []
        self._cached: dict[int, list[float]] = {}  # rates by width, until something is learned

    def learn(self, outcomes: Sequence[float], parents: Sequence[int] | None = None) -> None:
        """Learn how each token of a draft fared: 0 or 1, or its probability where that is known."""
        self._cached.clear()
        memory, missing = self.memory, [0.0] * (len(outcomes) - len(self.tried))
        self.accepted = [value * memory for value in self.accepted] + missing
        self.tried = [value * memory for value in self.tried] + missing
        for index, (outcome, parent) in enumerate(zip(outcomes, before(len(outcomes), parents), strict=True)):
            self.accepted[index] += outcome
            self.tried[index] += 1.0 if parent < 0 else outcomes[parent]
        if self.method is not None:
            self.method.learn(outcomes, parents)

    def rates(self, width: int, parents: Sequence[int] | None = None) -> list[float]:
        """Return the rate of each token in proportion to its parent."""
        if self.method is None:
            if width not in self._cached:
                self._cached[width] = self._rates(width, parents, [PRIOR_RATE] * width, WEAK_PRIOR_WEIGHT)
            return self._cached[width]
        return self._rates(width, parents, self.method.rates(width, parents), PRIOR_WEIGHT)

    def _rates(self, width: int, parents: Sequence[int] | None, usual: list[float], weight: float) -> list[float]:
        found: list[float] = []
        known = len(self.tried)
        for index, parent in enumerate(before(width, parents)):
            rate = usual[index]
            if parent >= 0:  # as much better or worse than usual as the parent
                rate += found[parent] - usual[parent]
            if index < known:
                rate = (self.accepted[index] + weight * rate) / (self.tried[index] + weight)
            found.append(0.001 if rate < 0.001 else 0.999 if rate > 0.999 else rate)
        return found

    def cumulative(self, width: int, parents: Sequence[int] | None = None) -> list[float]:
        """Return the probability of each token to be accepted together with all before it."""
        return products(self.rates(width, parents), parents)


def before(width: int, parents: Sequence[int] | None) -> Sequence[int]:
    """Return the parent of each token of a draft; those of a chain if `parents` is None."""
    return range(-1, width - 1) if parents is None else parents[:width]


def products(rates: Sequence[float], parents: Sequence[int] | None = None) -> list[float]:
    """Multiply each rate by those of all tokens that it follows."""
    found: list[float] = []
    for rate, parent in zip(rates, before(len(rates), parents), strict=True):
        found.append(rate if parent < 0 else rate * found[parent])
    return found
