"""Acceptance rates: how probable it is that a drafted token is accepted if its parent is.

Rates are fading means. Those of a request are drawn towards those of its method, which are drawn towards a prior. With
an adapter, a method has rates of its own: the text of an adapted target may be harder or easier to draft.
"""

from __future__ import annotations

from collections.abc import Sequence

METHOD_MEMORY = 0.995  # share of a count left after one more: a method's rates average about 200
REQUEST_MEMORY = 0.97  # likewise, about 33: the text of one request changes
PRIOR_WEIGHT = 8.0  # observations that count as much as the prior: a few do not end or begin drafting by chance
PRIOR_RATE = 0.7  # acceptance rate of a method before it is known: high enough to be tried
BINS = 16  # of confidence: more tell drafts apart, fewer are learned sooner


class Rates:
    """Fading means by key. A key that was never observed has its prior, which may be that of a method."""

    def __init__(
        self,
        prior: Sequence[float] = (),
        method: Rates | None = None,
        learns: bool = True,
        base: Rates | None = None,
    ) -> None:
        """learns: False keeps the prior, so that no request depends on others.

        base: rates that are the prior of these, and learn nothing from them.
        """
        self.prior, self.method, self.learns, self.base = tuple(prior), method, learns, base
        self._memory = METHOD_MEMORY if method is None else REQUEST_MEMORY
        self._sums: dict[int, tuple[float, float]] = {}  # of values and of weights, by key

    @property
    def has_learned(self) -> bool:
        return bool(self._sums)

    def learn(self, key: int, value: float, weight: float = 1.0) -> None:
        """Learn a value; weight 0 only fades the ones before it."""
        rates: Rates | None = self
        while rates is not None:
            if rates.learns:
                total, weights = rates._sums.get(key, (0.0, 0.0))
                rates._sums[key] = total * rates._memory + value, weights * rates._memory + weight
            rates = rates.method

    def weight(self, key: int) -> float:
        """Return how many observations of a key count."""
        return self._sums.get(key, (0.0, 0.0))[1]

    def rate(self, key: int, prior: float | None = None) -> float:
        """Return the mean of a key; prior: instead of the one of the key."""
        source = self.method or self.base
        if source is not None:
            prior = source.rate(key, prior)
        elif prior is None:
            prior = self.prior[key]
        total, weights = self._sums.get(key, (0.0, 0.0))
        return (total + PRIOR_WEIGHT * prior) / (weights + PRIOR_WEIGHT)


class DraftRates(Rates):
    """Acceptance rates by the index of a token in its draft; for chains that is the depth.

    An index that was not drafted for long goes by its parent, so that a text that became easy is drafted deeper again.
    """

    def __init__(self, method: DraftRates | None = None, base: DraftRates | None = None) -> None:
        super().__init__(method=method, base=base)
        self._shared = self if method is None else method
        self._parents: Sequence[int] = () if base is None else base._parents  # of the last draft of the method

    def learn_draft(self, outcomes: Sequence[float], parents: Sequence[int] | None = None) -> None:
        """Learn how each token of a draft fared: 0 or 1, or its probability if that is known."""
        self._shared._parents = parents = range(-1, len(outcomes) - 1) if parents is None else parents
        for index, (outcome, parent) in enumerate(zip(outcomes, parents, strict=True)):
            self.learn(index, outcome, 1.0 if parent < 0 else outcomes[parent])
        for index in range(len(outcomes), len(self._sums)):
            self.learn(index, 0.0, 0.0)

    def acceptance(self, width: int) -> list[float]:
        """Return the probability of each token of a draft like the last one to be accepted; a chain continues it."""
        known, rates, found = self._shared._parents, [PRIOR_RATE], [1.0]  # the last entry is that of the text's end
        for index, parent in enumerate([*known[:width], *range(len(known) - 1, width - 1)]):
            rate = self.rate(index, rates[parent])
            rates.insert(index, rate)
            found.insert(index, rate * found[parent])
        return found[:-1]


def confidence_key(confidence: float) -> int:
    """Return the key of the acceptance rate of tokens with about this confidence."""
    return round(BINS * confidence)


def products(rates: Sequence[float], parents: Sequence[int]) -> list[float]:
    """Multiply each rate by those of all tokens that it follows."""
    found: list[float] = []
    for rate, parent in zip(rates, parents, strict=True):
        found.append(rate if parent < 0 else rate * found[parent])
    return found
