"""Many clients at the server: streams and whole answers, hang-ups, pauses, cleared caches, and a shutdown in between.

Every schedule has a seed. Whatever the order, a request gets its whole text, an abort, or an error that says what to
do; no stream just stops; and when the server is gone, its engine is empty.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from endurance.test_races import where
from endure import PoolRequest, left_behind, solo
from outrider import LLM, AsyncLLM, SamplingParams
from outrider.server.app import build_app, listen, serve
from outrider.server.options import ServerOptions

LONG = os.environ.get("OUTRIDER_ENDURANCE") == "1"
ROUNDS = int(os.environ.get("OUTRIDER_RACE_ROUNDS", "60" if LONG else "3"))
CLIENTS, REQUESTS = 6, 4
TIMEOUT = 120.0
HANGS_UP = 0.03  # how likely at a chunk
REFUSALS = {429, 503}
GONE = (httpx.NetworkError, httpx.RemoteProtocolError)  # the server is gone; a timeout is something else


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[..., Path], speculation: Callable[[str], str]) -> LLM:
    options = {"cache_tokens": 160, "page_size": 8, "max_requests": 4, "max_step_tokens": 48}
    return LLM(str(tiny_folder()), backend="cpu", speculate=speculation("suffix"), **options)


@pytest.fixture(scope="module")
def pool(tiny_folder: Callable[..., Path]) -> list[PoolRequest]:
    dice = random.Random(5)
    requests = [
        (
            [dice.randrange(3, 101) for _ in range(dice.randrange(1, 40))],
            SamplingParams(
                max_tokens=dice.choice([1, 5, 20, 40]),
                temperature=dice.choice([0, 0.8, 1.0]),
                seed=number,
                ignore_eos=number % 3 > 0,
                stop=["e"] if number % 4 == 0 else (),
            ),
        )
        for number in range(24)
    ]
    return solo(LLM(str(tiny_folder()), backend="cpu", prefix_cache=False), requests)


def body(asked: PoolRequest, stream: bool) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "seed", "ignore_eos", "stop")
    return {"prompt": asked.prompt, "stream": stream} | {name: getattr(asked.params, name) for name in names}


@dataclass
class Race:
    url: str
    llm: AsyncLLM
    pool: list[PoolRequest]
    seed: int
    ends: Counter[str] = field(default_factory=Counter)
    failures: list[BaseException] = field(default_factory=list)
    closing: bool = False
    held: bool = False  # paused for good: only an abort can end what runs

    def run(self, shut_down: Callable[[], None] | None) -> None:
        jobs = [(self.client, number) for number in range(CLIENTS)] + [(self.meddler, number) for number in range(2)]
        threads = [threading.Thread(target=self.guarded, args=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        if shut_down is not None:
            enough = random.Random(self.seed).randrange(2, CLIENTS * REQUESTS // 2)
            while self.ends.total() < enough and not self.failures:
                time.sleep(0.001)
            self.closing = True
            self.held = self.seed % 2 > 0
            if self.held:
                asyncio.run(self.llm.pause())
            shut_down()
        for thread in threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive(), f"someone waits for ever in round {self.seed}:\n{where(thread)}"
        if self.failures:
            raise self.failures[0]

    def guarded(self, job: Callable[[random.Random, httpx.Client], None], number: int) -> None:
        dice = random.Random(f"{self.seed} {job.__name__} {number}")
        try:
            # A connection for each request: one that is kept may be closed just when the next request is on its way.
            limits = httpx.Limits(max_keepalive_connections=0)
            with httpx.Client(base_url=self.url, timeout=TIMEOUT / 4, limits=limits) as client:
                job(dice, client)
        except BaseException as error:
            self.failures.append(error)

    def client(self, dice: random.Random, client: httpx.Client) -> None:
        for _ in range(REQUESTS):
            asked = dice.choice(self.pool)
            end = self.stream(asked, dice, client) if dice.random() < 0.7 else self.whole(asked, client)
            self.ends[end] += 1

    def whole(self, asked: PoolRequest, client: httpx.Client) -> str:
        try:
            answer = client.post("/v1/completions", json=body(asked, stream=False))
        except GONE:  # the server is gone
            assert self.closing
            return "gone"
        if answer.status_code != 200:
            return self.refused(answer)
        (choice,) = answer.json()["choices"]
        return self.judged(asked, choice["text"], choice["finish_reason"])

    def stream(self, asked: PoolRequest, dice: random.Random, client: httpx.Client) -> str:
        text, reasons, done, begun = "", [], False, False
        try:
            with client.stream("POST", "/v1/completions", json=body(asked, stream=True)) as answer:
                begun = True
                if answer.status_code != 200:
                    answer.read()
                    return self.refused(answer)
                for line in answer.iter_lines():
                    assert not done or not line, "a stream went on after its end"
                    done |= line == "data: [DONE]"
                    if done or not line.startswith("data: "):
                        continue
                    (choice,) = json.loads(line[6:])["choices"]
                    text += choice["text"]
                    reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                    if dice.random() < HANGS_UP:
                        return "hung up"
        except GONE:
            assert self.closing and not begun, "a stream was cut"
            return "gone"
        assert done and len(reasons) == 1, f"a stream ended {len(reasons)} times"
        return self.judged(asked, text, reasons[0])

    def judged(self, asked: PoolRequest, text: str, reason: str) -> str:
        (_, expected, ending, *_), *_ = asked.expected  # type: ignore[misc]
        if reason == "abort":
            assert expected.startswith(text) and self.closing
            return "aborted"
        assert (text, reason) == (expected, ending)
        return "answered"

    def refused(self, answer: httpx.Response) -> str:
        assert answer.status_code in REFUSALS and answer.json()["error"]["message"], answer.text
        assert answer.headers["retry-after"] and (answer.status_code == 429 or self.closing)
        return "refused"

    def meddler(self, dice: random.Random, client: httpx.Client) -> None:
        for _ in range(8):
            time.sleep(dice.random() * 0.06)
            try:
                self.meddle(dice, client)
            except GONE:
                assert self.closing
                return

    def meddle(self, dice: random.Random, client: httpx.Client) -> None:
        what = dice.choice(["pause", "clear", "look"])
        if what == "pause":
            assert client.post("/pause").json() == {"paused": True}
            time.sleep(dice.random() * 0.02)
            if not self.held:
                client.post("/resume")
        elif what == "clear":
            with suppress(RuntimeError):  # it is closed
                asyncio.run(self.llm.clear_cache())
        else:
            assert client.get("/health").status_code == 200 or self.closing
            assert "outrider" in client.get("/metrics").text


@contextmanager
def served(door: AsyncLLM, drain_seconds: float) -> Iterator[tuple[str, Callable[[], None]]]:
    """An address, and what tells the server there to stop; in the end it has, and nothing is left of it."""
    options = ServerOptions(port=0, names=("tiny",), max_waiting=12, log_requests=False, drain_seconds=drain_seconds)
    app, listener, codes = build_app(door, options), listen(options), list[int]()

    def live() -> None:
        codes.append(serve(app, options, listener))
        # Python 3.11 forgets a connection that it accepts just when its server closes. A process that exits closes it.
        gc.collect()

    thread = threading.Thread(target=live, daemon=True)
    thread.start()

    def shut_down() -> None:
        app.state.server.handle_exit(signal.SIGTERM, None)

    while not hasattr(app.state, "server"):
        time.sleep(0.001)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", shut_down
    if not app.state.context.admission.draining:
        shut_down()
    thread.join(TIMEOUT)
    assert codes == [0] and not door.alive and door.failure is None
    assert app.state.context.admission.active == 0
    door.engine.scheduler.check()
    assert left_behind(door.engine) == [] and not door.num_open


def round_of(llm: LLM, pool: list[PoolRequest], seed: int, shuts_down: bool) -> Counter[str]:
    door = AsyncLLM(llm)
    with served(door, random.Random(seed).choice([0, 0.2, 1])) as (address, shut_down):
        race = Race(address, door, pool, seed)
        race.run(shut_down if shuts_down else None)
    assert race.ends.total() == CLIENTS * REQUESTS
    return race.ends


@pytest.mark.timeout(ROUNDS * 60 + 600)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("shuts_down", [False, True], ids=["", "shutdown"])
def test_every_client_hears_how_its_request_ended(llm: LLM, pool: list[PoolRequest], shuts_down: bool) -> None:
    ends: Counter[str] = Counter()
    for number in range(ROUNDS):
        ends += round_of(llm, pool, 100 * shuts_down + number, shuts_down)
    assert ends["answered"] and (ends["aborted"] + ends["refused"] + ends["gone"] if shuts_down else ends["hung up"])


def test_who_is_on_the_way_to_the_engine_is_not_left_behind(
    llm: LLM, pool: list[PoolRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was let in, and the engine has not heard of it when everyone there is told to end."""
    door, arrived = AsyncLLM(llm), threading.Event()

    async def dawdle(_: object) -> None:
        arrived.set()
        await asyncio.sleep(0.2)

    monkeypatch.setattr(door, "_compile", dawdle)
    with served(door, drain_seconds=0) as (address, shut_down):
        asyncio.run(door.pause())
        race = Race(address, door, pool, seed=0, closing=True)

        def ask(_: random.Random, client: httpx.Client) -> None:
            race.ends[race.whole(pool[2], client)] += 1

        thread = threading.Thread(target=race.guarded, args=(ask, 0))
        thread.start()
        assert arrived.wait(TIMEOUT)
        shut_down()
        thread.join(TIMEOUT)
    assert not race.failures and dict(race.ends) == {"aborted": 1}
