"""Track which parts of each text are in a drafter's own KV, for drafters that can be suspended.

After a suspension a drafter reads the missed tokens at once if they are few. Else whole pages of them are left out:
the drafter sees the text without them, each later token that many positions earlier. That can cost acceptance only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ...request import Request
from ..interface import DraftContext


@dataclass
class TrackedKv:
    """The KV entries of one request."""

    known: int  # entries [0, known) are those of the text, but for the pages that are left out
    preemptions: int  # the request's, when it was last seen: more of them, and its pages are others
    drafted: int = 0  # entries from `known` on that come from drafted tokens
    state: Tensor | None = None  # [F], the target's at position `state_at`, the last that it had computed
    state_at: int = -1
    seen: list[int] = field(default_factory=list)  # which pages of the text it sees of those before `resumed`
    resumed: int = 0  # from this page on it sees them all
    label: int = 0  # of the text up to the page `labelled`
    labelled: int = 0

    def pages(self, request: Request) -> list[int]:
        """Return the pages that the drafter sees."""
        return [request.pages[at] for at in self.seen] + request.pages[self.resumed :]

    def shift(self, page_size: int) -> int:
        """Return how many positions earlier the drafter sees the tokens that follow."""
        return (self.resumed - len(self.seen)) * page_size

    def leave_out(self, first: int, stop: int) -> None:
        """Pages [first, stop) of the text; what is known ends in the first of them, and goes on at the last's end."""
        self.seen += range(self.resumed, first)
        self.resumed = stop


class KvTracker(dict[Request, TrackedKv]):
    """By request. Pages that are handed on say of which text they hold entries, if it was followed there."""

    def __init__(self, page_size: int, lazy: bool) -> None:
        super().__init__()
        self.page_size, self.lazy = page_size, lazy
        self._labels: dict[int, int] = {}  # page -> of the text up to its end

    def of(self, context: DraftContext, first: int = 0) -> TrackedKv:
        """Return the KV state of the request; a new one covers what the prefix cache supplied.

        first: position of the first entry that there can be.
        """
        request = context.request
        trail = self.get(request)
        if trail is None or trail.preemptions != request.preemptions:
            trail = self[request] = TrackedKv(max(context.start, first), request.preemptions)
            if self.lazy:
                self._recognise(context, trail)
        return trail

    def _recognise(self, context: DraftContext, trail: TrackedKv) -> None:
        """Leave out pages without entries of this text: they were filled while their drafter was suspended."""
        pages, count = context.request.pages, context.start // self.page_size
        for at in range(count):
            self._move_on(context, trail)
            if self._labels.get(pages[at]) == trail.label:
                trail.seen.append(at)
        trail.resumed = count
        trail.known = max(count * self.page_size, min(trail.known, 1))

    def begin(self, context: DraftContext, trail: TrackedKv, before: int) -> int | None:
        """Where its entries go on. `before`: so many states before an entry must be there. What it missed, and cannot
        catch up with, is left out up to a page that it can; None: there is no such page yet.
        """
        begin = min(trail.known, context.computed)
        if not self.lazy or begin >= context.start:
            return begin
        page = -(-(context.start + before) // self.page_size)
        if page * self.page_size > context.computed:
            return None
        trail.leave_out(begin // self.page_size, page)
        trail.known = page * self.page_size
        return trail.known

    def label(self, context: DraftContext, trail: TrackedKv) -> None:
        """Label the pages that its entries have filled, so that other requests can use them."""
        if not self.lazy:
            return
        while (trail.labelled + 1) * self.page_size <= min(trail.known, context.computed):
            at = trail.labelled
            self._move_on(context, trail)
            if at >= trail.resumed:
                self._labels[context.request.pages[at]] = trail.label

    def _move_on(self, context: DraftContext, trail: TrackedKv) -> None:
        start = trail.labelled * self.page_size
        trail.label = hash((trail.label, *context.tokens(start, start + self.page_size)))
        trail.labelled += 1
