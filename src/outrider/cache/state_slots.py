"""Slots of the states of recurrent layers: which are free, and how many hold each of the others. No torch here."""

from __future__ import annotations


class StateSlots:
    """Hands out slots, and counts references to them: of requests, and of snapshots in the prefix cache.

    A request may write to a slot only if no other request and no snapshot holds it. There is a slot for each request
    that can run, and some for snapshots and for states that a step must not change.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._references = [0] * count
        self._free = list(range(count - 1, -1, -1))  # a stack: slot 0 is handed out first

    @property
    def available(self) -> int:
        return len(self._free)

    def references(self, slot: int) -> int:
        return self._references[slot]

    def take(self) -> int:
        """Return a free slot. The caller checks that there is one."""
        slot = self._free.pop()
        self._references[slot] = 1
        return slot

    def share(self, slot: int) -> int:
        """Add a reference to a slot in use, and return the slot."""
        assert self._references[slot] > 0, f"state slot {slot} is free and cannot be shared"
        self._references[slot] += 1
        return slot

    def give_back(self, slot: int) -> None:
        """Drop a reference to a slot; the last one frees it."""
        assert 0 <= slot < self.count and self._references[slot] > 0, f"state slot {slot} was given back twice"
        self._references[slot] -= 1
        if self._references[slot] == 0:
            self._free.append(slot)
