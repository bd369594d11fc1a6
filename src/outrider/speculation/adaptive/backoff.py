"""When drafts that are not expected to pay are tried again."""

from __future__ import annotations

EXPLORATION_SHARE = 0.003  # of the time: the most that probes may lose, little against what drafts gain
MAX_PAUSE = 128  # steps: a text that becomes easy is noticed at least this soon, even if probes lose more then


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
            self.remaining = 1 + round(min(self._lost / EXPLORATION_SHARE, MAX_PAUSE))
            self._lost = 0.0
        self.skip(1)
        return False

    def pause(self) -> None:
        """Begin with the longest pause: nothing is known of the text yet, and a probe would cost too much."""
        self.remaining, self.due = MAX_PAUSE, False

    def repeat(self) -> None:
        """Probe in the next step as well: the last probe was accepted. The pause that follows is longer."""
        self.due = True

    def skip(self, steps: int) -> None:
        """Count steps of a pause."""
        if self.remaining:
            self.remaining = max(self.remaining - steps, 0)
            self.due = not self.remaining
