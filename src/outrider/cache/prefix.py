"""Who holds which page of the key/value cache, and which pages another prompt may share. No torch here.

A page is free, referenced (some request reads it, one at most writes it) or idle (nobody holds it, but it is
published: a later prompt that begins with the same tokens takes it as it is).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Match:
    """Pages that already hold a prefix, now referenced by the caller, and the tokens that they cover."""

    pages: list[int]
    tokens: int
    asked: int  # tokens that could have been covered


_Key = tuple[str, tuple[int, ...]]  # whose entries the page holds beside the target's, and its tokens


@dataclass(eq=False, slots=True)
class _Node:
    """A published page. Its place in the tree spells every token before it, so equal keys mean equal contents."""

    page: int
    key: _Key
    siblings: dict[_Key, _Node] = field(repr=False)  # where this node is listed
    children: dict[_Key, _Node] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class _Way:
    """A chain of pages, from its last one back."""

    page: int
    before: _Way | None


class PrefixCache:
    """Reference counts of all pages, and a tree of the published ones.

    A page may hold a drafter's keys and values beside the target's. A request that a drafter follows is given pages
    with that drafter's entries, from the first on; a request without one may read any, and go on below them.

    Only a request that holds a published page publishes below it, and pages are released from the last to the
    first. So a parent is held whenever its child is, a parent becomes idle after its child, and the least
    recently used idle page is always a leaf.
    """

    def __init__(self, pages: int, page_size: int, sharing: bool = True) -> None:
        self.pages = pages
        self.page_size = page_size
        self.sharing = sharing
        self.lookups = 0  # tokens that were looked for
        self.hits = 0  # tokens that were found
        self.evictions = 0  # idle pages taken for something new
        self._references = [0] * pages
        self._nodes: list[_Node | None] = [None] * pages
        self._free = list(range(pages - 1, -1, -1))  # a stack: page 0 goes first
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._roots: dict[_Key, _Node] = {}
        self._drafters = {""}  # everyone who ever published; the empty name: the target's entries alone
        self._barred: set[int] = set()  # held while the cache was cleared: never to be published

    @property
    def available(self) -> int:
        """Pages that `allocate` can give."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Published pages that nobody holds."""
        return len(self._idle)

    def references(self, page: int) -> int:
        return self._references[page]

    def is_published(self, page: int) -> bool:
        return self._nodes[page] is not None

    def match(self, tokens: Sequence[int], limit: int, drafter: str = "") -> Match:
        """Take references to the longest published chain of full pages within the first `limit` tokens."""
        pages = self._chain(tokens, limit, [drafter] if drafter else sorted(self._drafters)) if self.sharing else []
        for page in pages:
            self._references[page] += 1
            self._idle.pop(page, None)
        found = Match(pages, len(pages) * self.page_size, limit if self.sharing else 0)
        self.lookups += found.asked
        self.hits += found.tokens
        return found

    def undo(self, match: Match) -> None:
        """Give back a match that was not used, as if nobody had asked."""
        self.release(match.pages)
        self.lookups -= match.asked
        self.hits -= match.tokens

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages that belong to the caller alone, or None, and nothing taken, when there are too few."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def publish(self, tokens: Sequence[int], pages: Sequence[int], first: int, drafter: str = "") -> None:
        """Make `pages[first:]` findable: `tokens` fill the first of them, and more while there are enough tokens.

        Content that another page already publishes stays with that page; the caller's copy, and what follows it,
        stays private.
        """
        if not self.sharing:
            return
        children = self._roots
        if first > 0:
            parent = self._nodes[pages[first - 1]]
            if parent is None or drafter not in ("", parent.key[0]):
                return
            children = parent.children
        self._drafters.add(drafter)
        readable = [drafter] if drafter else self._drafters
        for page, block in zip(pages[first:], self._blocks(tokens, len(tokens)), strict=False):
            if page in self._barred or any((name, block) in children for name in readable):
                return
            key = (drafter, block)
            children[key] = self._nodes[page] = node = _Node(page, key, children)
            children = node.children

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page. `pages` is in the order of the sequence."""
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

    def clear(self) -> None:
        """Forget every published page. Those in use stay with their holders and are never matched again."""
        self._barred.update(page for page, count in enumerate(self._references) if count > 0)
        self._free.extend(self._idle)
        self._idle.clear()
        self._nodes = [None] * self.pages
        self._roots = {}
        self._drafters = {""}

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        free, idle = set(self._free), set(self._idle)
        held = {page for page, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free) + len(idle) + len(held) == self.pages, "a page is lost, or in two states"
        assert free | idle | held == set(range(self.pages)), "a page is lost"
        listed = set()
        for node, parent in self._walk():
            assert self._nodes[node.page] is node, f"page {node.page} is listed, but does not know"
            drafter, tokens = node.key
            assert node.siblings.get(node.key) is node, f"page {node.page} is listed in the wrong place"
            assert len(tokens) == self.page_size, f"page {node.page} was published before it was full"
            assert parent is None or drafter in ("", parent.key[0]), f"page {node.page} lacks a drafter's beginning"
            assert parent is None or parent.page in held or node.page in idle, f"page {node.page} outlives its parent"
            listed.add(node.page)
        assert listed == {page for page, node in enumerate(self._nodes) if node is not None}, "a page is unreachable"
        assert idle <= listed and not free & listed, "an idle page is unpublished, or a free one published"
        assert self._barred <= held and not self._barred & listed, "a cleared page is findable"

    def _chain(self, tokens: Sequence[int], limit: int, drafters: Sequence[str]) -> list[int]:
        """The longest chain of pages that these drafters published, or nobody for them, for the first tokens."""
        # Several pages may hold one block, each with another drafter's entries: all ways are followed at once.
        ways: list[tuple[dict[_Key, _Node], _Way | None]] = [(self._roots, None)]
        found: _Way | None = None
        for block in self._blocks(tokens, min(limit, len(tokens))):
            nodes = [
                (node, before)
                for children, before in ways
                for name in drafters
                if (node := children.get((name, block))) is not None
            ]
            if not nodes:
                break
            ways = [(node.children, _Way(node.page, before)) for node, before in nodes]
            found = ways[0][1]
        pages: list[int] = []
        while found is not None:
            pages.append(found.page)
            found = found.before
        return pages[::-1]

    def _blocks(self, tokens: Sequence[int], stop: int) -> Iterator[tuple[int, ...]]:
        for end in range(self.page_size, stop + 1, self.page_size):
            yield tuple(tokens[end - self.page_size : end])

    def _evict(self) -> None:
        page, _ = self._idle.popitem(last=False)
        node = self._nodes[page]
        assert node is not None and not node.children, f"page {page} would leave its children behind"
        del node.siblings[node.key]
        self._nodes[page] = None
        self._free.append(page)
        self.evictions += 1

    def _walk(self) -> Iterator[tuple[_Node, _Node | None]]:
        """Every published node with its parent."""
        stack: list[tuple[_Node, _Node | None]] = [(node, None) for node in self._roots.values()]
        while stack:
            node, parent = stack.pop()
            yield node, parent
            stack.extend((child, node) for child in node.children.values())
