"""Serve requests in a peer's process: `python serve.py WORKER.py` reads and writes one JSON object per line.

Imports only the standard library, since the environments of the peers have nothing else in common. WORKER.py defines
`Worker` with `open`, `complete` and optionally `prepare`. All peers are timed here, in the same way.
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
    """Exit with the parent: if it is killed while this process is stopped, nothing would resume it."""
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def load(path: str) -> Any:
    specification = importlib.util.spec_from_file_location("outrider_worker", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look up their types there
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
            reply = answer(worker, json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    die_with_parent()
    # Engines print to stdout: only this copy of it leads to the parent.
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.pop(0)  # this folder, which holds no modules to import
    serve(sys.argv[1], sys.stdin, private)
