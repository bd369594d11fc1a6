"""Damaged GGUF files, safetensors folders and draft heads: refused in one sentence, or loaded and generating.

Some hundred of them; with OUTRIDER_ENDURANCE=1 ten thousand. tools/fuzz_checkpoints.py says how a case is repeated.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from damaged_samples import write_samples

from outrider.errors import UserError

LONG = os.environ.get("OUTRIDER_ENDURANCE") == "1"
CASES = int(os.environ.get("OUTRIDER_ENDURANCE_CASES", "10000" if LONG else "180"))
TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"))


@pytest.fixture
def fuzzer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("fuzz_checkpoints")


@pytest.mark.timeout(7200)
def test_damaged_checkpoints_are_refused_or_load(samples: Path) -> None:
    command = [sys.executable, str(TOOLS / "fuzz_checkpoints.py"), str(samples), "--cases", str(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = json.loads(done.stdout)
    if LONG:
        sys.stdout.write(done.stdout)
    assert found["failures"] == [] and found["cases"] == CASES
    assert set(found["results"]) == {"gguf", "head", "safetensors"}
    for results in found["results"].values():  # damage that is always noticed, or never, would test little
        assert min(results["refused"], results["loaded"]) >= CASES // 40


def test_a_case_is_its_seed_and_its_number(samples: Path, fuzzer: ModuleType, tmp_path: Path) -> None:
    listed = json.loads(samples.read_text())
    changed = 0
    for number in range(12):
        copies = []
        for attempt in range(2):
            scratch = tmp_path / f"{number}-{attempt}"
            scratch.mkdir()
            random, sample = fuzzer.draw(listed, 0, number)
            copies.append(contents(fuzzer.prepare(random, sample, scratch)))
        assert copies[0] == copies[1]
        changed += copies[0] != contents(Path(sample["path"]))
    assert changed >= 11


def contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: file.read_bytes() for file in files}


def refuse_badly() -> None:
    raise UserError("it is damaged.")


def run_out_of_memory() -> None:
    try:
        raise MemoryError
    except MemoryError as error:
        raise UserError("too little memory: lower `cache_tokens`") from error


def stumble() -> None:
    raise KeyError("rope_theta")


FAILURES: dict[str, Callable[[], None]] = {
    "unreadable": refuse_badly,
    "runaway": run_out_of_memory,
    "crashed": stumble,
    "loaded": lambda: None,
}


@pytest.mark.parametrize("result", FAILURES)
def test_what_is_wrong_is_seen(
    result: str, samples: Path, fuzzer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzer, "generate", lambda *_: FAILURES[result]())
    found, _ = fuzzer.attempt(Random(0), json.loads(samples.read_text())[0], tmp_path)
    assert found == result


WORKER = """
import faulthandler, json, os, signal, sys, time
first, count = int(sys.argv[-3]), int(sys.argv[-1])
for number in range(first, first + count):
    if number == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 4:
        faulthandler.dump_traceback_later(0.1, exit=True)
        time.sleep(60)
    line = {"number": number, "kind": "x", "result": "refused", "said": "", "bytes": 0, "seconds": 0}
    print(json.dumps(line), flush=True)
"""


def test_a_lost_worker_is_named_and_replaced(fuzzer: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    lines: list[dict[str, Any]] = list(fuzzer.run_worker([sys.executable, str(script)], range(6)))
    assert [line["number"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert lines[2]["result"] == "died (-11)" and lines[4]["result"] == "hung"
    report = fuzzer.report(lines, 1.0)
    assert [failure["number"] for failure in report["failures"]] == [2, 4]
