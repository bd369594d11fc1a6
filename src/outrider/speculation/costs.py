"""What things cost on this machine: measured at start-up, corrected while it runs.

A pass that was interrupted says little about the next one; a machine that has become slower is slower at every count.
So a measurement moves what is common to all counts (the scale) quickly, its own count slowly, and neither of them far.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

FIRST = 5  # measurements of a count of which the middle one is taken
SURPRISE = 0.3  # how far a measurement may lie off, as a logarithm, and still be believed in full
SCALE_RATE, KNOT_RATE, SHARE_RATE = 0.1, 0.02, 0.05
CERTAIN = 64  # more measurements than this add no weight
EXACT = 32  # up to here every count has a knot of its own; beyond, neighbours within an eighth share one
LEAST = 1e-9


class Knot:
    """A count, and the seconds that it took, in units of its curve's scale."""

    __slots__ = ("count", "first", "seen", "value")

    def __init__(self, count: float) -> None:
        self.count = count
        self.value = 0.0
        self.seen = 0
        self.first: list[float] = []

    def add(self, count: int, value: float) -> float:
        """The logarithm by which `value` was off, as far as it is believed; nothing while there is little to go by."""
        self.seen += 1
        self.count += (count - self.count) / min(self.seen, CERTAIN)
        if self.seen <= FIRST:
            self.first = sorted([*self.first, value])
            self.value = self.first[(self.seen - 1) // 2]
            return 0.0
        off = max(-SURPRISE, min(SURPRISE, math.log(value / self.value)))
        self.value *= math.exp(max(KNOT_RATE, 1 / self.seen) * off)
        return off


class Curve:
    """Seconds by a count: running means of what was measured, straight lines between, never falling.

    Beyond the last count it goes on as steeply as over its second half; below the first it falls to nothing at zero.
    """

    def __init__(self) -> None:
        self._knots: dict[int, Knot] = {}
        self._scale = 1.0
        self._counts: list[float] = []
        self._values: list[float] = []
        self._stale = False

    @property
    def known(self) -> bool:
        return bool(self._knots)

    @property
    def least(self) -> float:
        """The smallest count that was measured."""
        self._fit()
        return self._counts[0]

    def observe(self, count: int, seconds: float) -> None:
        at = _bucket(count)
        knot = self._knots.get(at)
        if knot is None:
            knot = self._knots[at] = Knot(count)
        off = knot.add(count, max(seconds, LEAST) / self._scale)
        self._scale *= math.exp(SCALE_RATE * off)
        self._stale = True

    def seconds(self, count: int) -> float:
        """Only where something is known."""
        self._fit()
        counts, values = self._counts, self._values
        place = bisect_right(counts, count)
        if place == 0:
            return self._scale * values[0] * count / counts[0]
        low, start = values[place - 1], counts[place - 1]
        if place == len(counts):
            return self._scale * (low + self._steepness() * (count - start))
        return self._scale * (low + (values[place] - low) * (count - start) / (counts[place] - start))

    def table(self, first: int, last: int) -> list[float]:
        """Seconds of the counts from `first` to `last`."""
        self._fit()
        found: list[float] = []
        scale, counts, values = self._scale, self._counts, self._values
        for place in range(bisect_right(counts, first), len(counts) + 1):
            start, low = (counts[place - 1], values[place - 1]) if place else (0.0, 0.0)
            if place < len(counts):
                stop = min(last + 1, math.ceil(counts[place]))
                slope = (values[place] - low) / (counts[place] - start)
            else:
                stop, slope = last + 1, self._steepness()
            base, slope = scale * (low - slope * start), scale * slope
            found += [base + slope * count for count in range(first + len(found), stop)]
            if stop > last:
                break
        return found

    def _steepness(self) -> float:
        counts, values = self._counts, self._values
        if len(counts) == 1:
            return 0.0  # taken for flat until something else is seen
        half = max(bisect_right(counts, counts[-1] / 2) - 1, 0)
        return (values[-1] - values[half]) / (counts[-1] - counts[half])

    def _fit(self) -> None:
        """The never falling curve that is nearest to the means: neighbours that fall are pooled."""
        if not self._stale:
            return
        self._stale = False
        knots = sorted(self._knots.values(), key=_count_of)
        self._counts = [knot.count for knot in knots]
        self._values = [knot.value for knot in knots]
        if any(after < before for before, after in pairwise(self._values)):
            self._values = _rising(self._values, [min(knot.seen, CERTAIN) for knot in knots])


class Cost:
    """Seconds of a target pass: by its rows (requests and drafted tokens), and a factor by requests.

    Rows of one request share its keys and values, so that the same number of rows costs more in more requests. The
    factor says by how much; of the number of requests that was seen first it is one.
    """

    def __init__(self) -> None:
        self._rows = Curve()
        self._factors: dict[int, float] = {}
        self._seen: dict[int, int] = {}

    @property
    def known(self) -> bool:
        return self._rows.known

    def covers(self, requests: int) -> bool:
        """Whether the cost of a pass without drafts is known, and not only guessed from larger ones."""
        return self._rows.known and self._rows.least <= requests

    def observe(self, requests: int, drafted: int, seconds: float) -> None:
        at = _bucket(requests)
        seen = self._seen[at] = self._seen.get(at, 0) + 1
        if len(self._seen) == 1:
            self._factors[at] = 1.0
        else:
            factor = self._factor(requests)
            off = math.log(max(seconds, LEAST) / max(factor * self._rows.seconds(requests + drafted), LEAST))
            off = max(-SURPRISE, min(SURPRISE, off))
            if at != next(iter(self._factors)):
                self._factors[at] = factor * math.exp(max(SHARE_RATE, 1 / (1 + seen)) * off)
        self._rows.observe(requests + drafted, seconds / self._factors[at])

    def seconds(self, requests: int, drafted: int) -> float:
        return max(self._factor(requests) * self._rows.seconds(requests + drafted), LEAST)

    def table(self, requests: int, most: int) -> list[float]:
        """Seconds with 0 to `most` drafted tokens."""
        factor = self._factor(requests)
        return [max(factor * seconds, LEAST) for seconds in self._rows.table(requests, requests + most)]

    def _factor(self, requests: int) -> float:
        factors = self._factors
        found = factors.get(_bucket(requests))
        return factors[min(factors, key=lambda known: abs(known - requests))] if found is None else found


def _count_of(knot: Knot) -> float:
    return knot.count


def _bucket(count: int) -> int:
    if count <= EXACT:
        return count
    grain = 1 << (count.bit_length() - 4)
    return count // grain * grain


def _rising(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    pools: list[tuple[float, int, int]] = []  # value, weight, how many it stands for
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            total = before[1] + pool[1]
            pool = ((before[0] * before[1] + pool[0] * pool[1]) / total, total, before[2] + pool[2])
        pools.append(pool)
    return [value for value, _, size in pools for _ in range(size)]
