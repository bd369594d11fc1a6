"""What runs in a peer's process: `python serve.py WORKER.py` answers requests, one JSON object a line.

It knows the standard library alone, since it runs in environments that have nothing else in common. WORKER.py defines
`Worker` with `open`, `complete` and perhaps `prepare`. Time is taken here, so that it is taken alike for everyone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from typing import Any, TextIO

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def die_with_parent() -> None:
    """Whoever asks may be killed while this process is stopped, and then nobody would ever wake it."""
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def load(path: str) -> Any:
    specification = importlib.util.spec_from_file_location("outrider_worker", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # where dataclasses look for their types
    specification.loader.exec_module(module)
    return module.Worker()


def answer(worker: Any, request: dict[str, Any]) -> dict[str, Any]:
    action = request.pop("do")
    begin = time.perf_counter()
    found = getattr(worker, action)(**request)
    return {"found": found, "seconds": time.perf_counter() - begin}


def serve(path: str, requests: TextIO, answers: TextIO) -> None:
    worker = None
    for line in requests:
        try:
            worker = load(path) if worker is None else worker
            told = answer(worker, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            told = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(told) + "\n")
        answers.flush()


if __name__ == "__main__":
    die_with_parent()
    # Engines print what they like: only this copy of stdout leads to whoever asks.
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.pop(0)  # this folder, whose files are nobody's modules
    serve(sys.argv[1], sys.stdin, private)
