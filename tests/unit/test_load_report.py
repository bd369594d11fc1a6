"""The judge of the load test: it finds each thing that a server must not do, and nothing in a good one."""

from __future__ import annotations

import pytest

from load_report import COUNTS, Heard, faults, quantiles, report

QUIET = {**dict.fromkeys(COUNTS, 0), "tasks": 3, "resident": 400}
BUSY = {**dict.fromkeys(COUNTS, 20), "resident": 400}


def stream(*gaps: float) -> Heard:
    at = [sum(gaps[:count]) for count in range(len(gaps) + 1)]
    return Heard(status=200, tokens=len(at), chunks=at, finished=True)


GOOD = [stream(0.1, 0.1, 0.3), stream(0.1), Heard(status=200), Heard(status=429, problem="the queue is full"), Heard()]


def test_a_good_server_is_called_good(capsys) -> None:
    assert faults(GOOD, QUIET, [BUSY] * 8, QUIET) == []
    assert report(GOOD, QUIET, [BUSY] * 8, QUIET) == 0
    told = capsys.readouterr().out
    assert "requests 5: finished 2, hung up 2, statuses {200: 3, 429: 1, 0: 1}" in told
    assert "p99 / p50 = 3.00" in told and told.endswith("verdict: good\n")


@pytest.mark.parametrize(
    "heard, samples, after, fault",
    [
        ([*GOOD, Heard(status=500, problem="it broke")], [BUSY], QUIET, "1 x it broke"),
        ([*GOOD, Heard(problem="connect: refused")], [BUSY], QUIET, "1 x connect: refused"),
        *((GOOD, [BUSY], {**QUIET, key: 4}, f"{key} left behind") for key in COUNTS),
        (GOOD, [BUSY] * 8, {**QUIET, "resident": 421}, "memory grew by 5.2%"),
        ([*GOOD, stream(0.5)], [BUSY], QUIET, "p99 of the gap is more than 4 times its median"),
        (GOOD[2:], [BUSY], QUIET, "no stream came to its end"),
    ],
)
def test_each_fault_is_found_alone(capsys, heard, samples, after, fault: str) -> None:
    assert faults(heard, QUIET, samples, after) == [fault]
    assert report(heard, QUIET, samples, after) == 1
    assert capsys.readouterr().out.endswith(f"verdict: {fault}\n")


def test_memory_is_compared_with_the_middle_of_the_time() -> None:
    rising = [{**BUSY, "resident": resident} for resident in (100, 200, 300, 400, 400, 400, 400, 400)]
    assert faults(GOOD, QUIET, rising, QUIET) == []
    assert faults(GOOD, QUIET, rising[:4], QUIET) == ["memory grew by 100.0%"]


def test_quantiles_are_of_all_gaps_together() -> None:
    assert quantiles([stream(*([0.01] * 90), *([0.05] * 10))]) == pytest.approx({"p50": 10, "p90": 50, "p99": 50})
