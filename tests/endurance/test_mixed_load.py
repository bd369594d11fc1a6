"""Every method under mixed load: each text is that of a solo run, no page is lost, and the memory stays as it is.

Some seconds on a tiny model; with OUTRIDER_ENDURANCE=1 an hour with the model and the heads that ship, and ten minutes
on the tiny one. OUTRIDER_ENDURANCE_SECONDS says otherwise.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from endure import FLAT, WAYS, Asked, Crowd, Endured, endure, line, mixed, open_crowds, say, solo
from outrider import LLM
from outrider.speculation import available

LONG = os.environ.get("OUTRIDER_ENDURANCE") == "1"
SECONDS = float(os.environ.get("OUTRIDER_ENDURANCE_SECONDS", "3600" if LONG else "10"))
TINY_SECONDS = SECONDS / 6 if LONG else SECONDS
# Beside the methods as they are: what else there is to them.
VARIANTS = ("eagle3,width=7,branches=2", "eagle3,draft=probabilistic", "ngram,width=1", "suffix,cached_requests=64")
CROWDED = {"cache_tokens": 160, "page_size": 8, "max_requests": 12, "max_step_tokens": 64}


@pytest.fixture(scope="module")
def pool(tiny_folder: Callable[..., Path]) -> list[Asked]:
    llm = LLM(str(tiny_folder()), backend="cpu", prefix_cache=False)
    return solo(llm, list(mixed(52, random.Random(1), lengths=(1, 5, 12, 24, 40), words=9)))


@pytest.fixture
def one_crowd(tiny_folder: Callable[..., Path], pool: list[Asked]) -> Callable[..., Crowd]:
    def make(wanted: Sequence[Asked] = pool, **options: Any) -> Crowd:
        return Crowd("plain", LLM(str(tiny_folder()), backend="cpu", **{**CROWDED, **options}), wanted, seed=1)

    return make


def check(found: Endured) -> None:
    say(line(found))
    assert found.faults == []
    for way, seen in found.seen.items():
        assert seen["texts"], f"{way} finished no text"
    total = found.total
    assert min(total[event] for event in ("preempted", "dropped", "cleared", "kept")) > 0
    assert total["crowded"] > total["steps"] / 10, "the pages were never short"


@pytest.mark.timeout(TINY_SECONDS + 600)
def test_every_method_on_a_tiny_model(
    tiny_folder: Callable[..., Path], speculation: Callable[[str], str], pool: list[Asked]
) -> None:
    ways = ["none", *(speculation(name) for name in available())]
    ways.remove(speculation("suffix"))  # what it remembers must have an end soon, or the memory grows as it should
    for name, _, options in (variant.partition(",") for variant in VARIANTS):
        ways.append(f"{speculation(name)},{options}")
    ways.append(speculation("eagle3").replace("adaptive=no", "adaptive=yes"))
    crowds = open_crowds(str(tiny_folder()), ways, {"backend": "cpu", **CROWDED}, pool)
    # So many seconds are too few to tell what is still touched for the first time from what leaks.
    flat = FLAT if LONG else 5 * FLAT
    check(endure(crowds, TINY_SECONDS, TINY_SECONDS / 2, lambda now: say(line(now)), flat))
    for batch_size in crowds[1:]:
        assert batch_size.seen["drafted"] or "adaptive=yes" in batch_size.name, f"{batch_size.name} drafted nothing"


def real_model() -> Endured:
    plain = LLM("smollm2-135m", prefix_cache=False, cache_tokens=2048)
    texts = solo(plain, list(mixed(130, random.Random(1))))
    options = {"cache_tokens": 384, "max_requests": 12, "max_step_tokens": 96}
    return endure(open_crowds("smollm2-135m", WAYS, options, texts), SECONDS, SECONDS / 4, lambda now: say(line(now)))


if LONG:

    @pytest.mark.timeout(SECONDS + 1800)
    def test_an_hour_with_the_model_and_the_heads_that_ship() -> None:
        check(real_model())


# ---- the judge finds what is wrong ----


def test_another_text_than_alone_is_found(one_crowd: Callable[..., Crowd], pool: list[Asked]) -> None:
    wrong = [replace(pool[0], expected="something else"), replace(pool[13], expected="something else")]
    found = endure([one_crowd(wrong)], 30, 30, lambda _: None)
    assert found.faults and "plain: another text than alone" in found.faults[0]


def test_a_dropped_text_that_began_otherwise_is_found(one_crowd: Callable[..., Crowd], pool: list[Asked]) -> None:
    long = next(asked for asked in pool if asked.params.max_tokens >= 24 and len(asked.texts[0]) >= 24)
    batch_size = one_crowd([replace(long, texts=[[0] * 40 for _ in long.texts])])
    for _ in range(8):
        batch_size.turn()
    batch_size.drop(next(iter(batch_size.live)))
    assert "a dropped text began otherwise" in batch_size.faults[0]


def test_a_page_that_nobody_gives_back_is_found(one_crowd: Callable[..., Crowd]) -> None:
    batch_size = one_crowd()
    batch_size.engine.scheduler.cache.allocate(1)
    with pytest.raises(AssertionError, match="a page leaked"):
        batch_size.turn()
    idle = one_crowd()
    idle.engine.scheduler.cache.allocate(1)
    idle.end()
    assert idle.faults == ["plain: 1 pages left behind"]


@pytest.mark.parametrize(("grows", "faulty"), [(0, False), (FLAT / 2, False), (3 * FLAT, True)])
def test_memory_that_grows_after_the_warm_up_is_found(grows: float, faulty: bool) -> None:
    sizes = [(float(at), int(1e9 * (1 + grows * max(at - 10, 0) / 100))) for at in range(111)]
    found = Endured(110, {}, [(0.0, 1), *sizes[1:]], warm=10)
    assert (found.grown > FLAT) is faulty
