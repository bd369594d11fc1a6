"""Native kernels in odd shapes, against the reference.

With OUTRIDER_ENDURANCE=1 there are more of them, with AddressSanitizer and UBSan in the kernels.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from outrider.kernels import reference
from outrider.kernels.cpu import _native

LONG = os.environ.get("OUTRIDER_ENDURANCE") == "1"
ROOT = Path(__file__).resolve().parents[2]
STRAY = """
import subprocess, sys
from pathlib import Path
sys.path.insert(0, {tools!r})
import fuzz_library
if sys.argv[1] == "outside":
    sys.exit(subprocess.run([sys.executable, __file__, "inside"], env=fuzz_library.environment()).returncode)
fuzz_library.use(next(Path({folder!r}).glob("_native*.so")))
import torch
from fuzz_memory import GuardedMemory
from outrider.kernels.cpu import _native
with GuardedMemory():
    x, weight, out = torch.ones(4, 64), torch.ones(64), torch.empty(3, 64)
_native.rms_norm(x.data_ptr(), weight.data_ptr(), 1e-6, 4, 64, out.data_ptr())
"""


@pytest.fixture
def fuzzer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    level, threads = _native.level_name(), _native.thread_count()
    yield importlib.import_module("fuzz_kernels")
    _native.choose_level(level)
    _native.set_thread_count(threads)


@pytest.mark.timeout(7200)
def test_odd_shapes(tmp_path: Path) -> None:
    """The whole of it lies in another process: what a sanitizer sees ends that one alone."""
    count = 1500 if LONG else 40
    command = [sys.executable, str(ROOT / "tools" / "fuzz_kernels.py"), "--cases", str(count)]
    command += ["--sanitize", str(ROOT / "build" / "sanitized")] if LONG else []
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.stdout, done.stderr[-6000:]
    found = json.loads(done.stdout)
    if LONG:
        sys.stdout.write(done.stdout)
    assert found["failures"] == [] and found["cases"] == count and done.returncode == 0
    assert found["operations"].get("refused", 0) < count // 10 and len(found["operations"]) >= 10
    if LONG:
        assert "heap-buffer-overflow" in stray(tmp_path / "stray.py")


def stray(script: Path) -> str:
    """What the sanitizer says of four rows that are written where there is room for three."""
    script.write_text(STRAY.format(tools=str(ROOT / "tools"), folder=str(ROOT / "build" / "sanitized")))
    found = subprocess.run([sys.executable, str(script), "outside"], capture_output=True, text=True)
    assert found.returncode != 0
    return found.stderr


def test_a_wrong_result_is_seen(fuzzer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cases, with a reference that means something else."""
    numbers = range(40)
    said = [fuzzer.attempt(number, 0) for number in numbers]
    assert not any(complaint for _, complaint in said)
    honest = reference.attend
    monkeypatch.setattr(reference, "attend", lambda q, *rest: honest(torch.zeros_like(q), *rest))
    complaints = [fuzzer.attempt(number, 0)[1] for number in numbers if said[number][0] == "attend"]
    assert sum("differs by" in complaint for complaint in complaints) >= len(complaints) // 2 > 0
