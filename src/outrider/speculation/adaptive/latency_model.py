"""Latency: seconds of a step or a draft by a count, from measurements. One in fifty may be 2 to 20 times too long."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

MEDIAN_OF = 15  # latest measurements of a count: more average out noise, fewer follow a machine that becomes slower
DIGITS = 5  # binary digits of a count that are told apart: devices pad their rows, and few counts are measured often
MIN_SECONDS = 1e-9  # avoids a division by zero
START_UP_ROUNDS = 5  # measurements of a count at start-up: the least of them is not interrupted, also on a busy machine
START_UP_SECONDS = 0.5  # after which no third round begins: long steps are disturbed less
RECENT = 5  # latest steps without drafts whose median is the speed of the machine: two of them may be far too long


class LatencyCurve:
    """Seconds by a count: medians, fitted so that they never fall, and lines between them.

    Beyond the last count it rises as steeply as over its second half; below the first it falls to 0 at 0.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._shape: dict[int, float] = {}  # predicted counts: seconds in proportion to the first of them
        self._table: list[float] = []  # seconds by count, as far as they were asked for

    def observe(self, count: int, seconds: float) -> None:
        """Learn from a measurement. The prediction counts as an earlier one, since the first may be far too long."""
        if (key := _round_up(count)) not in self._samples:
            predicted = [self.seconds(count)] if len(self._samples) > 1 else []
            self._samples[key] = deque(predicted, MEDIAN_OF)
        samples = self._samples[key]
        samples.append(max(seconds, MIN_SECONDS))
        median = sorted(samples)[(len(samples) - 1) // 2]
        if self._medians.get(key) != median:
            self._medians[key], self._table = median, []

    def num_measured(self, count: int) -> int:
        """Return how many measurements of a count are kept."""
        return len(self._samples.get(_round_up(count), ()))

    def copy(self, first: int) -> LatencyCurve:
        """Return a curve that has the same shape from `first` on, until it is measured itself."""
        curve, counts = LatencyCurve(), (first, *(count for count in self._samples if count > first), 2 * first)
        curve._shape = {_round_up(count): self.seconds(count) / self.seconds(first) for count in counts}
        return curve

    def seconds(self, count: int) -> float:
        if len(self._table) <= count:
            self.table(count)
        return self._table[count]

    def table(self, last: int) -> list[float]:
        """Return the seconds of the counts from 0 to `last`; 0 if nothing was measured."""
        if len(self._table) <= last:
            self._table = self._fit(last) if self._samples else [0.0] * (last + 1)
        return self._table[: last + 1]

    def _fit(self, last: int) -> list[float]:
        """Return the seconds of all counts up to `last` or the last one measured."""
        scale = self._medians.get(next(iter(self._shape), 0), 0.0)
        medians = {count: ratio * scale for count, ratio in self._shape.items()} | self._medians
        counts = sorted(medians)
        pools = isotonic([medians[count] for count in counts])
        values = [value for value, size in pools for _ in range(size)]
        if last > counts[-1]:
            half = max(bisect_right(counts, counts[-1] / 2) - 1, 0)
            slope = (values[-1] - values[half]) / max(counts[-1] - counts[half], 1)
            values.append(values[-1] + slope * (last - counts[-1]))
            counts.append(last)
        lines = zip([0, *counts], [0.0, *values], counts, values, strict=False)
        return [
            low + (high - low) * more / (stop - start)
            for start, low, stop, high in lines
            for more in range(stop - start)
        ] + values[-1:]


class LatencyModel:
    """Seconds of a target step: a curve by rows for each batch size; an unmeasured one goes by the nearest.

    Steps with drafts may be rare, and a machine becomes slower or faster between them, and with the length of texts.
    So all measurements are divided by the slowdown at their time: seconds here are those of the machine as it was when
    it was first measured, with an empty context.
    """

    def __init__(self) -> None:
        self._curves: dict[int, LatencyCurve] = {}
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)  # steps without drafts: curve and seconds
        self._measured: dict[int, int] = {}  # batch sizes whose steps without drafts were measured often enough: curve
        self.context_cost = 0.0  # what each token of the context adds to a step, in proportion to an empty context

    def covers(self, batch_size: int) -> bool:
        """Return whether a step of this batch size was measured."""
        return _round_up(batch_size) in self._curves

    @property
    def slowdown(self) -> float:
        """Return the latest seconds of steps without drafts, in proportion to the first ones."""
        if not self._recent:
            return 1.0
        ratios = sorted(seconds / self._curves[key].seconds(key) for key, seconds in self._recent)
        return max(ratios[(len(ratios) - 1) // 2], MIN_SECONDS)

    def observe(self, batch_size: int, drafted: int, seconds: float, context: float = 0.0) -> None:
        """Learn from a step. context: mean tokens before those of the step."""
        seconds /= 1 + self.context_cost * context
        if not drafted and batch_size in self._measured:  # most steps are such: do nothing else for them
            self._recent.append((self._measured[batch_size], seconds))
            return
        rows, key = batch_size + drafted, _round_up(batch_size)
        if not self.covers(batch_size):
            self._curves[key] = self._nearest(key).copy(rows) if self._curves else LatencyCurve()
        if drafted or self._curves[key].num_measured(rows) < RECENT:
            self._curves[key].observe(rows, seconds / self.slowdown)
        if not drafted:  # the first ones are the unit of the slowdown, and do not change after that
            self._recent.append((key, seconds))
            if self._curves[key].num_measured(rows) >= RECENT:
                self._measured[batch_size] = key

    def begin(self, seconds: dict[int, float]) -> None:
        """Begin with the seconds of steps of one request by drafted tokens, without interruptions."""
        for _ in range(RECENT):
            for drafted in sorted(seconds):
                self.observe(1, drafted, seconds[drafted])
        while len(self._recent) > 1:  # so that the next steps without drafts count: start-up may have been slow
            self._recent.pop()

    def seconds(self, batch_size: int, drafted: int) -> float:
        return self._nearest(_round_up(batch_size)).seconds(batch_size + drafted)

    def table(self, batch_size: int, drafted: int) -> list[float]:
        """Return the seconds with 0 to `drafted` tokens."""
        return self._nearest(_round_up(batch_size)).table(batch_size + drafted)[batch_size:]

    def _nearest(self, key: int) -> LatencyCurve:
        return self._curves.get(key) or self._curves[min(self._curves, key=lambda known: abs(known - key))]


def least_seconds(measure: Callable[[int], float], counts: Sequence[int]) -> dict[int, float]:
    """Measure each count several times in turns; return the least seconds, since interruptions only lengthen them.

    At least twice: the first call of a shape may be recorded, which takes longer.
    """
    started, least = time.perf_counter(), dict.fromkeys(counts, float("inf"))
    for number in range(START_UP_ROUNDS):
        if number < 2 or time.perf_counter() - started < START_UP_SECONDS:
            least = {count: min(seconds, measure(count)) for count, seconds in least.items()}
    return least


def isotonic(values: Sequence[float]) -> list[tuple[float, int]]:
    """Return the nearest values that never fall, with the number of values that each stands for: their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        size = 1
        while pools and pools[-1][0] > value:
            mean, more = pools.pop()
            value, size = (mean * more + value * size) / (more + size), more + size
        pools.append((value, size))
    return pools


def _round_up(count: int) -> int:
    """Round a count up to a number of `DIGITS` binary digits."""
    grain = 1 << max(count.bit_length() - DIGITS, 0)
    return -(-count // grain) * grain
