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
UNHEARD = 1.5  # how much dearer than its neighbours suggest the first measurement of a count may make it
SCALE_RATE, KNOT_RATE, NOISE_RATE = 0.03, 0.02, 0.02
UNSETTLED, NOTABLE = 16, 0.003  # after so many measurements of a count only notable changes bend the curve
CAUTION = 2.0  # how much more the least count, which stands for plain decoding, is given the benefit of the doubt
LEEWAY = 0.2  # share of what a count costs beyond the least one
FADE = 0.997  # what a measurement is worth after another one, of other counts
CERTAIN = 64  # more measurements than this add no weight
EXACT = 32  # up to here every count has a knot of its own; beyond, neighbours share one
FURTHER, AT_ONCE = 2, 16  # rows are doubled at most by going where no measurement was, or so many are added
AHEAD = (0, 1, 3, 7, 15, 31, 63, 127, 255)
LEAST = 1e-9


class Knot:
    """A count, and the seconds that it took, in units of its curve's scale."""

    __slots__ = ("count", "first", "fitted", "last", "limit", "seen", "value")

    def __init__(self, count: float, limit: float) -> None:
        self.count = count
        self.limit = limit  # a single measurement is not believed beyond it
        self.value = 0.0
        self.fitted = 0.0  # the value that its curve goes by
        self.seen = 0
        self.last = 0  # which measurement of its curve was its last
        self.first: list[float] = []

    def add(self, count: int, value: float) -> float:
        """The logarithm by which `value` was off, as far as it is believed; nothing while there is little to go by."""
        self.seen += 1
        self.count += (count - self.count) / min(self.seen, CERTAIN)
        if self.seen <= FIRST:
            self.first = sorted([*self.first, value])
            self.value = self.first[(self.seen - 1) // 2] if self.seen > 1 else min(value, max(self.limit, LEAST))
            return 0.0
        off = max(-SURPRISE, min(SURPRISE, math.log(value / self.value)))
        self.value *= math.exp(max(KNOT_RATE, 1 / self.seen) * off)
        return off


class LatencyCurve:
    """Seconds by a count: running means of what was measured, straight lines between, never falling.

    Beyond the last count it goes on as steeply as over its second half; below the first it falls to nothing at zero.
    """

    def __init__(self) -> None:
        self._knots: dict[int, Knot] = {}
        self._scale = 1.0
        self._counts: list[float] = []
        self._values: list[float] = []
        self._stale = False
        self._observed = 0
        self._guessed = False  # nothing of it was measured, even its scale is not known
        self._noise = 0.05  # how far measurements lie off, as a rule

    @property
    def known(self) -> bool:
        return bool(self._knots)

    def measured(self, count: int) -> bool:
        knot = self._knots.get(_bucket(count))
        return knot is not None and knot.seen > 0

    def beyond(self, least: int) -> LatencyCurve:
        """A curve that is thought to be like this one from `least` on, up to a factor, and is to be measured."""
        found = LatencyCurve()
        for more in AHEAD:
            value = max(self.seconds(least + more), LEAST)
            knot = found._knots[_bucket(least + more)] = Knot(least + more, UNHEARD * value)
            knot.value = value
        found._guessed = found._stale = True
        return found

    def observe(self, count: int, seconds: float) -> None:
        if self._guessed:
            self._guessed = False
            self._scale = max(seconds, LEAST) / max(self.seconds(count), LEAST)
        elif not self.measured(count):  # a second count, or a further one: they speak for themselves
            self._knots = {at: knot for at, knot in self._knots.items() if knot.seen}
        at = _bucket(count)
        knot = self._knots.get(at)
        if knot is None:
            limit = UNHEARD * self.seconds(count) / self._scale if len(self._knots) > 1 else math.inf
            knot = self._knots[at] = Knot(count, limit)
        off = knot.add(count, max(seconds, LEAST) / self._scale)
        if off:
            sure = (min(knot.seen, CERTAIN) / CERTAIN) ** 2  # at first it is rather the count itself that was mistaken
            self._fit()
            share = min(1.0, 20 * knot.value / self._values[-1])  # what costs next to nothing says little of the rest
            self._scale *= math.exp(SCALE_RATE * sure * share * off)
            self._noise += NOISE_RATE * (abs(off) - self._noise)
        self._observed += 1
        knot.last = self._observed
        if (
            knot.seen <= UNSETTLED
            or self._observed % UNSETTLED == 0
            or abs(knot.value - knot.fitted) > NOTABLE * knot.fitted
        ):
            self._stale = True

    def seconds(self, count: float) -> float:
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
        """The never falling curve that is nearest to the means: neighbours that fall are pooled.

        What was seldom measured, or long ago, is taken to be as cheap as it may well be: to be tried, and known.
        """
        if not self._stale:
            return
        self._stale = False
        knots = sorted(self._knots.values(), key=_count_of)
        for knot in knots:
            knot.fitted = knot.value
        counts = [knot.count for knot in knots]
        values = [knot.value - self._doubt(knot) * self._leeway(knot.value, knots[0].value) for knot in knots]
        values[0] = knots[0].value * (1 - CAUTION * self._noise * self._doubt(knots[0]))
        if any(after < before for before, after in pairwise(values)):
            values = _rising(values, [max(min(knot.seen, CERTAIN), 1) for knot in knots])
        self._counts, self._values = self._hopeful(counts, values)

    def _hopeful(self, counts: list[float], values: list[float]) -> tuple[list[float], list[float]]:
        """Costs may rise in steps, at round numbers: counts before one that was measured may cost less than the line
        says, and counts that share a knot may all cost the same."""
        found: tuple[list[float], list[float]] = ([], [])
        for place, (count, value) in enumerate(zip(counts, values, strict=True)):
            if place and count - found[0][-1] > 1 and count <= EXACT:
                low, gap = found[1][-1], count - found[0][-1]
                found[0].append(count - 1)
                line = value - (value - low) / gap
                found[1].append(max(low, line * (1 - self._noise)))
            found[0].append(count)
            found[1].append(value)
            end = _bucket(math.ceil(count))
            if end > count:
                found[0].append(end)
                found[1].append(value)
        return found

    def _leeway(self, value: float, least: float) -> float:
        """How much cheaper a count may be: as far as measurements err, and not by much of what it adds to the least."""
        return max(min(self._noise * value, LEEWAY * (value - least)), 0.0)

    def _doubt(self, knot: Knot) -> float:
        seen = min(knot.seen, CERTAIN) * FADE ** (self._observed - knot.last)
        return 1.0 if seen < 1 else seen**-0.5


class LatencyModel:
    """Seconds of a target pass: for each number of requests a curve by rows, requests and drafted tokens together.

    What a number of requests has not shown yet is taken from the nearest one that has, in proportion.
    """

    def __init__(self) -> None:
        self._curves: dict[int, LatencyCurve] = {}
        self._most = 0  # rows that were measured

    @property
    def known(self) -> bool:
        return bool(self._curves)

    def covers(self, requests: int) -> bool:
        """Whether a pass of so many requests without drafts was seen."""
        curve = self._curves.get(_bucket(requests))
        return curve is not None and curve.measured(requests)

    def observe(self, requests: int, drafted: int, seconds: float) -> None:
        at = _bucket(requests)
        if at not in self._curves:
            self._curves[at] = self._nearest(requests).beyond(requests) if self._curves else LatencyCurve()
        self._curves[at].observe(requests + drafted, seconds)
        self._most = max(self._most, requests + drafted)

    def seconds(self, requests: int, drafted: float) -> float:
        return max(self._nearest(requests).seconds(requests + drafted), LEAST)

    def table(self, requests: int, most: int) -> list[float]:
        """Seconds with 0 to `most` drafted tokens; as many as were never tried, by far, are taken to cost too much."""
        last = min(requests + most, max(FURTHER * self._most, requests + AT_ONCE))
        found = [max(seconds, LEAST) for seconds in self._nearest(requests).table(requests, last)]
        return found + [math.inf] * (requests + most - last)

    def _nearest(self, requests: int) -> LatencyCurve:
        curves = self._curves
        found = curves.get(_bucket(requests))
        return curves[min(curves, key=lambda known: abs(known - requests))] if found is None else found


def _count_of(knot: Knot) -> float:
    return knot.count


def _bucket(count: int) -> int:
    if count <= EXACT:
        return count
    grain = 1 << ((count - 1).bit_length() - 4)
    return -(-count // grain) * grain  # up to a round number, as machines pad their rows


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
