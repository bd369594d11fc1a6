"""A grammar whose check sleeps for ten minutes in the worker's child, which no limit of time ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import outrider
from outrider.types import StructuredOutput

ENDLESS = StructuredOutput("regex", "(endless)+")
WORKER = f"""
import time
from outrider.structured_output import worker

def examine(backend, kind, text, examine=worker.examine):
    if text != {ENDLESS.text!r}:
        return examine(backend, kind, text)
    worker.limit()
    time.sleep(600)

worker.examine, worker.WALL_SECONDS = examine, 1e9
worker.main()
"""


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start such workers for compilers that have none yet."""
    monkeypatch.setattr("outrider.structured_output.checker.start_worker", start_worker)


def start_worker() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(Path(outrider.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
