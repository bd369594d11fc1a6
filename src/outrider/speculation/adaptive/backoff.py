"""When drafts that are not expected to pay are tried again."""

from __future__ import annotations

# Share of the time that probes may lose, with the prompts that drafters read for them. With the host work of a
# suspended drafter, 0.4 to 0.8 % of a step of SmolLM2-135M, that leaves about 0.99 of plain decoding.
EXPLORATION_SHARE = 0.006
MAX_PAUSE = 512  # steps: a text that becomes easy is noticed at least this soon, even if probes lose more then


class Backoff:
    """The pauses of one request between probes. A probe is a short draft that is not expected to pay."""

    def __init__(self) -> None:
        self.remaining = 0  # steps of this pause
        self.due = True  # the next draft that is not expected to pay is a probe
        self._lost = 0.0  # by probes since the last pause, in plain steps

    def probes(self, loss: float) -> bool:
        """Count a step in which a draft is not expected to pay; return whether to make it. loss: in plain steps."""
        if not self.remaining and self.due:
            self.due = False
            self._lost += loss
            return True
        if not self.remaining:
            self.remaining = 1 + _pause(self._lost)
            self._lost = 0.0
        self.skip(1)
        return False

    def charge(self, loss: float) -> None:
        """Count what a probe cost beyond the `loss` that was expected: the pause that follows is longer."""
        self._lost += loss

    def pause(self, loss: float) -> None:
        """Pause instead of a probe with this loss, which would cost too much."""
        self.remaining, self.due, self._lost = _pause(loss), False, 0.0

    def repeat(self) -> None:
        """Probe in the next step as well: the last probe was accepted. The pause that follows is longer."""
        self.due = True

    def skip(self, steps: int) -> None:
        """Count steps of a pause."""
        if self.remaining:
            self.remaining = max(self.remaining - steps, 0)
            self.due = not self.remaining


def _pause(loss: float) -> int:
    """Return the steps after which a loss is a small share of the time."""
    return round(min(loss / EXPLORATION_SHARE, MAX_PAUSE))
