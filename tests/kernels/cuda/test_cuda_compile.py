"""The kernels compile for a GPU that is not there: Triton's interpreter accepts what its compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider.kernels.cases import CASES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
SCRIPT = Path(__file__).with_name("compile_kernels.py")
OPERATIONS = sorted({case.op for case in CASES} - {"record"})  # `record` launches nothing


def compiled(operation: str, count: int, cache: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, SCRIPT, str(count), operation], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert operation in done.stdout


def test_gated_matmuls_compile(tmp_path: Path) -> None:
    compiled("mlp", 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_compiles(operation: str, tmp_path: Path) -> None:
    compiled(operation, 3, tmp_path)
