"""The kernels compile for GPUs that are not there: Triton's interpreter accepts what its compiler refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
SCRIPT = Path(__file__).with_name("compile_kernels.py")


def report(*arguments: str) -> dict[str, Any]:
    """Return what compile_kernels.py found."""
    settings = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], env={**os.environ, **settings}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any]) -> None:
    assert not found["refused"], "\n\n".join(found["refused"][:5])
    assert not found["too_large"], "\n".join(found["too_large"])
    assert not found["silent"], f"these cases launch no kernel: {found['silent']}"
    assert not found["missing"], f"no case launches these functions: {found['missing']}"


def test_every_kernel_compiles() -> None:
    check(report("90"))


def test_matmuls_load_weights_before_they_wait_and_states_after() -> None:
    """A wait too late would be slow, one too early would read states that the kernel before has not written."""
    found = report("90", "--loads")["loads"]
    assert len({each.split()[0] for each in found}) == 2, "not both kernels, of floats and of quantized matrices"
    for variant, (weights, *between, states) in found.items():
        assert weights > 0 and states > 0, variant
        assert all(count == states + weights for count in between), variant


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "86", "89", "90", "100", "120"])
def test_every_variant_fits_shared_memory(capability: str) -> None:
    check(report(capability, "--shared"))
