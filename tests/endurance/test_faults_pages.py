"""The page pool runs dry, at any moment, for a moment or for good; the books themselves fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from endurance.sabotage import CAUSE, LONG, METHODS, Fragile, Trap, Trapped, check_nothing_left
from endurance.scenes import MIXED, PROMPTS, alone, check_most, everyone, visible_output
from outrider import LLM, AsyncLLM
from outrider.request import Step
from outrider.scheduler import Scheduler


class Thief:
    """Before step `at` it takes all pages that are free, and holds them for `times` steps."""

    def __init__(self, scheduler: Scheduler, at: int, times: int) -> None:
        self._scheduler, self._next, self._steps = scheduler, scheduler.next, range(at, at + times)
        self._loot: list[int] = []
        self.count = 0  # steps so far

    def __call__(self, *limits: int | None) -> Step | None:
        here, self.count = self.count, self.count + 1
        cache = self._scheduler.cache
        if here in self._steps:
            self._loot += cache.allocate(cache.available) or []
        else:
            self.give_back()
        return self._next(*limits)

    def give_back(self) -> None:
        self._scheduler.cache.release(self._loot)
        self._loot = []


@pytest.mark.parametrize("times", [1, 6])
@pytest.mark.parametrize("method", METHODS)
def test_a_shortage_of_pages_changes_no_text(fragile: Callable[..., Fragile], method: str, times: int) -> None:
    """A request that needs a page meanwhile waits, is preempted or gets no draft; no text changes."""
    expected = alone(fragile().llm, MIXED)
    llm = fragile(method).llm
    scheduler = llm.engine.scheduler
    step, preempted, count = 0, 0, 1
    while step < count:
        with pytest.MonkeyPatch.context() as patch:
            thief = Thief(scheduler, step, times)
            patch.setattr(scheduler, "next", thief)
            outputs = llm.generate(PROMPTS, MIXED)
            thief.give_back()
        assert [visible_output(output) for output in outputs] == expected
        preempted += sum(output.stats.preemptions for output in outputs if output.stats)
        check_nothing_left(llm)
        step, count = step + (1 if LONG else 2), thief.count
    assert preempted or method not in ("none", "ngram")  # others have taken the pages that they draft into


def test_no_page_for_good(fragile: Callable[..., Fragile]) -> None:
    """As if pages had leaked. It cannot go on, and says so, instead of waiting for ever; then there are pages again."""
    expected = alone(fragile().llm, MIXED)
    llm = fragile().llm
    scheduler = llm.engine.scheduler
    for step in (0, 1, 3):
        with pytest.MonkeyPatch.context() as patch:
            thief = Thief(scheduler, step, 10**9)
            patch.setattr(scheduler, "next", thief)
            with pytest.raises(RuntimeError, match="no page is left for any of 3 requests"):
                llm.generate(PROMPTS, MIXED)
            thief.give_back()
        check_nothing_left(llm)
        assert check_most(llm.generate(PROMPTS, MIXED), expected) == 0


@pytest.mark.parametrize("method", METHODS)
def test_every_size_of_the_pool(
    fragile: Callable[..., Fragile], tiny_folder: Callable[..., Path], speculation: Callable[[str], str], method: str
) -> None:
    """From what holds one request to what holds all."""
    expected = alone(fragile().llm, MIXED)
    preempted = []
    for pages in range(6, 21) if LONG else (6, 8, 11):
        options = {"backend": "cpu", "page_size": 4, "decode_steps": 1, "cache_tokens": 4 * pages}
        llm = LLM(str(tiny_folder()), speculate=speculation(method), **options)
        for _ in ("cold", "hot"):
            outputs = llm.generate(PROMPTS, MIXED)
            assert [visible_output(output) for output in outputs] == expected
            check_nothing_left(llm)
        preempted.append(sum(output.stats.preemptions for output in outputs if output.stats))
    assert max(preempted) > 0 and (not LONG or preempted[-1] == 0)


@pytest.mark.parametrize(
    "book", ["scheduler.next", "scheduler.commit", "scheduler.cache.allocate", "scheduler.cache.publish"]
)
def test_a_failure_of_the_scheduler_or_cache_ends_only_the_running_requests(
    fragile: Callable[..., Fragile], book: str
) -> None:
    """The failing request is unknown: all running requests get the error, and the engine goes on without them."""
    expected = alone(fragile().llm, MIXED)
    llm, trap = fragile("draft_model").llm, Trap()
    *path, name = book.split(".")
    owner = llm.engine
    for part in path:
        owner = getattr(owner, part)

    engine = AsyncLLM(llm)
    with pytest.MonkeyPatch.context() as patch:
        try:
            patch.setattr(owner, name, getattr(Trapped(owner, trap), name))
            assert asyncio.run(everyone(engine)) == expected
            for call in range(0, trap.count, 1 if LONG else 3):
                trap.arm(call, lambda: MemoryError(CAUSE))
                for found, whole in zip(asyncio.run(everyone(engine)), expected, strict=True):
                    assert found == whole or (isinstance(found, MemoryError) and CAUSE in str(found))
                assert trap.sprung
                trap.rest()
                assert asyncio.run(everyone(engine)) == expected
                check_nothing_left(llm)
            assert engine.alive
        finally:
            engine.close()
