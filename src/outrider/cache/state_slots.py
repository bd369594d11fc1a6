"""Slots of the states of recurrent layers: which are free. No torch here."""

from __future__ import annotations


class StateSlots:
    """Hands out slots. There is one for each request that can run, and a few for states that a step must not change."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))  # a stack: slot 0 is handed out first

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Return a free slot. The caller checks that there is one."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        assert 0 <= slot < self.count and slot not in self._free, f"state slot {slot} was given back twice"
        self._free.append(slot)
