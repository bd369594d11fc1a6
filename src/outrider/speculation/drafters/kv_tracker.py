"""Track which parts of each text are in a drafter's own KV, for drafters that can be suspended.

After a suspension a drafter reads the missed tokens at once if they are few. Else whole pages of them are left out: the
drafter reads the text without them, and later tokens have smaller positions. That can only lower the acceptance rate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ...request import Request
from ..interface import DraftContext


@dataclass
class TrackedKv:
    """The KV entries of one request."""

    known: int  # entries [0, known) are computed, except in pages that are left out
    preemptions: int  # of the request when it was last seen; if there are more now, it has other pages
    drafted: int = 0  # entries from `known` on that come from drafted tokens
    state: Tensor | None = None  # [F]: aux hidden states of the target at `state_position`, the last that was computed
    state_position: int = -1
    early_pages: list[int] = field(default_factory=list)  # indices of the pages before `resumed` that have entries
    resumed: int = 0  # index of the first page after those that were left out
    text_hash: int = 0  # of the first `num_hashed` pages of the text
    num_hashed: int = 0

    def pages(self, request: Request) -> list[int]:
        """Return the pages that the drafter reads."""
        if not self.resumed:
            return request.pages
        return [request.pages[index] for index in self.early_pages] + request.pages[self.resumed :]

    def shift(self, page_size: int) -> int:
        """Return the number of positions that are left out."""
        return (self.resumed - len(self.early_pages)) * page_size

    def leave_out(self, first: int, stop: int) -> None:
        """Leave out the pages [first, stop) of the text."""
        self.early_pages += range(self.resumed, first)
        self.resumed = stop


class KvTracker(dict[Request, TrackedKv]):
    """The tracked KV by request, and a hash of the text for each page that has entries, to share pages."""

    def __init__(self, page_size: int, can_suspend: bool) -> None:
        super().__init__()
        self.page_size, self.can_suspend = page_size, can_suspend
        self._page_hashes: dict[int, int] = {}  # page -> hash of the text up to its end

    def of(self, context: DraftContext, first: int = 0) -> TrackedKv:
        """Return the tracked KV of the request; a new one covers the tokens from the prefix cache.

        first: position of the first possible entry.
        """
        request = context.request
        kv = self.get(request)
        if kv is None or kv.preemptions != request.preemptions:
            kv = self[request] = TrackedKv(max(context.start, first), request.preemptions)
            if self.can_suspend:
                self._find_cached_pages(context, kv)
        return kv

    def _find_cached_pages(self, context: DraftContext, kv: TrackedKv) -> None:
        """Leave out cached pages without entries of this text: they were filled while the drafter was suspended."""
        pages, count = context.request.pages, context.start // self.page_size
        for index in range(count):
            self._hash_next_page(context, kv)
            if self._page_hashes.get(pages[index]) == kv.text_hash:
                kv.early_pages.append(index)
        kv.resumed = count
        kv.known = max(count * self.page_size, min(kv.known, 1))

    def begin(self, context: DraftContext, kv: TrackedKv, lag: int) -> int | None:
        """Return the position of the next entry to compute; None: missed tokens are left out up to a page not begun.

        lag: an entry reads the target's state this many positions before it. Missed tokens without states are left
        out, up to the first page whose states are all given.
        """
        begin = min(kv.known, context.computed)
        if not self.can_suspend or begin >= context.start:
            return begin
        page = -(-(context.start + lag) // self.page_size)
        if page * self.page_size > context.computed:
            return None
        kv.leave_out(begin // self.page_size, page)
        kv.known = page * self.page_size
        return kv.known

    def share_pages(self, context: DraftContext, kv: TrackedKv) -> None:
        """Record the hash of the pages that are full of entries, so that other requests can use them."""
        if not self.can_suspend:
            return
        while (kv.num_hashed + 1) * self.page_size <= min(kv.known, context.computed):
            index = kv.num_hashed
            self._hash_next_page(context, kv)
            if index >= kv.resumed:
                self._page_hashes[context.request.pages[index]] = kv.text_hash

    def _hash_next_page(self, context: DraftContext, kv: TrackedKv) -> None:
        start = kv.num_hashed * self.page_size
        kv.text_hash = hash((kv.text_hash, *context.tokens(start, start + self.page_size)))
        kv.num_hashed += 1
