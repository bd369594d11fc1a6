"""The prefix cache: reference counts of all pages, and a tree of pages that other prompts may share. No torch here.

A page is free, referenced (requests read it, and at most one writes it) or idle (no request holds it, but it is
published: a later prompt that begins with the same tokens reuses it).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Match:
    """Pages that hold a prefix, referenced for the caller, and the tokens that they cover."""

    pages: list[int]
    tokens: int
    lookup_tokens: int  # tokens that were looked up


Salt = str | tuple[int, str]  # of a request, after the number of its adapter if it has one
_Key = tuple[Salt, str, tuple[int, ...]]  # salt; drafter whose entries the page also holds (empty: none); its tokens


@dataclass(eq=False, slots=True)
class _Node:
    """A published page. Its path in the tree spells all tokens before it, so equal paths mean equal contents."""

    page: int
    key: _Key
    siblings: dict[_Key, _Node] = field(repr=False)  # the parent's children, or the roots
    children: dict[_Key, _Node] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class _Chain:
    """A linked list of matched pages, last page first."""

    page: int
    before: _Chain | None


class PrefixCache:
    """Reference counts of all pages, and a tree of the published ones.

    A page may hold a drafter's keys and values beside the target's. A request with such a drafter matches only pages
    that hold that drafter's entries, from the first page on. A request without one matches any page. Requests with
    different salts, or with different adapters, share nothing.

    A request publishes only below published pages that it holds, and releases pages from the last to the first.
    So a parent is held whenever its child is, it becomes idle after its child, and the least recently used idle page
    is always a leaf. Pages that a window has passed (`release_passed`) are the exception: evicting one unpublishes the
    pages below it.
    """

    def __init__(self, pages: int, page_size: int, sharing: bool = True) -> None:
        self.pages = pages
        self.page_size = page_size
        self.sharing = sharing
        self.lookups = 0  # tokens looked up
        self.hits = 0  # tokens found
        self.evictions = 0  # idle pages reallocated
        self._references = [0] * pages
        self._nodes: list[_Node | None] = [None] * pages
        self._free = list(range(pages - 1, -1, -1))  # a stack: page 0 is allocated first
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._roots: dict[_Key, _Node] = {}
        self._drafters = {""}  # drafters that have published; empty: pages with the target's entries only
        self._passed = False  # whether `release_passed` was called
        self._barred: set[int] = set()  # held while the cache was cleared: never published

    @property
    def available(self) -> int:
        """Return the number of pages that `allocate` can give."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Return the number of published pages that no request holds."""
        return len(self._idle)

    def references(self, page: int) -> int:
        return self._references[page]

    def is_published(self, page: int) -> bool:
        return self._nodes[page] is not None

    def match(self, tokens: Sequence[int], limit: int, drafter: str = "", salt: Salt = "") -> Match:
        """Find the longest published chain of full pages within the first `limit` tokens, and reference its pages."""
        drafters = [drafter] if drafter else sorted(self._drafters)
        pages = self._longest_chain(tokens, limit, drafters, salt) if self.sharing else []
        for page in pages:
            self._references[page] += 1
            self._idle.pop(page, None)
        match = Match(pages, len(pages) * self.page_size, limit if self.sharing else 0)
        self.lookups += match.lookup_tokens
        self.hits += match.tokens
        return match

    def undo(self, match: Match) -> None:
        """Release a match that was not used, and undo its statistics."""
        self.release(match.pages)
        self.lookups -= match.lookup_tokens
        self.hits -= match.tokens

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` unshared pages; return None, and allocate nothing, if there are too few."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def publish(
        self, tokens: Sequence[int], pages: Sequence[int], first: int, drafter: str = "", salt: Salt = ""
    ) -> None:
        """Publish `pages[first:]`, as far as `tokens` fill them, for later prompts to match.

        If another page already publishes the same content, the caller's copy and all pages after it stay private.
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
        for page, page_tokens in zip(pages[first:], self._split(tokens, len(tokens)), strict=False):
            if page in self._barred or any((salt, name, page_tokens) in children for name in readable):
                return
            key = (salt, drafter, page_tokens)
            children[key] = self._nodes[page] = node = _Node(page, key, children)
            children = node.children

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page. `pages` are in the order of the sequence."""
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

    def release_passed(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page, while the caller keeps later pages of the same sequence."""
        self._passed = True
        self.release(pages)

    def clear(self) -> None:
        """Unpublish every page. Pages in use stay with their requests and are never matched again."""
        self._barred.update(page for page, count in enumerate(self._references) if count > 0)
        self._free.extend(self._idle)
        self._idle.clear()
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
            assert in_order or self._passed, f"page {node.page} outlives its parent"
            in_tree.add(node.page)
        assert in_tree == {page for page, node in enumerate(self._nodes) if node is not None}, "a page is unreachable"
        assert idle <= in_tree and not free & in_tree, "an idle page is unpublished, or a free one published"
        assert self._barred <= held and not self._barred & in_tree, "a cleared page can be matched"

    def _longest_chain(self, tokens: Sequence[int], limit: int, drafters: Sequence[str], salt: Salt) -> list[int]:
        """Return the longest chain of pages for the first tokens that is published for one of these drafters."""
        # Several pages may hold the same tokens with entries of different drafters, so all branches are searched.
        branches: list[tuple[dict[_Key, _Node], _Chain | None]] = [(self._roots, None)]
        longest: _Chain | None = None
        for page_tokens in self._split(tokens, min(limit, len(tokens))):
            nodes = [
                (node, before)
                for children, before in branches
                for name in drafters
                if (node := children.get((salt, name, page_tokens))) is not None
            ]
            if not nodes:
                break
            branches = [(node.children, _Chain(node.page, before)) for node, before in nodes]
            longest = branches[0][1]
        pages: list[int] = []
        while longest is not None:
            pages.append(longest.page)
            longest = longest.before
        return pages[::-1]

    def _split(self, tokens: Sequence[int], stop: int) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of each full page before `stop`."""
        for end in range(self.page_size, stop + 1, self.page_size):
            yield tuple(tokens[end - self.page_size : end])

    def _evict(self) -> None:
        page, _ = self._idle.popitem(last=False)
        node = self._nodes[page]
        assert node is not None and (self._passed or not node.children), f"page {page} is evicted before its children"
        del node.siblings[node.key]
        self._nodes[page] = None
        self._unpublish(node.children)
        self._free.append(page)
        self.evictions += 1

    def _unpublish(self, nodes: dict[_Key, _Node]) -> None:
        """Take these pages, and those below them, out of the tree. Idle ones become free."""
        left = list(nodes.values())
        while left:
            node = left.pop()
            left += node.children.values()
            self._nodes[node.page] = None
            if node.page in self._idle:
                del self._idle[node.page]
                self._free.append(node.page)

    def _nodes_and_parents(self) -> Iterator[tuple[_Node, _Node | None]]:
        """Yield every published node with its parent."""
        stack: list[tuple[_Node, _Node | None]] = [(node, None) for node in self._roots.values()]
        while stack:
            node, parent = stack.pop()
            yield node, parent
            stack.extend((child, node) for child in node.children.values())
