"""Rounds become ratios: ours against theirs, round by round, with their spread; and a picture of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outrider.bench.peers import measure as races
from outrider.bench.peers.measure import DecodeTime, PeerRun, PeersConfig, groups, long_prompt
from outrider.bench.peers.registry import Peer, forgetful, ours
from outrider.bench.peers.report import TICKS, agreement, best, ratio_chart, report, shared, span

SETS = {"words": [[1, 2], [3]], "code": [[4]]}


def entrant(peer: Peer, rates: dict[tuple[Any, int, str], list[float]], **fields: Any) -> PeerRun:
    """rates: tokens per second by way, batch and set, and within these by round."""
    decodings = {key: [DecodeTime(100, 100 / rate) for rate in each] for key, each in rates.items()}
    texts = {("words", 0): [1, 2, 3], ("words", 1): [1, 2, 3], ("code", 0): [1, 2, 3]}
    given: dict[str, Any] = {"facts": {"version": "1", "weights": "as given"}, "texts": texts} | fields
    ways = dict.fromkeys(way for way, *_ in rates)
    return PeerRun(peer, Path(), "", children=ways, decodings=decodings, **given)  # type: ignore[arg-type]


@pytest.fixture
def race() -> races.PeerBenchmark:
    mine = entrant(
        ours("ngram"),
        {
            ("plain", 1, "words"): [20, 40],
            ("plain", 1, "code"): [30, 30],
            ("speculation", 1, "words"): [40, 80],
            ("speculation", 1, "code"): [60, 60],
        },
        prompts=[1.0, 2.0],
        starts=[1.0, 1.0, 1.0],
        memory={"plain": {"resident": 100, "peak": 120}},
    )
    theirs = entrant(
        Peer("other", "folder", speculation="lookup", widths=(2, 5)),
        {
            ("plain", 1, "words"): [10, 10],
            ("plain", 1, "code"): [10, 15],
            ("speculation", 1, "words"): [5, 5],
            ("speculation", 1, "code"): [5, 5],
        },
        prompts=[8.0, 8.0],
        starts=[30.0],
        memory={"plain": {"resident": 250, "peak": 300}},
        widths={1: 5},
        texts={("words", 0): [1, 2, 3], ("words", 1): [1, 9, 3], ("code", 0): [1, 2, 3]},
    )
    return races.PeerBenchmark(PeersConfig(2, 3, (1,), 16, 1), SETS, print, [mine, theirs], {"absent": "no wheel"})


def test_ratios_are_those_of_single_rounds(race: races.PeerBenchmark) -> None:
    found = report(race, "tiny")
    ratios = {one["figure"]: one for one in found["ratios"]}
    # words: 2 and 4; code: 3 and 2; their means by round: 2.5 and 3
    assert ratios["plain, batch 1"]["ratio"] == pytest.approx({"median": 2.75, "low": 2.5, "high": 3.0})
    assert (ratios["plain, batch 1"]["ours"], ratios["plain, batch 1"]["theirs"]) == pytest.approx((30.0, 11.25))
    assert ratios["best against its plain, batch 1"]["ratio"]["low"] == pytest.approx(5.0)
    # Its speculation is slower than plain decoding, so its best is plain.
    assert ratios["best against its best, batch 1"] == ratios["best against its plain, batch 1"] | {
        "figure": "best against its best, batch 1"
    }
    assert ratios["prompt of 16 tokens"]["ratio"] == pytest.approx({"median": 6.0, "low": 4.0, "high": 8.0})
    assert ratios["start to first token"]["ratio"]["median"] == 30.0
    assert ratios["memory, plain"]["ratio"]["median"] == 2.5
    assert {one["peer"] for one in found["ratios"]} == {"other"}
    assert found["skipped"] == [{"name": "absent", "reason": "no wheel"}]


def test_each_engine_has_figures_of_its_own(race: races.PeerBenchmark) -> None:
    mine, theirs = report(race, "tiny")["engines"]
    assert mine["agreement"] is None and mine["speculation"] == "ngram"
    plain, drafted = theirs["decode"]
    assert (plain["way"], plain["width"], drafted["way"], drafted["width"]) == ("plain", None, "speculation", 5)
    assert plain["sets"]["code"] == pytest.approx({"median": 12.5, "low": 10, "high": 15})
    assert theirs["agreement"]["share_of_equal_beginnings"] == pytest.approx(2 / 3)
    assert theirs["agreement"]["mean_equal_tokens"] == pytest.approx(7 / 3)


def test_the_best_mode_is_the_faster_one(race: races.PeerBenchmark) -> None:
    assert [best(one, 1, list(SETS)) for one in race.entrants] == ["speculation", "plain"]


def test_without_memory_figures_there_is_no_memory_ratio(race: races.PeerBenchmark) -> None:
    race.entrants[1].memory = {"plain": None}
    found = report(race, "tiny")
    assert found["ratios"][-1] == {
        "peer": "other",
        "figure": "memory, plain",
        "ratio": None,
        "ours": 100.0,
        "theirs": None,
        "unit": "bytes",
    }
    assert "memory" not in ratio_chart(found)


@pytest.mark.parametrize(
    ("one", "other", "equal"), [([1, 2], [1, 2], 2), ([1, 2, 3], [1, 9, 3], 1), ([5], [6], 0), ([1], [1, 2], 1)]
)
def test_equal_first_tokens_are_counted(one: list[int], other: list[int], equal: int) -> None:
    assert shared(one, other) == equal


def test_agreement_compares_the_first_tokens(race: races.PeerBenchmark) -> None:
    mine, theirs = race.entrants
    mine.texts = {("words", 0): list(range(20))}
    theirs.texts = {("words", 0): [*range(8), 99, *range(9, 20)]}
    assert agreement(mine, theirs) == {
        "prompts": 1,
        "first_tokens": 8,
        "share_of_equal_beginnings": 1.0,
        "mean_equal_tokens": 8.0,
    }
    theirs.texts = {("words", 0): [*range(7), 99]}
    assert agreement(mine, theirs)["share_of_equal_beginnings"] == 0.0


def test_the_chart_shows_every_ratio(race: races.PeerBenchmark) -> None:
    found = report(race, "tiny")
    drawn = ElementTree.fromstring(ratio_chart(found))
    space = {"svg": "http://www.w3.org/2000/svg"}
    titles = [one.text for one in drawn.iterfind(".//svg:title", space)]
    assert len(titles) == len(found["ratios"]) == 6
    assert "plain, batch 1, other: 2.75 x, 2.50 to 3.00" in titles
    axis = span(found["ratios"])
    assert (axis.low, axis.high) == (1, 50)
    assert axis.x(1) < axis.x(2) < axis.x(4) and axis.x(4) - axis.x(2) == pytest.approx(axis.x(2) - axis.x(1), abs=0.2)


def test_the_axis_covers_ratios_below_1_and_above_the_last_tick() -> None:
    axis = span([{"ratio": {"median": 0.5, "low": 0.3, "high": 3000.0}}])
    assert axis.low == 0.2 and axis.high == 3000.0 and max(TICKS) < 3000


def test_the_last_group_is_filled_with_the_first_prompts() -> None:
    found = list(groups({"a": [[1], [2], [3]]}, (1, 2)))
    assert [one.numbers for one in found] == [(0,), (1,), (2,), (0, 1), (2, 0)]
    assert found[-1].prompts == ([3], [1]) and found[-1].batch == 2


def test_long_prompts_have_their_length_and_differ() -> None:
    first, second = (long_prompt({"a": [[1, 2, 3], [4, 5], [6]]}, 20, seed) for seed in (0, 1))
    assert len(first) == len(second) == 20 and first != second


def test_the_cache_of_earlier_answers_is_disabled() -> None:
    assert forgetful("suffix") == "suffix:cached_requests=0"
    assert forgetful("suffix+eagle3:model=x,width=15") == "suffix+eagle3:model=x,width=15,cached_requests=0"
    assert forgetful("suffix:cached_requests=5") == "suffix:cached_requests=5"
    assert forgetful("ngram:width=4") == "ngram:width=4"
    assert ours("none").speculation == ""
