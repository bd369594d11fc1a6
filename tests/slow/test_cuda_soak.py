"""Mixed requests for a while, by every method in turn: they come and go, give way and are dropped, and every text is
that of plain decoding; no page is lost.

OUTRIDER_SOAK_SECONDS says how long, all methods together; OUTRIDER_TEST_BACKENDS names another backend than `cuda`.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

import tiny_heads
from backends import settings
from laws.test_speculation import PROMPT, WORDS, plain, told, with_options
from outrider import LLM, Output, SamplingParams
from outrider.speculation import available, find

BACKEND = os.environ.get("OUTRIDER_TEST_BACKENDS", "cuda")
SECONDS = float(os.environ.get("OUTRIDER_SOAK_SECONDS", "60"))
POOL, LIVE = 60, 12
CROWDED = 16 * 24  # tokens of the cache: less than so many requests ask for
pytestmark = [pytest.mark.slow, *([pytest.mark.cuda] if BACKEND == "cuda" else [])]

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "ignore_eos": False},
    {"temperature": 0.7, "stop": ["!", "%$"]},
    {"temperature": 0.0, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 0.9, "speculate": False},
    {"temperature": 0.0, "n": 2},
    {"temperature": 0.0, "prediction": PROMPT},
]
# Methods as they are, and what else there is to them.
WAYS = {name: (name, {"adaptive": "no"}) for name in available()} | {
    "adaptive": ("eagle3", {}),
    "tree": ("eagle3", {"adaptive": "no", "width": 7, "branches": 2}),
    "drawn": ("eagle3", {"adaptive": "no", "draft": "probabilistic"}),
}


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    params: SamplingParams
    expected: object  # what plain decoding says
    texts: list[list[int]]


@pytest.fixture(scope="module")
def pool(tiny_folder) -> list[Asked]:
    dice = random.Random(1)
    prompts, params = [], []
    for number in range(POOL):
        prompt = [token for _ in range(12) for token in dice.choice(WORDS)][: dice.randrange(1, 60)]
        most = dice.choice([1, 2, 9, 30, 60])
        base = SamplingParams(max_tokens=most, seed=number, ignore_eos=True)
        prompts.append(prompt)
        params.append(replace(base, **KINDS[number % len(KINDS)]))
    llm = LLM(str(tiny_folder()), **settings(BACKEND), cudagraph_mode="NONE")
    outputs = llm.generate(prompts, [plain(own) for own in params])
    return [
        Asked(prompt, own, told(output), [one.token_ids for one in output.completions])
        for prompt, own, output in zip(prompts, params, outputs, strict=True)
    ]


def options_of(name: str, folder: Path) -> dict[str, str]:
    needs_head = any(field.name == "model" for field in fields(find(name).Options))
    return tiny_heads.make(name, folder) if needs_head else {}


class Crowd:
    """The requests that an engine has, and what became of those it had."""

    def __init__(self, llm: LLM, pool: list[Asked], dice: random.Random) -> None:
        self.engine, self.pool, self.dice = llm.engine, pool, dice
        self.live: dict[str, Asked] = {}
        self.seen: Counter[str] = Counter()

    def turn(self) -> None:
        """Some come, some are dropped, all go on."""
        for _ in range(self.dice.randrange(4) if len(self.live) < LIVE else 0):
            asked = self.dice.choice(self.pool)
            self.live[self.engine.add(asked.prompt, asked.params)] = asked
        if self.live and self.dice.random() < 0.05:
            self.drop(self.dice.choice(sorted(self.live)))
        if self.dice.random() < 0.01:
            self.engine.clear_cache()
        self.step()

    def step(self) -> None:
        for output in self.engine.step(quiet=self.dice.random() < 0.5):
            if output.finished:
                self.finish(output)
        self.engine.scheduler.check()

    def finish(self, output: Output) -> None:
        asked = self.live.pop(output.request_id)
        assert told(output) == asked.expected, asked
        assert output.stats is not None
        tally = output.stats.speculation
        self.seen.update(finished=1, preempted=output.stats.preemptions, drafted=tally.drafted, kept=tally.accepted)

    def drop(self, name: str) -> None:
        asked, output = self.live.pop(name), self.engine.abort(name)
        assert output is not None
        for one, text in zip(output.completions, asked.texts, strict=True):
            assert one.token_ids == text[: len(one.token_ids)], asked
        self.seen["dropped"] += 1


@pytest.fixture(params=WAYS)
def llm(request: pytest.FixtureRequest, tiny_folder, tmp_path: Path) -> Iterator[LLM]:
    name, options = WAYS[request.param]
    speculate = with_options(name, **options_of(name, tmp_path), **options)
    given = {**settings(BACKEND), "rounds": 16, "cache_tokens": CROWDED, "max_requests": LIVE}
    yield LLM(str(tiny_folder()), speculate=speculate, **given)


def test_soak(llm: LLM, pool: list[Asked], record_property) -> None:
    crowd = Crowd(llm, pool, random.Random(2))
    crowd.turn()  # and compile
    end = time.monotonic() + SECONDS / len(WAYS)
    while time.monotonic() < end or not all(crowd.seen[event] for event in ("finished", "preempted", "dropped")):
        crowd.turn()
    while crowd.live:
        crowd.step()
    engine = llm.engine
    assert engine.is_idle and not engine.families and not engine.speculator.control._requests
    assert engine.scheduler.cache.available == engine.scheduler.cache.pages
    record_property("seen", dict(crowd.seen))
    assert crowd.seen["finished"] > crowd.seen["dropped"] and crowd.seen["drafted"]
