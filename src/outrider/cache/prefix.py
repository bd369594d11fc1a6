"""The prefix cache: reference counts of all pages, and a tree of pages that other prompts may share. No torch here.

A page is free, referenced (requests read it, and at most one writes it) or idle (no request holds it, but it is
published: a later prompt that begins with the same tokens reuses it).

A model with recurrent layers can continue a prefix only where their states are known. So a published page may have a
snapshot: a slot with the states after its last token. A prompt reuses pages up to the last one with a snapshot.

Likewise a model with sliding windows can continue a prefix only if its last pages, as far as a window reaches back,
still have their window pages (window_pages.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .state_slots import StateSlots
from .window_pages import WindowPages


@dataclass(frozen=True)
class Match:
    """Pages that hold a prefix, referenced for the caller, and the tokens that they cover."""

    pages: list[int]
    tokens: int
    lookup_tokens: int  # tokens that were looked up
    published_tokens: int = 0  # tokens that published pages cover: also those behind the last snapshot
    state_slot: int = -1  # slot of the states after `tokens`; -1: no recurrent layers, or no tokens
    passed: int = 0  # leading pages that no window reaches from there: without a reference to their window pages


@dataclass(eq=False, slots=True)
class Snapshot:
    """The states of recurrent layers after a published page."""

    slot: int  # -1: dropped
    reused: bool = False  # a prompt continued here


Salt = str | tuple[int, str]  # of a request, after the number of its adapter if it has one
_Key = tuple[Salt, str, tuple[int, ...]]  # salt; drafter whose entries the page also holds (empty: none); its tokens


@dataclass(eq=False, slots=True)
class _Node:
    """A published page. Its path in the tree spells all tokens before it, so equal paths mean equal contents."""

    page: int
    key: _Key
    siblings: dict[_Key, _Node] = field(repr=False)  # the parent's children, or the roots
    children: dict[_Key, _Node] = field(default_factory=dict, repr=False)
    snapshot: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class _Chain:
    """A linked list of matched pages, last page first."""

    node: _Node
    before: _Chain | None
    stored: int = 0  # last pages that have their window pages


class PrefixCache:
    """Reference counts of all pages, and a tree of the published ones.

    A page may hold a drafter's keys and values beside the target's. A request with such a drafter matches only pages
    that hold that drafter's entries, from the first page on. A request without one matches any page. Requests with
    different salts, or with different adapters, share nothing.

    A request publishes only below published pages that it holds, and releases pages from the last to the first.
    So a parent is held whenever its child is, it becomes idle after its child, and the least recently used idle page
    is always a leaf.

    With recurrent layers or sliding windows, two requests may compute the same page, because the snapshot or the window
    pages before it were evicted. Then the later one adopts the published page, so that the pages after it can be
    published too.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        sharing: bool = True,
        states: StateSlots | None = None,
        windows: WindowPages | None = None,
    ) -> None:
        """states: of a model with recurrent layers. Snapshots take slots that no request needs.

        windows: of a model with sliding windows.
        """
        self.pages = pages
        self.page_size = page_size
        self.sharing = sharing
        self.states = states
        self.windows = windows
        self.lookups = 0  # tokens looked up
        self.hits = 0  # tokens found
        self.evictions = 0  # idle pages reallocated
        self._references = [0] * pages
        self._nodes: list[_Node | None] = [None] * pages
        self._free = list(range(pages - 1, -1, -1))  # a stack: page 0 is allocated first
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._roots: dict[_Key, _Node] = {}
        self._drafters = {""}  # drafters that have published; empty: pages with the target's entries only
        self._barred: set[int] = set()  # held while the cache was cleared: never published
        self._snapshots: OrderedDict[int, _Node] = OrderedDict()  # by slot, least recently used first

    @property
    def available(self) -> int:
        """Return the number of pages that `allocate` can give, if there are as many window pages."""
        return len(self._free) + len(self._idle)

    @property
    def usage(self) -> float:
        """Return the share of pages that requests hold, or of window pages if it is larger."""
        free = self.available / self.pages
        if self.windows is not None:
            free = min(free, self.windows.available / self.windows.count)
        return max(1 - free, 0.0)  # without a lock, a page may be counted twice

    @property
    def idle(self) -> int:
        """Return the number of published pages that no request holds."""
        return len(self._idle)

    @property
    def snapshot_slots(self) -> list[int]:
        """Return the slots of all snapshots, least recently used first."""
        return list(self._snapshots)

    def references(self, page: int) -> int:
        return self._references[page]

    def is_published(self, page: int) -> bool:
        return self._nodes[page] is not None

    def match(self, tokens: Sequence[int], limit: int, drafter: str = "", salt: Salt = "") -> Match:
        """Find the longest published chain of full pages within the first `limit` tokens, and reference its pages.

        With recurrent layers, the chain ends at its last snapshot, whose slot is referenced too. With sliding windows,
        it ends where all window pages that the next token attends to are stored. These are referenced too.
        """
        drafters = [drafter] if drafter else sorted(self._drafters)
        chain, published = self._longest_chain(tokens, limit, drafters, salt) if self.sharing else ([], 0)
        pages = [node.page for node in chain]
        for page in pages:
            self._hold(page)
        snapshot, slot = chain[-1].snapshot if chain else None, -1
        if snapshot is not None and self.states is not None:
            snapshot.reused, slot = True, self.states.share(snapshot.slot)
            self._snapshots.move_to_end(slot)
        tokens_found, passed = len(pages) * self.page_size, 0
        if self.windows is not None:
            passed = self.windows.first_reached(tokens_found)
            for page in pages[passed:]:
                self.windows.hold(page)
        looked_up = limit if self.sharing else 0
        match = Match(pages, tokens_found, looked_up, published * self.page_size, slot, passed)
        self.lookups += match.lookup_tokens
        self.hits += match.tokens
        return match

    def undo(self, match: Match) -> None:
        """Release a match that was not used, and undo its statistics."""
        self.release(match.pages, match.passed)
        if self.states is not None and match.state_slot >= 0:
            self.states.give_back(match.state_slot)
        self.lookups -= match.lookup_tokens
        self.hits -= match.tokens

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` unshared pages; return None, and allocate nothing, if there are too few.

        With sliding windows, each of them gets a window page.
        """
        if count > self.available or (self.windows is not None and count > self.windows.available):
            return None
        while len(self._free) < count:
            self._evict()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
            if self.windows is not None:
                self.windows.attach(page)
        return pages

    def publish(self, tokens: Sequence[int], pages: list[int], first: int, drafter: str = "", salt: Salt = "") -> None:
        """Publish `pages[first:]`, as far as `tokens` fill them, for later prompts to match.

        If another page already publishes the same content, the caller's copy and all pages after it stay private. With
        recurrent layers or sliding windows, the other page takes the place of the copy in `pages` instead.
        """
        if not self.sharing:
            return
        children = self._roots
        if first > 0:
            parent = self._nodes[pages[first - 1]]
            if parent is None or drafter not in ("", parent.key[1]):
                return
            children = parent.children
        self._drafters.add(drafter)
        readable = [drafter] if drafter else self._drafters
        for index, page_tokens in enumerate(self._split(tokens, len(tokens)), first):
            page, keys = pages[index], [(salt, name, page_tokens) for name in readable]
            known = next((children[key] for key in keys if key in children), None)
            if page in self._barred or (known is not None and self.states is None and self.windows is None):
                return
            if known is not None:
                self._hold(known.page)
                if self.windows is not None:
                    self.windows.adopt(known.page, page)
                self.release([page], 1)
                pages[index] = known.page
            else:
                key = (salt, drafter, page_tokens)
                children[key] = self._nodes[page] = known = _Node(page, key, children)
            children = known.children

    def keep_snapshot(self, page: int, slot: int) -> Snapshot | None:
        """Keep the states in `slot`, which are those after `page`, until they are evicted, and reference the slot.

        Return None if the page is not published, or has a snapshot already.
        """
        node = self._nodes[page]
        if self.states is None or node is None:
            return None
        if node.snapshot is not None:
            self._snapshots.move_to_end(node.snapshot.slot)
            return None
        node.snapshot = Snapshot(self.states.share(slot))
        self._snapshots[slot] = node
        return node.snapshot

    def drop_snapshot(self, slot: int) -> None:
        """Drop the snapshot in a slot, if there is one."""
        node = self._snapshots.pop(slot, None)
        if node is not None and node.snapshot is not None and self.states is not None:
            self.states.give_back(slot)
            node.snapshot.slot = -1
            node.snapshot = None

    def take_slot(self) -> int | None:
        """Take a slot for states, evicting the least recently used snapshot if none is free; None: all are in use."""
        assert self.states is not None, "a model without recurrent layers has no states"
        if not self.states.available:
            unused = (slot for slot in self._snapshots if self.states.references(slot) == 1)
            if (slot := next(unused, None)) is None:
                return None
            self.drop_snapshot(slot)
        return self.states.take()

    def release(self, pages: Sequence[int], passed: int = 0) -> None:
        """Drop one reference to each page, and to its window page, except those of the first `passed` pages.

        `pages` are in the order of the sequence.
        """
        self.release_windows(pages[passed:])
        for page in reversed(pages):
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} was released more often than taken"
            if self._references[page] > 0:
                continue
            self._barred.discard(page)
            if self._nodes[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def release_windows(self, pages: Sequence[int]) -> None:
        """Drop one reference to the window page of each page, while the caller keeps the pages."""
        if self.windows is not None:
            for page in reversed(pages):
                self.windows.release(page, self._nodes[page] is not None)

    def clear(self) -> None:
        """Unpublish every page. Pages in use stay with their requests and are never matched again."""
        self._barred.update(page for page, count in enumerate(self._references) if count > 0)
        for slot in list(self._snapshots):
            self.drop_snapshot(slot)
        self._free.extend(self._idle)
        self._idle.clear()
        if self.windows is not None:
            self.windows.drop_all()
        self._nodes = [None] * self.pages
        self._roots = {}
        self._drafters = {""}

    def check(self) -> None:
        """Assert the invariants that hold between any two calls."""
        free, idle = set(self._free), set(self._idle)
        held = {page for page, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free) + len(idle) + len(held) == self.pages, "a page is lost, or in two states"
        assert free | idle | held == set(range(self.pages)), "a page is lost"
        in_tree = set()
        for node, parent in self._nodes_and_parents():
            assert self._nodes[node.page] is node, f"page {node.page} is in the tree, but not in the list of nodes"
            salt, drafter, tokens = node.key
            assert node.siblings.get(node.key) is node, f"page {node.page} is under the wrong parent"
            assert len(tokens) == self.page_size, f"page {node.page} was published before it was full"
            assert parent is None or drafter in ("", parent.key[1]), (
                f"page {node.page} lacks its drafter's entries above"
            )
            assert parent is None or salt == parent.key[0], f"page {node.page} is below a page of another salt"
            in_order = parent is None or parent.page in held or node.page in idle
            assert in_order, f"page {node.page} outlives its parent"
            in_tree.add(node.page)
            kept = node.snapshot
            assert kept is None or self._snapshots[kept.slot] is node, f"the snapshot of page {node.page} was dropped"
        assert in_tree == {page for page, node in enumerate(self._nodes) if node is not None}, "a page is unreachable"
        assert idle <= in_tree and not free & in_tree, "an idle page is unpublished, or a free one published"
        assert all(self._nodes[node.page] is node for node in self._snapshots.values()), "a snapshot outlives its page"
        assert self._barred <= held and not self._barred & in_tree, "a cleared page can be matched"
        if self.windows is not None:
            self.windows.check(in_tree)

    def _longest_chain(
        self, tokens: Sequence[int], limit: int, drafters: Sequence[str], salt: Salt
    ) -> tuple[list[_Node], int]:
        """Return the longest usable chain for the first tokens, and the pages of the longest published one.

        Its pages are published for one of these drafters. With recurrent layers, it ends at a snapshot. With sliding
        windows, it ends behind as many window pages as a window reaches.
        """
        # Several pages may hold the same tokens with entries of different drafters, so all branches are searched.
        branches: list[tuple[dict[_Key, _Node], _Chain | None]] = [(self._roots, None)]
        longest: _Chain | None = None
        published = 0
        for page_tokens in self._split(tokens, min(limit, len(tokens))):
            chains = [
                _Chain(node, before, self._stored(node, before))
                for children, before in branches
                for name in drafters
                if (node := children.get((salt, name, page_tokens))) is not None
            ]
            if not chains:
                break
            published += 1
            branches = [(chain.node.children, chain) for chain in chains]
            usable = [one for one in chains if self._is_usable(one, published)]
            longest = usable[0] if usable else longest
        nodes: list[_Node] = []
        while longest is not None:
            nodes.append(longest.node)
            longest = longest.before
        return nodes[::-1], published

    def _stored(self, node: _Node, before: _Chain | None) -> int:
        """Return how many of the last pages of a chain have their window pages, if `node` follows `before`."""
        if self.windows is None or not self.windows.is_stored(node.page):
            return 0
        return 1 if before is None else before.stored + 1

    def _is_usable(self, chain: _Chain, pages: int) -> bool:
        """Return whether a text can continue after a chain of this many pages."""
        if self.states is not None and chain.node.snapshot is None:
            return False
        return self.windows is None or chain.stored >= pages - self.windows.first_reached(pages * self.page_size)

    def _split(self, tokens: Sequence[int], stop: int) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of each full page before `stop`."""
        for end in range(self.page_size, stop + 1, self.page_size):
            yield tuple(tokens[end - self.page_size : end])

    def _evict(self) -> None:
        page, _ = self._idle.popitem(last=False)
        node = self._nodes[page]
        assert node is not None and not node.children, f"page {page} is evicted before its children"
        del node.siblings[node.key]
        self._nodes[page] = None
        if node.snapshot is not None:
            self.drop_snapshot(node.snapshot.slot)
        if self.windows is not None:
            self.windows.drop(page)
        self._free.append(page)
        self.evictions += 1

    def _hold(self, page: int) -> None:
        """Add a reference to a published page."""
        self._references[page] += 1
        self._idle.pop(page, None)

    def _nodes_and_parents(self) -> Iterator[tuple[_Node, _Node | None]]:
        """Yield every published node with its parent."""
        stack: list[tuple[_Node, _Node | None]] = [(node, None) for node in self._roots.values()]
        while stack:
            node, parent = stack.pop()
            yield node, parent
            stack.extend((child, node) for child in node.children.values())
