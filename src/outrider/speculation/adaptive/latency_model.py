"""Latency models: seconds of a target step by rows, and of a drafter call by width.

Latencies are measured at start-up and corrected while the engine runs. A single measurement says little, because the
process may have been interrupted. A machine that becomes slower is slower at every count, so that a measurement moves
a factor common to all counts, and its own count half as much.
"""

from __future__ import annotations

import math
from bisect import bisect_right

MEDIAN_OF = 5  # measurements of a count of which the median is taken; two outliers do not matter
MAX_SURPRISE = 0.3  # log ratio: a measurement counts as at most 35 % off, since 2 % of them are 2 to 20 times too long
LEARNING_RATE = 0.03  # per measurement: a machine that becomes slower is followed within about 30 steps
MAX_GROWTH = 2  # rows may at most double against those measured so far, since extrapolation may be far off
FIRST_NOISE = 0.05  # relative error of a measurement before it is known
MAX_EXACT = 32  # counts up to this one have points of their own
MIN_SECONDS = 1e-9  # avoids a division by zero


class Point:
    """A measured count; its value is in units of its curve's scale."""

    __slots__ = ("count", "first", "seen", "value")

    def __init__(self, count: int, value: float) -> None:
        self.count = count  # the least one measured; counts up to the next point share it
        self.value = value  # a prediction until it is measured
        self.seen = 0
        self.first: list[float] = []

    def add(self, value: float) -> float:
        """Learn from a measurement; return its log ratio to the expected value, once that is known."""
        self.seen += 1
        if self.seen <= MEDIAN_OF:
            first = value if self.seen > 1 else min(value, self.value * math.exp(MAX_SURPRISE))
            self.first = sorted([*self.first, first])
            self.value = self.first[(self.seen - 1) // 2]
            return 0.0
        off = max(-MAX_SURPRISE, min(MAX_SURPRISE, math.log(value / self.value)))
        self.value *= math.exp(max(LEARNING_RATE / 2, 1 / self.seen) * off)
        return off


class LatencyCurve:
    """Seconds by a count: measured means, lines between them, never falling.

    Beyond the last count it rises as steeply as over its second half; below the first it falls to 0 at 0.
    """

    def __init__(self) -> None:
        self._points: dict[int, Point] = {}
        self._scale = 1.0
        self._scaled = True  # False: all points are predictions, and the scale is not known
        self._counts: list[int] = []
        self._values: list[float] = []
        self._table: list[float] = []  # values of the counts from 0 on, as far as they were asked for
        self._stale = False
        self._observed = 0
        self._noise = FIRST_NOISE  # fading mean: a count measured n times may cost less by this over the root of n

    @property
    def known(self) -> bool:
        return bool(self._points)

    def measured(self, count: int) -> bool:
        point = self._points.get(_bucket(count))
        return point is not None and point.seen > 0

    def predict(self, first: int) -> LatencyCurve:
        """Return an unmeasured curve of the same shape from `first` on, up to a factor."""
        curve = LatencyCurve()
        for more in (2**power - 1 for power in range(9)):
            curve._points[_bucket(first + more)] = Point(first + more, max(self.seconds(first + more), MIN_SECONDS))
        curve._stale, curve._scaled = True, False
        return curve

    def observe(self, count: int, seconds: float) -> None:
        seconds, key = max(seconds, MIN_SECONDS), _bucket(count)
        if not self._scaled:
            self._scaled = True
            self._scale = seconds / max(self.seconds(count), MIN_SECONDS)
        elif not self.measured(count):  # a second count is measured: lines between measured counts say more
            self._points = {known: point for known, point in self._points.items() if point.seen}
        if key not in self._points:
            predicted = self.seconds(count) / self._scale if len(self._points) > 1 else math.inf
            self._points[key] = Point(count, max(predicted, MIN_SECONDS))
        point = self._points[key]
        point.count = key
        off = point.add(seconds / self._scale)
        if point.seen > MEDIAN_OF:
            self._noise += LEARNING_RATE * (abs(off) - self._noise)
        if off:  # a count that costs nearly nothing says nearly nothing about the others
            share = point.value / max(other.value for other in self._points.values())
            self._scale *= math.exp(LEARNING_RATE * min(point.seen * LEARNING_RATE, 1.0) * share * off)
        self._observed += 1
        if not off or self._observed % MEDIAN_OF == 0:  # a single measurement hardly moves a count that is known
            self._stale = True

    def seconds(self, count: float) -> float:
        """Return the seconds of a count; only where something is known."""
        self._fit()
        low = max(bisect_right(self._counts, count) - 1, -1)
        start, value, slope = self._segment(low)
        return self._scale * (value + slope * (count - start))

    def table(self, first: int, last: int) -> list[float]:
        """Return the seconds of the counts from `first` to `last`."""
        self._fit()
        table, counts = self._table, self._counts
        while len(table) <= last:
            low = bisect_right(counts, len(table)) - 1
            start, value, slope = self._segment(low)
            stop = counts[low + 1] if low + 1 < len(counts) else last + 1
            table += [value + slope * (count - start) for count in range(len(table), stop)]
        return [self._scale * value for value in table[first : last + 1]]

    def _segment(self, low: int) -> tuple[int, float, float]:
        """Return start, value and slope of the line that begins at point `low`; -1: the line from 0."""
        counts, values = self._counts, self._values
        if low < 0:
            return 0, 0.0, values[0] / counts[0]
        if low + 1 < len(counts):
            return counts[low], values[low], (values[low + 1] - values[low]) / (counts[low + 1] - counts[low])
        half = max(bisect_right(counts, counts[-1] / 2) - 1, 0)
        slope = (values[-1] - values[half]) / (counts[-1] - counts[half]) if half < low else 0.0
        return counts[low], values[low], slope

    def _fit(self) -> None:
        """Fit the nearest curve that never falls: neighbors that fall are averaged.

        Counts that were seldom measured are taken to cost as little as they may, so that they are tried. The first one,
        a step without drafts, gets twice this benefit of the doubt: drafts that lose would go on unnoticed.
        """
        if not self._stale:
            return
        self._stale, self._table = False, []
        points = sorted(self._points.values(), key=lambda point: point.count)
        pools: list[tuple[float, float, int]] = []  # value, weight, number of points
        for point in points:
            weight, size = min(max(point.seen, 1), 1 / LEARNING_RATE), 1
            doubt = self._noise * weight**-0.5
            least, value = points[0].value, point.value
            value -= max(min(doubt * value, 4 * doubt * (value - least)), 0.0) if pools else 2 * doubt * value
            while pools and pools[-1][0] > value:
                before = pools.pop()
                total = before[1] + weight
                value, weight, size = (before[0] * before[1] + value * weight) / total, total, before[2] + size
            pools.append((value, weight, size))
        self._counts, self._values = [], []
        fitted = [value for value, _, size in pools for _ in range(size)]
        for count, value in zip([point.count for point in points], fitted, strict=True):
            if self._counts and self._counts[-1] + 1 < count <= MAX_EXACT:  # latencies may rise in steps
                low, start = self._values[-1], self._counts[-1]
                line = value - (value - low) / (count - start)
                self._counts.append(count - 1)
                self._values.append(max(low, line * (1 - self._noise)))
            self._counts.append(count)
            self._values.append(value)


class LatencyModel:
    """Seconds of a target step: for each batch size a curve by rows, batch size and drafted tokens together.

    A batch size that was not measured yet goes by the nearest one that was.
    """

    def __init__(self) -> None:
        self._curves: dict[int, LatencyCurve] = {}
        self._max_rows = 0  # measured

    @property
    def known(self) -> bool:
        return bool(self._curves)

    def covers(self, batch_size: int) -> bool:
        """Return whether a step of this batch size without drafts was measured."""
        curve = self._curves.get(_bucket(batch_size))
        return curve is not None and curve.measured(batch_size)

    def observe(self, batch_size: int, drafted: int, seconds: float) -> None:
        key = _bucket(batch_size)
        if key not in self._curves:
            self._curves[key] = self._nearest(batch_size).predict(batch_size) if self._curves else LatencyCurve()
        self._curves[key].observe(batch_size + drafted, seconds)
        self._max_rows = max(self._max_rows, batch_size + drafted)

    def seconds(self, batch_size: int, drafted: float) -> float:
        return max(self._nearest(batch_size).seconds(batch_size + drafted), MIN_SECONDS)

    def table(self, batch_size: int, drafted: int) -> list[float]:
        """Return the seconds with 0 to `drafted` tokens; infinite where extrapolation would reach too far."""
        last = min(batch_size + drafted, MAX_GROWTH * max(self._max_rows, batch_size))
        return self._nearest(batch_size).table(batch_size, last) + [math.inf] * (batch_size + drafted - last)

    def _nearest(self, batch_size: int) -> LatencyCurve:
        found = self._curves.get(_bucket(batch_size))
        return found or self._curves[min(self._curves, key=lambda known: abs(known - batch_size))]


def _bucket(count: int) -> int:
    """Round a count above `MAX_EXACT` up to a number of five binary digits, as devices pad their rows."""
    grain = 1 << max((count - 1).bit_length() - MAX_EXACT.bit_length() + 1, 0) if count else 1
    return -(-count // grain) * grain
