"""The widths of a step: of all tokens that are drafted, or could be, those that pay."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from .acceptance_model import falling

NEVER = 1 << 30  # no guess is so deep

# Chance, place and request of a token, and whether one may stop after it: likely tokens that stand behind unlikely ones
# come with them, and each is taken for what all of them promise on the average.
Entry = tuple[float, int, int, bool]


class Offer:
    """What a step can choose from: the chances of each request's tokens, and what they cost."""

    def __init__(
        self, survivals: Sequence[Sequence[float]], verification: list[float], drafting: list[float], batch_size: int
    ) -> None:
        self.survivals = survivals
        self.verification = verification  # seconds by drafted tokens
        self.drafting = drafting  # seconds by the widest guess; wider ones cost what the last one does
        self.batch_size = batch_size

    def seconds(self, drafted: int, deepest: int) -> float:
        drafting = self.drafting
        return self.verification[drafted] + drafting[min(deepest, len(drafting) - 1)]

    def expected(self, widths: Sequence[int]) -> float:
        """Tokens of a step with these widths."""
        expected = float(self.batch_size)
        for chances, width in zip(self.survivals, widths, strict=True):
            expected += sum(chances[:width])
        return expected

    def pace(self, widths: Sequence[int]) -> float:
        """Tokens a second with these widths."""
        return self.expected(widths) / self.seconds(sum(widths), max(widths))

    def worth(self, pace: float) -> list[int]:
        """The widths that gain most, if a second is worth `pace` tokens (at least what a plain pass makes of it)."""
        verification = self.verification
        pace = max(pace, self.batch_size / self.seconds(0, 0))
        gain = best = 0.0
        taken = 0
        if len(self.survivals) == 1:
            for count, chance in enumerate(self.survivals[0], 1):
                gain += chance
                profit = gain - pace * (verification[count] - verification[0])
                if profit > best:
                    best, taken = profit, count
            return [taken]
        entries = self._sorted()
        for count, (chance, _, _, whole) in enumerate(entries, 1):
            gain += chance
            if not whole:
                continue
            profit = gain - pace * (verification[count] - verification[0])
            if profit > best:
                best, taken = profit, count
        return self._widths(entries[:taken])

    def best(self) -> tuple[list[int], float]:
        """The widths with the most tokens a second: likely tokens first, as many as make it rise."""
        if len(self.survivals) == 1:
            return self._alone(self.survivals[0])
        entries = self._sorted()
        best, chosen = self.batch_size / self.seconds(0, 0), entries[:0]
        for cap, drafting in self._caps():
            kept = entries if cap == NEVER else [entry for entry in entries if entry[1] < cap]
            taken, pace = self._walk(kept, drafting, best)
            if taken:
                best, chosen = pace, kept[:taken]
        return self._widths(chosen), best

    def alone(self, row: int) -> int:
        """The width, not 0, that promises this request the most tokens a second if it were alone."""
        chances, verification, drafting = self.survivals[row], self.verification, self.drafting
        expected, best, taken = 1.0, 0.0, 1
        for count, chance in enumerate(chances, 1):
            expected += chance
            pace = expected / (verification[count] + drafting[count])
            if pace > best:
                best, taken = pace, count
        return taken

    def _alone(self, chances: Sequence[float]) -> tuple[list[int], float]:
        verification, drafting = self.verification, self.drafting
        expected, taken = float(self.batch_size), 0
        best = expected / (verification[0] + drafting[0])
        for count, chance in enumerate(chances, 1):
            expected += chance
            pace = expected / (verification[count] + drafting[count])
            if pace > best:
                best, taken = pace, count
        return [taken], best

    def _sorted(self) -> list[Entry]:
        """All tokens, likely ones first."""
        entries: list[Entry] = []
        for row, raw in enumerate(self.survivals):
            chances = falling(raw)
            last = len(chances) - 1
            entries += [
                (chance, place, row, place == last or chances[place + 1] < chance)
                for place, chance in enumerate(chances)
            ]
        entries.sort(key=itemgetter(0), reverse=True)  # stable: the tokens of a guess stay in order
        return entries

    def _widths(self, chosen: list[Entry]) -> list[int]:
        widths = [0] * len(self.survivals)
        for _, _, row, _ in chosen:
            widths[row] += 1
        return widths

    def _caps(self) -> list[tuple[int, float]]:
        """Depths that may be worth stopping at, and the seconds that a draft so deep takes."""
        drafting = self.drafting
        deepest = len(drafting) - 1
        if deepest == 0:
            return [(NEVER, drafting[0])]
        caps = [(NEVER, drafting[deepest])]
        for cap in range(deepest - 1, 0, -1):
            if drafting[cap] < caps[-1][1]:
                caps.append((cap, drafting[cap]))
        return caps

    def _walk(self, entries: list[Entry], drafting: float, best: float) -> tuple[int, float]:
        """How many of the entries, likeliest first, beat `best`; 0: no number of them does."""
        verification, expected, taken = self.verification, float(self.batch_size), 0
        total = len(entries)
        for count, (chance, _, _, whole) in enumerate(entries, 1):
            seconds = verification[count] + drafting
            if expected + chance * (total - count + 1) <= best * seconds:
                break  # those that follow are no likelier
            expected += chance
            if whole and expected > best * seconds:
                best, taken = expected / seconds, count
        return taken, best
