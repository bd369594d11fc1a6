"""Soak test of every method: requests are added, preempted and aborted; texts equal plain decoding, no page leaks.

OUTRIDER_SOAK_SECONDS is the time for all methods together; OUTRIDER_TEST_BACKENDS names another backend than `cuda`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_heads
from backends import settings
from endure import PoolRequest, Workload, mixed, solo
from laws.mix import with_options
from outrider import LLM
from outrider.speculation import available

BACKEND = os.environ.get("OUTRIDER_TEST_BACKENDS", "cuda")
SECONDS = float(os.environ.get("OUTRIDER_SOAK_SECONDS", "60"))
SMALL_CACHE = {"cache_tokens": 16 * 24, "max_requests": 12}  # fewer tokens than 12 requests need
pytestmark = [pytest.mark.slow, *([pytest.mark.cuda] if BACKEND == "cuda" else [])]

# Every method, and variants.
METHODS = {name: (name, {"adaptive": "no"}) for name in available()} | {
    "adaptive": ("eagle3", {}),
    "tree": ("eagle3", {"adaptive": "no", "width": 7, "branches": 2}),
    "sampled": ("eagle3", {"adaptive": "no", "draft": "probabilistic"}),
}


@pytest.fixture(scope="module")
def pool(tiny_folder: Callable[..., Path]) -> list[PoolRequest]:
    llm = LLM(str(tiny_folder()), **settings(BACKEND), cudagraph_mode="NONE", prefix_cache=False)
    return solo(llm, list(mixed(65, random.Random(1), lengths=(1, 2, 9, 30, 60), words=12)))


@pytest.fixture(params=METHODS)
def workload(
    request: pytest.FixtureRequest, tiny_folder: Callable[..., Path], tmp_path: Path, pool: list[PoolRequest]
) -> Workload:
    name, options = METHODS[request.param]
    speculate = with_options(name, **tiny_heads.make(name, tmp_path), **options)
    llm = LLM(str(tiny_folder()), speculate=speculate, **{**settings(BACKEND), "decode_steps": 16, **SMALL_CACHE})
    return Workload(request.param, llm, pool, seed=2)


def test_soak_changes_no_text_and_leaks_no_page(
    workload: Workload, record_property: Callable[[str, object], None]
) -> None:
    workload.advance()  # compile before the time starts
    end, wanted = time.monotonic() + SECONDS / len(METHODS), ("texts", "preempted", "aborted")
    while not workload.faults and (time.monotonic() < end or not all(workload.seen[event] for event in wanted)):
        workload.advance()
    workload.end()
    record_property("seen", dict(workload.seen))
    assert workload.faults == []
    assert workload.seen["texts"] > workload.seen["aborted"] and workload.seen["drafted"]
