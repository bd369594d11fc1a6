"""The page book-keeping: no page is lost, leaked or found under a prefix that it does not hold."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.cache.prefix import PrefixCache
from outrider.cache.state_slots import StateSlots

SIZE = 2


def hold(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """What a request does: share what is there, compute and publish the rest."""
    match = cache.match(tokens, len(tokens))
    fresh = cache.allocate(-(-(len(tokens) - match.tokens) // cache.page_size))
    assert fresh is not None
    pages = match.pages + fresh
    cache.publish(tokens[match.tokens :], pages, len(match.pages))
    return pages


def test_only_full_pages_are_found() -> None:
    cache = PrefixCache(8, SIZE)
    pages = hold(cache, [1, 2, 3, 4, 5])
    match = cache.match([1, 2, 3, 4, 5, 6], 6)
    assert (match.pages, match.tokens) == (pages[:2], 4)
    assert [cache.references(page) for page in pages] == [2, 2, 1]
    cache.check()


def test_limit_counts_tokens() -> None:
    cache = PrefixCache(8, SIZE)
    pages = hold(cache, [1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4], 3).pages == pages[:1]
    assert cache.match([1, 2, 3, 4], 1).pages == []
    assert cache.match([1, 2, 3, 4], 0).pages == []


def with_snapshots(slots: int, pages: int = 8) -> tuple[PrefixCache, StateSlots]:
    states = StateSlots(slots)
    return PrefixCache(pages, SIZE, states=states), states


def snapshot(cache: PrefixCache, states: StateSlots, page: int) -> int:
    """Keep a state after a page, and let the request that wrote it go on."""
    slot = cache.take_slot()
    assert slot is not None and cache.keep_snapshot(page, slot) is not None
    states.give_back(slot)
    return slot


def test_a_match_ends_at_the_last_snapshot() -> None:
    cache, states = with_snapshots(2)
    pages = hold(cache, [1, 1, 2, 2, 3, 3, 4, 4])
    assert cache.match([1, 1, 2, 2, 3, 3, 4, 4], 8).pages == []
    slot = snapshot(cache, states, pages[1])
    match = cache.match([1, 1, 2, 2, 3, 3, 9, 9], 8)
    assert (match.pages, match.tokens, match.published_tokens) == (pages[:2], 4, 6)
    assert match.state_slot == slot and states.references(slot) == 2
    cache.undo(match)
    assert states.references(slot) == 1
    cache.check()


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    cache, states = with_snapshots(2)
    pages = hold(cache, [1, 1, 2, 2, 3, 3])
    first, second = (snapshot(cache, states, page) for page in pages[:2])
    cache.undo(cache.match([1, 1], 2))  # the first is used again
    assert snapshot(cache, states, pages[2]) == second
    assert cache.match([1, 1, 2, 2], 4).tokens == 2
    assert cache.take_slot() is not None  # evicts the third: a request reads the first
    assert cache.take_slot() is None
    assert cache.snapshot_slots == [first]
    cache.check()


def test_snapshots_go_with_their_pages() -> None:
    cache, states = with_snapshots(2, pages=3)
    pages = hold(cache, [1, 1, 2, 2])
    for page in pages:
        snapshot(cache, states, page)
    cache.release(pages)
    taken = cache.allocate(2)  # evicts the last page of the prefix
    assert taken is not None and states.available == 1
    cache.check()
    cache.clear()
    assert states.available == 2
    cache.check()


def test_pages_computed_again_are_replaced_by_the_published_ones() -> None:
    cache, states = with_snapshots(2)
    first, second = hold(cache, [1, 1, 2, 2]), hold(cache, [1, 1, 2, 2, 3, 3])  # there is no snapshot to continue from
    assert second[:2] == first and cache.is_published(second[2])
    assert [cache.references(page) for page in second] == [2, 2, 1]
    snapshot(cache, states, second[2])
    cache.release(first)
    cache.release(second)
    assert cache.match([1, 1, 2, 2, 3, 3], 6).pages == second
    cache.check()


def test_the_same_page_after_another_parent_is_another_page() -> None:
    cache = PrefixCache(8, SIZE)
    one, other = hold(cache, [1, 1, 9, 9]), hold(cache, [2, 2, 9, 9])
    assert cache.match([1, 1, 9, 9], 4).pages == one
    assert cache.match([2, 2, 9, 9], 4).pages == other
    assert cache.match([9, 9], 2).pages == []


def test_a_second_copy_and_all_pages_after_it_stay_private() -> None:
    cache = PrefixCache(8, SIZE)
    first = cache.allocate(1)
    second = cache.allocate(2)
    assert first is not None and second is not None
    cache.publish([1, 1], first, 0)
    cache.publish([1, 1], second, 0)
    cache.publish([2, 2], second, 1)
    assert [cache.is_published(page) for page in first + second] == [True, False, False]
    assert cache.match([1, 1, 2, 2], 4).pages == first
    cache.release(second)
    cache.check()
    assert cache.available == 7


def test_allocation_takes_all_or_nothing() -> None:
    cache = PrefixCache(4, SIZE)
    held = cache.allocate(3)
    assert held == [0, 1, 2]
    assert cache.allocate(2) is None
    assert cache.available == 1
    assert cache.allocate(0) == []
    cache.check()


def test_eviction_takes_the_least_recently_used_and_leaves_before_parents() -> None:
    cache = PrefixCache(4, SIZE)
    old = hold(cache, [1, 1, 2, 2])
    new = hold(cache, [3, 3, 4, 4])
    cache.release(old)
    cache.release(new)
    assert cache.idle == 4
    taken = [cache.allocate(1) for _ in range(4)]
    assert taken == [[old[1]], [old[0]], [new[1]], [new[0]]]
    assert cache.evictions == 4
    cache.check()


def test_use_renews_a_prefix() -> None:
    cache = PrefixCache(3, SIZE)
    first, second, third = (hold(cache, [token, token]) for token in (1, 2, 3))
    for pages in (first, second, third):
        cache.release(pages)
    cache.release(cache.match([1, 1], 2).pages)
    assert sorted(cache.allocate(2) or []) == sorted(second + third)
    assert cache.match([1, 1], 2).pages == first


def test_referenced_pages_are_never_evicted() -> None:
    cache = PrefixCache(2, SIZE)
    pages = hold(cache, [1, 1, 2, 2])
    assert cache.allocate(1) is None
    cache.release(pages[1:])
    assert cache.allocate(1) == pages[1:]
    assert cache.match([1, 1, 2, 2], 4).pages == pages[:1]


def test_clear_forgets_held_pages_for_good() -> None:
    cache = PrefixCache(6, SIZE)
    idle, held = hold(cache, [1, 1]), hold(cache, [2, 2, 3, 3, 4])
    cache.release(idle)
    cache.clear()
    cache.check()
    assert cache.idle == 0 and cache.available == 3
    cache.publish([4, 4], held, 2)  # the page that was half full when the cache was cleared
    assert cache.match([1, 1], 2).pages == [] == cache.match([2, 2, 3, 3], 4).pages
    assert not any(cache.is_published(page) for page in held)
    cache.release(held)
    cache.check()
    assert cache.available == 6
    assert cache.match([2, 2], 2).pages == []
    again = hold(cache, [2, 2])
    assert cache.match([2, 2], 2).pages == again


def test_a_first_page_held_during_clear_is_not_published_later() -> None:
    cache = PrefixCache(2, SIZE)
    pages = cache.allocate(1)
    assert pages is not None
    cache.clear()
    cache.publish([1, 1], pages, 0)
    assert cache.match([1, 1], 2).pages == []


def test_counters_and_undo() -> None:
    cache = PrefixCache(4, SIZE)
    pages = hold(cache, [1, 1, 2, 2])
    assert (cache.lookups, cache.hits) == (4, 0)
    match = cache.match([1, 1, 2, 2, 3], 5)
    assert (cache.lookups, cache.hits) == (9, 4)
    cache.undo(match)
    assert (cache.lookups, cache.hits) == (4, 0)
    assert [cache.references(page) for page in pages] == [1, 1]


def test_salts_share_nothing() -> None:
    cache, tokens = PrefixCache(8, 2), [1, 2, 3, 4]
    pages = {}
    for salt in ("", "a", "b"):
        assert cache.match(tokens, 4, salt=salt).pages == []
        pages[salt] = cache.allocate(2) or []
        cache.publish(tokens, pages[salt], 0, salt=salt)
        cache.release(pages[salt])
        cache.check()
    for salt, own in pages.items():
        assert cache.match(tokens, 4, salt=salt).pages == own
    assert cache.match(tokens, 4, salt="c").pages == []
    cache.check()


def test_without_sharing_nothing_is_found() -> None:
    cache = PrefixCache(4, SIZE, sharing=False)
    pages = hold(cache, [1, 1, 2, 2])
    assert cache.match([1, 1, 2, 2], 4).pages == []
    assert cache.lookups == 0
    cache.release(pages)
    assert cache.idle == 0 and cache.available == 4


def test_releasing_twice_is_our_mistake() -> None:
    cache = PrefixCache(2, SIZE)
    pages = cache.allocate(1)
    assert pages is not None
    cache.release(pages)
    with pytest.raises(AssertionError, match="page 0"):
        cache.release(pages)


class CacheMachine(RuleBasedStateMachine):
    """Random holders against a memory that knows which history every page was written with."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(7, SIZE)
        self.holders: list[tuple[list[int], list[int]]] = []  # pages, tokens
        self.written: dict[int, tuple[int, ...]] = {}  # page: every token up to its end
        self.cleared: set[int] = set()  # held since a clear

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9), limit=st.integers(0, 10))
    def arrive(self, tokens: list[int], limit: int) -> None:
        match = self.cache.match(tokens, limit)
        assert match.tokens == len(match.pages) * SIZE <= limit
        for index, page in enumerate(match.pages):
            assert self.written[page] == tuple(tokens[: (index + 1) * SIZE])
            assert page not in self.cleared
        longer = tuple(tokens[: match.tokens + SIZE])
        if len(longer) == match.tokens + SIZE <= limit:
            findable = [self.written[page] for page in range(7) if self.cache.is_published(page)]
            assert longer not in findable, "a longer prefix was there"
        fresh = self.cache.allocate(-(-(len(tokens) - match.tokens) // SIZE))
        if fresh is None:
            self.cache.undo(match)
            return
        held = {page for pages, _ in self.holders for page in pages} | set(match.pages)
        assert not held & set(fresh) and len(set(fresh)) == len(fresh)
        self.holders.append((match.pages + fresh, tokens[: match.tokens]))
        self._fill(len(self.holders) - 1, tokens[match.tokens :])

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, which: int, tokens: list[int]) -> None:
        which %= len(self.holders)
        pages, known = self.holders[which]
        fresh = self.cache.allocate(-(-(len(known) + len(tokens)) // SIZE) - len(pages))
        if fresh is not None:
            pages += fresh
            self._fill(which, tokens)

    def _fill(self, which: int, tokens: list[int]) -> None:
        pages, known = self.holders[which]
        first = len(known) // SIZE
        known += tokens
        for index in range(first, len(pages)):
            assert self.cache.references(pages[index]) == 1, "a shared page is written"
            assert not self.cache.is_published(pages[index]), "a published page is written"
            self.written[pages[index]] = tuple(known[: (index + 1) * SIZE])
        self.cache.publish(known[first * SIZE :], pages, first)

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        pages, _ = self.holders.pop(which % len(self.holders))
        self.cache.release(pages)
        self.cleared &= {page for pages, _ in self.holders for page in pages}

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.cleared |= {page for pages, _ in self.holders for page in pages}
        assert self.cache.idle == 0

    @invariant()
    def references_are_the_holders(self) -> None:
        self.cache.check()
        for page in range(7):
            assert self.cache.references(page) == sum(page in pages for pages, _ in self.holders)

    def teardown(self) -> None:
        for pages, _ in self.holders:
            self.cache.release(pages)
        self.cache.check()
        assert self.cache.available == 7


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=25)
