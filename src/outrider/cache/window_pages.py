"""Window pages: the storage of layers with a sliding window, for the pages that a window still reaches. No torch here.

Layers that attend to the whole text store keys and values of every page. Layers with a sliding window store them in
window pages, of which there are fewer. A page has a window page from its allocation until the windows of all requests
that hold it have passed it. If the page is published, its window page stays until another page needs it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection


class WindowPages:
    """The window page of each page, and how many requests still read it."""

    def __init__(self, count: int, pages: int, page_size: int, window: int) -> None:
        """window: the widest of all layers, in tokens, that of the query included."""
        self.count = count
        self.page_size = page_size
        self.window = window
        self.changes: dict[int, int] = {}  # window pages by page, as far as the device does not know them yet
        self._of = [-1] * pages  # window page of each page; -1: none
        self._readers = [0] * pages  # requests whose windows reach the page
        self._free = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # pages without readers, least recently used first

    @property
    def available(self) -> int:
        """Return the number of window pages that `attach` can give."""
        return len(self._free) + len(self._idle)

    def first_reached(self, position: int) -> int:
        """Return the index of the first page that the token at this position attends to."""
        return max(position - self.window + 1, 0) // self.page_size

    def is_stored(self, page: int) -> bool:
        return self._of[page] >= 0

    def of(self, page: int) -> int:
        """Return the window page of a page; -1: none."""
        return self._of[page]

    def attach(self, page: int) -> None:
        """Give a new page a window page, evicting the least recently used idle one if none is free."""
        if not self._free:
            self.drop(next(iter(self._idle)))
        self._of[page] = self.changes[page] = self._free.pop()
        self._readers[page] = 1

    def hold(self, page: int) -> None:
        """Add a reader."""
        assert self._of[page] >= 0, f"the window page of page {page} was evicted"
        self._readers[page] += 1
        self._idle.pop(page, None)

    def release(self, page: int, is_published: bool) -> None:
        """Drop a reader. After the last one, the window page becomes free, or idle if the page is published."""
        self._readers[page] -= 1
        assert self._readers[page] >= 0, f"the window page of page {page} was released more often than taken"
        if self._readers[page] == 0:
            self._idle[page] = None
            if not is_published:
                self.drop(page)

    def adopt(self, page: int, copy: int) -> None:
        """Make the reader of `copy` a reader of `page`, which has the same content.

        If `page` has no window page any more, it gets that of the copy.
        """
        if self._of[page] >= 0:
            self.hold(page)
            self.release(copy, is_published=False)
            return
        assert self._readers[copy] == 1, f"page {copy} is not private"
        self._of[page], self._readers[page] = self._of[copy], 1
        self._of[copy], self._readers[copy] = -1, 0
        self.changes[page] = self._of[page]

    def drop(self, page: int) -> None:
        """Free the window page of a page that no request reads, if it has one."""
        if page in self._idle:
            del self._idle[page]
            self._free.append(self._of[page])
            self._of[page] = -1

    def drop_all(self) -> None:
        """Free the window pages of all pages that no request reads."""
        for page in list(self._idle):
            self.drop(page)

    def check(self, published: Collection[int], readers: list[int] | None = None) -> None:
        """Assert the invariants that hold between any two calls. readers: as the requests state them, by page."""
        used = [page for page in self._of if page >= 0]
        assert len(set(used) | set(self._free)) == len(used) + len(self._free) == self.count, "a window page is lost"
        for page, window_page in enumerate(self._of):
            assert (window_page >= 0) == (self._readers[page] > 0 or page in self._idle), f"page {page} lost its window"
        assert all(self._readers[page] == 0 for page in self._idle), "an idle window page has readers"
        assert set(self._idle) <= set(published), "an idle window page cannot be found"
        assert readers is None or readers == self._readers, "a window page leaked"
