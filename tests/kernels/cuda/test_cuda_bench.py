"""The kernel benchmark on the Triton backend: inputs of the host are taken to the device, results are checked."""

from __future__ import annotations

from outrider.bench.kernels import rows
from outrider.kernels.cases import layers


def test_the_kernels_are_timed_and_checked() -> None:
    chosen = [layers.rms_norm(2, 64), layers.linear("f32", 2, 32, 64)]
    results = rows("cuda", 0.01, chosen)
    assert [(one.op, one.level) for one in results] == [("rms_norm", "triton"), ("linear", "triton")]
    for one, case in zip(results, chosen, strict=True):
        assert one.seconds > 0
        assert one.error <= one.tolerance == case.loose
