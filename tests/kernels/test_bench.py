"""The kernel benchmark: every level against the reference, within its time limit."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from outrider.bench.kernels import rows
from outrider.kernels import cpu
from outrider.kernels.cases import CASES, layers


def test_each_level_is_timed_and_checked() -> None:
    before = cpu.facts()
    chosen = [layers.linear("q8_0", 1, 64, 256), layers.rms_norm(2, 64)]
    results = rows("cpu", 0.05, chosen)
    assert [(one.op, one.level) for one in results] == [(case.op, name) for case in chosen for name in before["levels"]]
    for one in results:
        assert one.seconds > 0
        assert one.error <= one.tolerance
        assert one.speedup == one.reference_seconds / one.seconds
    assert results[0].gigabytes_per_second == pytest.approx(64 * 8 * 34 / results[0].seconds / 1e9)
    assert results[-1].gigabytes_per_second is None
    assert cpu.facts() == before


def test_the_reference_is_a_backend_too() -> None:
    (one,) = rows("reference", 0.01, [layers.rms_norm(2, 64)])
    assert (one.level, one.error) == ("torch", 0.0)


def test_the_benchmark_keeps_to_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(step=0.001)  # each time that it is read
    monkeypatch.setattr("outrider.bench.kernels.time", SimpleNamespace(perf_counter=clock.__next__))
    rows("cpu", 0.3, [layers.rms_norm(1, 64)])
    assert 0.3 <= next(clock) < 0.4


def test_every_operation_that_costs_time_is_timed() -> None:
    assert {"linear", "attend", "mlp", "sample", "top_logprobs"} <= {case.op for case in CASES if case.timed}
