"""Many threads at the async door: they ask, leave, cancel, abort, pause, resume, clear the cache, shut it down.

Every schedule has a seed. Whatever the order, each request ends exactly once, with its text, an abort or a clear
error; texts are those of solo runs; no client waits forever; nothing is left behind. OUTRIDER_RACE_ROUNDS: repetitions.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from endure import PoolRequest, left_behind, mixed, solo, visible_output
from outrider import LLM, AsyncLLM, Output, UserError
from outrider.async_llm import EngineStoppedError

LONG = os.environ.get("OUTRIDER_ENDURANCE") == "1"
ROUNDS = int(os.environ.get("OUTRIDER_RACE_ROUNDS", "200" if LONG else "8"))
THREADS, CLIENTS, REQUESTS = 4, 4, 3  # event loops, clients of each, requests of each
TIMEOUT = 120.0  # seconds for operations that take one or two
LEAVES, CANCELS, SHARES = 0.04, 0.15, 0.1  # how likely: at an output; of a request; a name that another has too


@pytest.fixture(scope="module")
def pool(tiny_folder: Callable[..., Path]) -> list[PoolRequest]:
    llm = LLM(str(tiny_folder()), backend="cpu", prefix_cache=False)
    return solo(llm, list(mixed(39, random.Random(3), lengths=(1, 4, 9, 16, 24), words=8)))


@pytest.fixture(scope="module", params=["none", "suffix", "eagle3"])
def llm(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path], speculation: Callable[[str], str]) -> LLM:
    """With pages for a few of the requests that come together."""
    options = {"cache_tokens": 160, "page_size": 8, "max_requests": 6, "max_step_tokens": 48}
    return LLM(str(tiny_folder()), backend="cpu", speculate=speculation(request.param), **options)


@dataclass
class Race:
    """One round: a door, those who use it, and how each request ended."""

    door: AsyncLLM
    pool: list[PoolRequest]
    seed: int
    ends: Counter[str] = field(default_factory=Counter)
    failures: list[BaseException] = field(default_factory=list)
    closing: bool = False

    def run(self, close_after: int | None) -> None:
        """close_after: number of finished requests after which the engine is closed."""
        threads = [threading.Thread(target=self.loop, args=(number,), daemon=True) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        if close_after is not None:
            while self.ends.total() < close_after and not self.failures:
                time.sleep(0.001)
            self.closing = True
            self.door.close(TIMEOUT)
        for thread in threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive(), f"someone waits for ever in round {self.seed}:\n{where(thread)}"
        if self.failures:
            raise self.failures[0]

    def loop(self, number: int) -> None:
        """A thread with an event loop of its own."""

        async def everyone() -> None:
            jobs = [self.client(f"{number}.{client}") for client in range(CLIENTS)]
            await asyncio.wait_for(asyncio.gather(*jobs, self.meddler(number)), TIMEOUT)

        try:
            asyncio.run(everyone())
        except BaseException as error:
            self.failures.append(error)

    async def client(self, name: str) -> None:
        dice = random.Random(f"{self.seed} {name}")
        for number in range(REQUESTS):
            asked = dice.choice(self.pool)
            taken = "shared" if dice.random() < SHARES else f"{name}.{number}"
            task = asyncio.create_task(self.ask(asked, taken, dice))
            if dice.random() < CANCELS:
                await asyncio.sleep(dice.random() * 0.05)
                task.cancel()
            try:
                self.ends[await task] += 1
            except asyncio.CancelledError:
                self.ends["cancelled"] += 1

    async def ask(self, asked: PoolRequest, name: str, dice: random.Random) -> str:
        """How the request ended; AssertionError: in a way that it may not."""
        ended: list[Output] = []
        known = [0] * asked.params.n
        try:
            async with aclosing(self.door.generate(asked.prompt, asked.params, name)) as stream:  # type: ignore[type-var]
                async for output in stream:
                    assert not ended, f"`{name}` went on after its end"
                    for at, one in enumerate(output.completions):
                        assert one.token_ids == asked.texts[at][: len(one.token_ids)], f"`{name}` says something else"
                        assert len(one.token_ids) >= known[at], f"`{name}` took a token back"
                        known[at] = len(one.token_ids)
                    if output.finished:
                        ended.append(output)
                    elif dice.random() < LEAVES:
                        return "left"
        except UserError as error:
            assert "is in use" in str(error) and name == "shared" and not ended
            return "refused"
        except EngineStoppedError as error:
            assert "the engine is closed" in str(error) and self.closing and not ended
            return "stopped"
        (last,) = ended
        if "abort" in [one.finish_reason for one in last.completions]:
            return "aborted"
        assert visible_output(last) == asked.expected, f"`{name}` says something else"
        return "answered"

    async def meddler(self, number: int) -> None:
        dice = random.Random(f"{self.seed} meddler {number}")
        with suppress(EngineStoppedError):
            for _ in range(10):
                await asyncio.sleep(dice.random() * 0.03)
                await self.meddle(dice)

    async def meddle(self, dice: random.Random) -> None:
        what = dice.choice(["pause", "clear", "clear", "abort", "abort", "abort all", "look"])
        if what == "pause":
            await self.door.pause()
            await asyncio.sleep(dice.random() * 0.01)
            if dice.random() < 0.5:
                await self.door.clear_cache()
            await self.door.resume()
        elif what == "clear":
            await self.door.clear_cache()
        elif what == "abort":
            name_of = f"{dice.randrange(THREADS)}.{dice.randrange(CLIENTS)}.{dice.randrange(REQUESTS)}"
            await self.door.abort(dice.choice([name_of, "shared"]))
        elif what == "abort all" and dice.random() < 0.3:
            await self.door.abort_all()
        else:
            load = self.door.load
            assert 0 <= load.pages_used <= load.pages and self.door.stuck_seconds < TIMEOUT


def where(thread: threading.Thread) -> str:
    """What it waits for."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)[-6:]) if frame is not None else "it is gone by now"


def check_quiet(door: AsyncLLM) -> None:
    door.engine.scheduler.check()
    assert left_behind(door.engine) == [] and not door.num_open


@pytest.mark.timeout(ROUNDS * 60 + 600)
def test_every_request_ends_once_whatever_the_others_do(llm: LLM, pool: list[PoolRequest]) -> None:
    ends: Counter[str] = Counter()
    for number in range(ROUNDS):
        door = AsyncLLM(llm)
        race = Race(door, pool, number)
        race.run(close_after=None)
        assert race.ends.total() == THREADS * CLIENTS * REQUESTS and not race.ends["stopped"]
        asyncio.run(door.pause())  # by now what the last clients told it has been done
        check_quiet(door)
        door.close(TIMEOUT)
        ends += race.ends
    assert ends.keys() == {"answered", "aborted", "left", "cancelled", "refused"}, ends


@pytest.mark.timeout(ROUNDS * 60 + 600)
def test_a_shutdown_in_the_middle_is_heard_by_all_and_leaves_nothing(llm: LLM, pool: list[PoolRequest]) -> None:
    ends: Counter[str] = Counter()
    for number in range(ROUNDS):
        door = AsyncLLM(llm)
        race = Race(door, pool, 1000 + number)
        race.run(close_after=random.Random(number).randrange(THREADS * CLIENTS * REQUESTS // 2))
        assert race.ends.total() == THREADS * CLIENTS * REQUESTS
        assert not door.alive and door.failure is None and not door._thread.is_alive()
        check_quiet(door)
        ends += race.ends
    assert ends["stopped"] > 0, ends
