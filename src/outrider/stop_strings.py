"""Find stop strings in a growing text, in time that does not depend on their number and length (Aho-Corasick)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """An automaton over the stop strings of a request. Its states are their prefixes; state 0 is the empty one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._ends: list[str | None] = [None]  # the stop string that a state is the whole of
        for stop in stops:
            self._add(stop)
        self._longest = max(map(len, stops), default=0)
        self._fail = [0] * len(self._next)  # the longest proper suffix that is a state
        self._suffix_end = [0] * len(self._next)  # the longest proper suffix that is a whole stop string; 0: none
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._ends.append(None)
            state = following
        self._ends[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                suffix = self.advance(self._fail[state], character)
                self._fail[following] = suffix
                self._suffix_end[following] = suffix if self._ends[suffix] else self._suffix_end[suffix]
                queue.append(following)

    def advance(self, state: int, character: str) -> int:
        """Return the longest suffix of the text that begins a stop string, after one more character."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def complete(self, state: int) -> list[str]:
        """Return the stop strings that end here."""
        found = []
        while state:
            stop = self._ends[state]
            if stop is not None:
                found.append(stop)
            state = self._suffix_end[state]
        return found

    def held(self, state: int) -> int:
        """Return how many characters of the text may begin a stop string that is not complete."""
        if self._depth[state] == self._longest:
            state = self._fail[state]
        return self._depth[state]
