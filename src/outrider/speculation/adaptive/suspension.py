"""When a drafter that costs time is not asked at all, and for how long: what its drafts have come to, and back-off.

Whether to draft is settled before the first guess, from what drafts came to of late: tokens that were expected to be
kept, tokens that were worth verifying. A request whose drafts do not pay rests, each time twice as long up to a bound,
and is then probed: a draft or a few, as long as each holds something worth verifying.
"""

from __future__ import annotations

from collections.abc import Sequence

from .latency_model import LatencyModel

SHORTEST, LONGEST = 16, 64  # steps of a rest: a text that becomes easy is noticed within some tens of tokens
PROBES = 3  # drafts that a request has after a rest to prove itself
PROVEN = 8  # drafts in a row after which a further rest begins short again
MEMORY, SHARED_MEMORY = 0.94, 0.99  # of a request's drafts and of its method's
WEIGHT = 4.0  # drafts of its own that count as much as what its method usually gives
FEWEST = 4.0  # drafts of a method that say something
SURELY = 0.01  # how much faster than plain decoding drafts must seem to begin, or slower to end: to wake costs time too


class Yields:
    """What drafts came to, on average: tokens expected to be kept, and tokens verified for that. Old ones fade."""

    __slots__ = ("kept", "rows", "seen", "usual")

    def __init__(self, usual: Yields | None = None) -> None:
        self.usual = usual  # the method's
        self.kept = self.rows = self.seen = 0.0

    def add(self, kept: float, rows: int) -> None:
        memory = SHARED_MEMORY if self.usual is None else MEMORY
        self.fade(memory)
        self.kept += kept
        self.rows += rows
        self.seen += 1
        if self.usual is not None:
            self.usual.add(kept, rows)

    def fade(self, memory: float) -> None:
        self.kept *= memory
        self.rows *= memory
        self.seen *= memory

    @property
    def known(self) -> bool:
        return self.seen >= FEWEST if self.usual is None else self.usual.known

    def mean(self) -> tuple[float, float]:
        """Tokens kept and tokens verified of a draft."""
        if self.usual is None:
            return self.kept / self.seen, self.rows / self.seen
        kept, rows = self.usual.mean()
        whole = self.seen + WEIGHT
        return (self.kept + WEIGHT * kept) / whole, (self.rows + WEIGHT * rows) / whole


class Rest:
    """A request's rests."""

    __slots__ = ("drafts", "left", "length", "patience", "probes", "worthwhile")

    def __init__(self, patience: int) -> None:
        self.patience = patience  # steps of the next rest
        self.length = self.left = 0  # steps of this one, and those to come
        self.drafts = 0  # since it woke, that seemed to pay
        self.probes = 0  # drafts that it still has to prove itself
        self.worthwhile = True  # the last draft held something

    def begin(self) -> None:
        self.length = self.left = self.patience
        self.drafts, self.probes, self.worthwhile = 0, PROBES, True
        self.patience = min(2 * self.patience, LONGEST)

    def succeed(self) -> None:
        """Its drafts seem to pay."""
        self.drafts, self.probes = self.drafts + 1, 0
        if self.drafts >= PROVEN:
            self.patience = SHORTEST

    def probe(self) -> bool:
        """Whether a request whose drafts do not seem to pay has another one."""
        if not self.probes or not self.worthwhile:
            return False
        self.probes -= 1
        return True


def paying(
    yields: Sequence[Yields], drafting: Sequence[bool], cost: LatencyModel, spent: float, batch_size: int
) -> list[bool]:
    """For whom to draft, of these requests of a step of `crowd`, where that takes `spent` seconds. drafting: who does
    already.
    """
    means = [one.mean() for one in yields]
    best, taken = batch_size / cost.seconds(batch_size, 0), 0  # tokens a second
    order = sorted(range(len(means)), key=lambda at: -means[at][0])
    tokens, rows = float(batch_size), 0.0
    for count, at in enumerate(order, 1):
        tokens, rows = tokens + means[at][0], rows + means[at][1]
        pace = tokens / (cost.seconds(batch_size, rows) + spent)
        if pace * (1 + SURELY if drafting[at] else 1 - SURELY) > best:
            best, taken = max(pace, best), count
    chosen = set(order[:taken])
    return [at in chosen for at in range(len(means))]
