"""How many drafted tokens pay: from what steps have cost so far, and from how often drafts were kept.

Zero is a width. With exact match this only moves time, never a token of the text; the modes that draw their own coins
run without it, so that a seed reproduces them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..types import Guess, Request

PATIENCE = 64  # after so many drafts that did not seem to pay, a short one is tried: the text may have changed
PROBE = 2  # tokens of it


class Mean:
    """A running mean that follows the machine."""

    __slots__ = ("seen", "value")
    LEAST = 0.1  # weight of a new measurement, once there are enough

    def __init__(self) -> None:
        self.value = 0.0
        self.seen = 0

    def add(self, now: float) -> None:
        if self.seen:  # a step that was interrupted says nothing about the next one
            now = min(now, 2 * self.value + 1e-6)
        self.seen += 1
        self.value += max(self.LEAST, 1 / self.seen) * (now - self.value)


class Cost:
    """Seconds of a target pass with so many requests, and so many drafted tokens more."""

    def __init__(self) -> None:
        self.plain: dict[int, Mean] = {}  # by requests
        self.extra: dict[int, Mean] = {}  # by drafted tokens: what they add

    def observe(self, requests: int, drafted: int, seconds: float) -> None:
        if drafted == 0:
            self.plain.setdefault(requests, Mean()).add(seconds)
        elif requests in self.plain:
            self.extra.setdefault(drafted, Mean()).add(max(seconds - self.plain[requests].value, 0.0))

    def seconds(self, requests: int, drafted: int) -> float:
        """Only after a first step. What further tokens cost is taken for nothing until it is known."""
        nearest = min(self.plain, key=lambda known: abs(known - requests))
        more = self._added(drafted + max(requests - nearest, 0))
        return max(self.plain[nearest].value * min(requests / nearest, 1.0) + more, 1e-9)

    def _added(self, drafted: int) -> float:
        """Between two widths that were measured: on the line between them. Fewer tokens never cost more."""
        below, above = 0, 0
        for width in self.extra:
            if width <= drafted:
                below = max(below, width)
            elif above == 0 or self.extra[width].value < self.extra[above].value:
                above = width
        low = self.extra[below].value if below else 0.0
        if above:
            high = self.extra[above].value
            return min(low + (high - low) * (drafted - below) / (above - below), high)
        return low * drafted / below if below else 0.0


class Acceptance:
    """How often a drafted token is kept if those before it are, by depth: counts that fade."""

    DEPTHS = 16  # deeper ones share the last
    PRIOR, PRIOR_WEIGHT = 0.8, 8.0

    def __init__(self, parent: Acceptance | None = None) -> None:
        self.parent = parent
        self.kept = [0.0] * self.DEPTHS
        self.seen = [0.0] * self.DEPTHS
        self.memory = 0.99 if parent is None else 0.95

    def learn(self, drafted: int, kept: int) -> None:
        """Of a path of `drafted` tokens `kept` stayed; the one after them, if any, is the last that was looked at."""
        for depth in range(min(kept + 1, drafted)):
            at = min(depth, self.DEPTHS - 1)
            self.kept[at] = self.kept[at] * self.memory + (depth < kept)
            self.seen[at] = self.seen[at] * self.memory + 1
        if self.parent is not None:
            self.parent.learn(drafted, kept)

    def rate(self, depth: int) -> float:
        at = min(depth, self.DEPTHS - 1)
        prior, weight = (self.PRIOR, self.PRIOR_WEIGHT) if self.parent is None else (self.parent.rate(at), 4.0)
        return (self.kept[at] + weight * prior) / (self.seen[at] + weight)


class Control:
    def __init__(self) -> None:
        self.cost = Cost()
        self.drafting: dict[str, float] = {}  # seconds that a method takes for one token more
        self._methods: dict[str, Acceptance] = {}
        self._requests: dict[Request, Acceptance] = {}
        self._refused: dict[Request, int] = {}  # drafts in a row that did not pay

    def learn(self, request: Request, guess: Guess, kept: int) -> None:
        deepest = 1 + max(guess.depths(), default=-1)
        self._of(request).learn(deepest, kept)

    def forget(self, request: Request) -> None:
        self._requests.pop(request, None)
        self._refused.pop(request, None)

    def survivals(self, request: Request, width: int) -> list[float]:
        """The chance of each token of a chain to be kept, from this request's past and its method's."""
        acceptance = self._of(request)
        return products([acceptance.rate(depth) for depth in range(width)])

    def widths(self, requests: Sequence[Request], survivals: Sequence[Sequence[float]], drafting: float) -> list[int]:
        """How many tokens of each chain pay. `drafting`: seconds that one token more of the longest chain costs."""
        if not self.cost.plain:
            return [0] * len(requests)  # the first step shows what a plain one costs
        found = admit(survivals, lambda drafted: self.cost.seconds(len(requests), drafted), drafting)
        return [
            self._patient(request, chances, width)
            for request, chances, width in zip(requests, survivals, found, strict=True)
        ]

    def _patient(self, request: Request, chances: Sequence[float], width: int) -> int:
        if not chances:
            return 0
        if width > 0:
            self._refused[request] = 0
            return width
        self._refused[request] = refused = self._refused.get(request, 0) + 1
        if refused < PATIENCE:
            return 0
        self._refused[request] = 0
        return min(PROBE, len(chances))

    def _of(self, request: Request) -> Acceptance:
        if request not in self._requests:
            parent = self._methods.setdefault(request.method, Acceptance())
            self._requests[request] = Acceptance(parent)
        return self._requests[request]


def products(rates: Sequence[float]) -> list[float]:
    found: list[float] = []
    chance = 1.0
    for rate in rates:
        chance *= rate
        found.append(chance)
    return found


def admit(
    survivals: Sequence[Sequence[float]], verification: Callable[[int], float], drafting: float = 0.0
) -> list[int]:
    """The widths that give the most tokens a second: likely tokens first, as many as make the rate rise.

    survivals[r][j] falls with j, so what is admitted of each row is its beginning.
    """
    rows = len(survivals)
    entries = sorted(
        (-chance, depth, row) for row, chances in enumerate(survivals) for depth, chance in enumerate(chances)
    )
    expected, deepest, best, taken = float(rows), 0, rows / verification(0), 0
    for count, (chance, depth, _) in enumerate(entries, start=1):
        expected -= chance
        deepest = max(deepest, depth + 1)
        rate = expected / (verification(count) + drafting * deepest)
        if rate > best:
            best, taken = rate, count
    widths = [0] * rows
    for _, _, row in entries[:taken]:
        widths[row] += 1
    return widths
