"""Every method under mixed load: texts equal a solo run, no page leaks, and the memory does not grow.

Takes a few seconds on a tiny model. With OUTRIDER_ENDURANCE=1: an hour with the shipped model and heads, and ten
minutes on the tiny model. OUTRIDER_ENDURANCE_SECONDS sets another time.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from endure import FLAT, METHODS, PoolRequest, SoakResult, Workload, endure, line, mixed, open_workloads, say, solo
from outrider import LLM
from outrider.speculation import available

LONG = os.environ.get("OUTRIDER_ENDURANCE") == "1"
SECONDS = float(os.environ.get("OUTRIDER_ENDURANCE_SECONDS", "3600" if LONG else "10"))
TINY_SECONDS = SECONDS / 6 if LONG else SECONDS
# Variants of methods, beside their defaults.
VARIANTS = ("eagle3,width=7,branches=2", "eagle3,draft=probabilistic", "ngram,width=1", "suffix,cached_requests=64")
SMALL_CACHE = {"cache_tokens": 160, "page_size": 8, "max_requests": 12, "max_step_tokens": 64}


@pytest.fixture(scope="module")
def pool(tiny_folder: Callable[..., Path]) -> list[PoolRequest]:
    llm = LLM(str(tiny_folder()), backend="cpu", prefix_cache=False)
    return solo(llm, list(mixed(52, random.Random(1), lengths=(1, 5, 12, 24, 40), words=9)))


@pytest.fixture
def one_workload(tiny_folder: Callable[..., Path], pool: list[PoolRequest]) -> Callable[..., Workload]:
    def make(wanted: Sequence[PoolRequest] = pool, **options: Any) -> Workload:
        return Workload("plain", LLM(str(tiny_folder()), backend="cpu", **{**SMALL_CACHE, **options}), wanted, seed=1)

    return make


def check(found: SoakResult) -> None:
    say(line(found))
    assert found.faults == []
    for method, seen in found.seen.items():
        assert seen["texts"], f"{method} finished no text"
    total = found.total
    assert min(total[event] for event in ("preempted", "aborted", "cleared", "accepted")) > 0
    assert total["full"] > total["steps"] / 10, "the pages were never short"


@pytest.mark.timeout(TINY_SECONDS + 600)
def test_mixed_load_changes_no_text_and_leaks_nothing(
    tiny_folder: Callable[..., Path],
    speculation: Callable[[str], str],
    pool: list[PoolRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not LONG:  # the same steps on a slow machine: the clock counts 0.1 s each time that it is read, twice a rotation
        monkeypatch.setattr("endure.time", SimpleNamespace(monotonic=count(step=0.1).__next__))
    methods = ["none", *(speculation(name) for name in available())]
    methods.remove(speculation("suffix"))  # its cache grows without limit; a variant limits it
    for name, _, options in (variant.partition(",") for variant in VARIANTS):
        methods.append(f"{speculation(name)},{options}")
    methods.append(speculation("eagle3").replace("adaptive=no", "adaptive=yes"))
    workloads = open_workloads(str(tiny_folder()), methods, {"backend": "cpu", **SMALL_CACHE}, pool)
    # A short run cannot distinguish first-time allocations from leaks, so its bound is wider.
    flat = FLAT if LONG else 5 * FLAT
    check(endure(workloads, TINY_SECONDS, TINY_SECONDS / 2, lambda now: say(line(now)), flat))
    for workload in workloads[1:]:
        assert workload.seen["drafted"] or "adaptive=yes" in workload.name, f"{workload.name} drafted nothing"


def real_model() -> SoakResult:
    plain = LLM("smollm2-135m", prefix_cache=False, cache_tokens=2048)
    texts = solo(plain, list(mixed(130, random.Random(1))))
    options = {"cache_tokens": 384, "max_requests": 12, "max_step_tokens": 96}
    return endure(
        open_workloads("smollm2-135m", METHODS, options, texts), SECONDS, SECONDS / 4, lambda now: say(line(now))
    )


if LONG:

    @pytest.mark.timeout(SECONDS + 1800)
    def test_an_hour_with_the_model_and_the_heads_that_ship() -> None:
        check(real_model())


# ---- the soak test itself finds faults ----


def test_a_text_that_differs_from_the_solo_run_is_a_fault(
    one_workload: Callable[..., Workload], pool: list[PoolRequest]
) -> None:
    wrong = [replace(pool[0], expected="something else"), replace(pool[13], expected="something else")]
    found = endure([one_workload(wrong)], 30, 30, lambda _: None)
    assert found.faults and "plain: the text differs from the solo run" in found.faults[0]


def test_a_wrong_prefix_of_an_aborted_request_is_a_fault(
    one_workload: Callable[..., Workload], pool: list[PoolRequest]
) -> None:
    long = next(request for request in pool if request.params.max_tokens >= 24 and len(request.texts[0]) >= 24)
    workload = one_workload([replace(long, texts=[[0] * 40 for _ in long.texts])])
    for _ in range(8):
        workload.advance()
    workload.abort(next(iter(workload.live)))
    assert "the text of an aborted request differs" in workload.faults[0]


def test_a_leaked_page_is_a_fault(one_workload: Callable[..., Workload]) -> None:
    workload = one_workload()
    workload.engine.scheduler.cache.allocate(1)
    with pytest.raises(AssertionError, match="a page leaked"):
        workload.advance()
    idle = one_workload()
    idle.engine.scheduler.cache.allocate(1)
    idle.end()
    assert idle.faults == ["plain: 1 pages left behind"]


@pytest.mark.parametrize(("grows", "faulty"), [(0, False), (FLAT / 2, False), (3 * FLAT, True)])
def test_memory_growth_after_the_warm_up_is_a_fault(grows: float, faulty: bool) -> None:
    sizes = [(float(second), int(1e9 * (1 + grows * max(second - 10, 0) / 100))) for second in range(111)]
    found = SoakResult(110, {}, [(0.0, 1), *sizes[1:]], warm=10)
    assert (found.grown > FLAT) is faulty
