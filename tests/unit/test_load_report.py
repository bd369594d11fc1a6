"""The report of the load test: it detects every fault, and none in a good run."""

from __future__ import annotations

import pytest

from load_report import COUNTS, StreamResult, faults, quantiles, report

IDLE = {**dict.fromkeys(COUNTS, 0), "tasks": 3, "resident": 400}
BUSY = {**dict.fromkeys(COUNTS, 20), "resident": 400}


def stream(*gaps: float) -> StreamResult:
    times = [sum(gaps[:count]) for count in range(len(gaps) + 1)]
    return StreamResult(status=200, tokens=len(times), chunks=times, finished=True)


GOOD = [
    stream(0.1, 0.1, 0.3),
    stream(0.1),
    StreamResult(status=200),
    StreamResult(status=429, problem="the queue is full"),
    StreamResult(),
]


def test_a_good_run_has_no_fault(capsys) -> None:
    assert faults(GOOD, IDLE, [BUSY] * 8, IDLE) == []
    assert report(GOOD, IDLE, [BUSY] * 8, IDLE) == 0
    output = capsys.readouterr().out
    assert "requests 5: finished 2, disconnected 2, statuses {200: 3, 429: 1, 0: 1}" in output
    assert "p99 / p50 = 3.00" in output and output.endswith("verdict: good\n")


@pytest.mark.parametrize(
    "streams, samples, after, fault",
    [
        ([*GOOD, StreamResult(status=500, problem="it broke")], [BUSY], IDLE, "1 x it broke"),
        ([*GOOD, StreamResult(problem="connect: refused")], [BUSY], IDLE, "1 x connect: refused"),
        *((GOOD, [BUSY], {**IDLE, key: 4}, f"{key} left behind") for key in COUNTS),
        (GOOD, [BUSY] * 8, {**IDLE, "resident": 421}, "memory grew by 5.2%"),
        ([*GOOD, stream(0.5)], [BUSY], IDLE, "p99 of the gap is more than 4 times its median"),
        (GOOD[2:], [BUSY], IDLE, "no stream finished"),
    ],
)
def test_each_fault_is_detected(capsys, streams, samples, after, fault: str) -> None:
    assert faults(streams, IDLE, samples, after) == [fault]
    assert report(streams, IDLE, samples, after) == 1
    assert capsys.readouterr().out.endswith(f"verdict: {fault}\n")


def test_memory_growth_is_measured_from_the_middle_of_the_run() -> None:
    rising = [{**BUSY, "resident": resident} for resident in (100, 200, 300, 400, 400, 400, 400, 400)]
    assert faults(GOOD, IDLE, rising, IDLE) == []
    assert faults(GOOD, IDLE, rising[:4], IDLE) == ["memory grew by 100.0%"]


def test_quantiles_cover_all_gaps() -> None:
    assert quantiles([stream(*([0.01] * 90), *([0.05] * 10))]) == pytest.approx({"p50": 10, "p90": 50, "p99": 50})
