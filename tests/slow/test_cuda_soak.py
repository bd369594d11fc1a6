"""Mixed requests for a while, by every method in turn: they come and go, give way and are dropped, and every text is
that of plain decoding; no page is lost.

OUTRIDER_SOAK_SECONDS says how long, all methods together; OUTRIDER_TEST_BACKENDS names another backend than `cuda`.
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
from endure import Asked, Crowd, mixed, solo
from laws.mix import with_options
from outrider import LLM
from outrider.speculation import available

BACKEND = os.environ.get("OUTRIDER_TEST_BACKENDS", "cuda")
SECONDS = float(os.environ.get("OUTRIDER_SOAK_SECONDS", "60"))
CROWDED = {"cache_tokens": 16 * 24, "max_requests": 12}  # fewer tokens than so many requests ask for
pytestmark = [pytest.mark.slow, *([pytest.mark.cuda] if BACKEND == "cuda" else [])]

# Methods as they are, and what else there is to them.
WAYS = {name: (name, {"adaptive": "no"}) for name in available()} | {
    "adaptive": ("eagle3", {}),
    "tree": ("eagle3", {"adaptive": "no", "width": 7, "branches": 2}),
    "drawn": ("eagle3", {"adaptive": "no", "draft": "probabilistic"}),
}


@pytest.fixture(scope="module")
def pool(tiny_folder: Callable[..., Path]) -> list[Asked]:
    llm = LLM(str(tiny_folder()), **settings(BACKEND), cudagraph_mode="NONE", prefix_cache=False)
    return solo(llm, list(mixed(65, random.Random(1), lengths=(1, 2, 9, 30, 60), words=12)))


@pytest.fixture(params=WAYS)
def batch_size(
    request: pytest.FixtureRequest, tiny_folder: Callable[..., Path], tmp_path: Path, pool: list[Asked]
) -> Crowd:
    name, options = WAYS[request.param]
    speculate = with_options(name, **tiny_heads.make(name, tmp_path), **options)
    llm = LLM(str(tiny_folder()), speculate=speculate, **{**settings(BACKEND), "decode_steps": 16, **CROWDED})
    return Crowd(request.param, llm, pool, seed=2)


def test_soak(batch_size: Crowd, record_property: Callable[[str, object], None]) -> None:
    batch_size.turn()  # and compile
    end, wanted = time.monotonic() + SECONDS / len(WAYS), ("texts", "preempted", "dropped")
    while not batch_size.faults and (time.monotonic() < end or not all(batch_size.seen[event] for event in wanted)):
        batch_size.turn()
    batch_size.end()
    record_property("seen", dict(batch_size.seen))
    assert batch_size.faults == []
    assert batch_size.seen["texts"] > batch_size.seen["dropped"] and batch_size.seen["drafted"]
