"""Workers that stand in for other engines: scripts that serve a class of their own as `worker.py` serves an engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from outrider.bench.peers.environment import Child
from outrider.bench.peers.registry import WORKER, Peer

# Counts on from the last token of each prompt, and takes a while for each token.
COUNTS = """
import time

class Worker:
    def open(self, model, threads, context, batch, speculate):
        print("chatter on stdout")
        self.pause = 0.001 if speculate else 0.002
        self.turns = 0
        return {"version": "1.0", "weights": "none"}

    def complete(self, prompts, tokens, width):
        self.turns += 1
        time.sleep(self.pause * tokens * (width or 1))
        return [[(prompt[-1] + step) % 90 for step in range(1, tokens + 1)] for prompt in prompts]
"""
DIES = (
    COUNTS.replace("        self.turns += 1\n", "        self.turns += 1\n        self.fall(tokens)\n")
    + """
    def fall(self, tokens):
        import os, sys
        if tokens > 1:
            print("illegal instruction, it seems", file=sys.stderr, flush=True)
            os.kill(os.getpid(), 4)
"""
)
COMPLAINS = "class Worker:\n    def open(self, **_):\n        raise ValueError('deep inside\\n\\nno such layer.\\n')\n"
SHORT = COUNTS.replace("range(1, tokens + 1)", "range(1, 2)")
NO_DRAFTS = COUNTS.replace(
    "        self.turns = 0\n", "        assert not speculate, 'it has no such kernel'\n        self.turns = 0\n"
)


def worker(folder: Path, source: str, name: str = "counts") -> Path:
    path = folder / f"{name}_worker.py"
    path.write_text(
        f"import sys\nsys.path[0] = {str(WORKER.parent)!r}\nfrom worker import main\n{source}\nmain(Worker())\n"
    )
    return path


def peer(folder: Path, source: str, name: str = "counts", **fields: object) -> Peer:
    """It runs in our own environment and reads no weights."""
    chosen: dict[str, object] = {"weights": "given", "speculation": "lookup", "widths": (1, 30)} | fields
    return Peer(name, worker=worker(folder, source, name), **chosen)  # type: ignore[arg-type]


def child(folder: Path, source: str) -> Child:
    return Child([sys.executable, str(worker(folder, source))], os.environ, folder / "logs" / "it.log")


def opened(folder: Path, source: str) -> Child:
    found = child(folder, source)
    try:
        found.ask("open", model="", threads=1, context=64, batch=1, speculate=False)
    except BaseException:
        found.close()
        raise
    return found
