"""A peer's process, seen from ours: requests go in and answers come out as lines of JSON.

Between its turns a process is stopped, threads that would spin and all: only one of them computes at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .registry import WORKERS

SERVE = WORKERS / "serve.py"
GRACE = 5.0  # seconds to end by itself, once nothing more is asked
PATIENCE = 1800.0  # seconds for one answer: exports and compilers are slow
CHUNK = 1 << 16


class PeerFailedError(Exception):
    """A peer that died, complained or fell silent, in words for the table."""


@dataclass(frozen=True)
class Completed:
    tokens: list[list[int]]
    seconds: float


class Child:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """The process starts to run at once. log: what it writes beside its answers."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.begin = log, time.perf_counter()
        self.unread = b""
        with log.open("w") as complaints:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                env=dict(environment),
                start_new_session=True,  # so that it can be stopped, and counted, with its own children
            )

    @property
    def age(self) -> float:
        """Seconds since it was started."""
        return time.perf_counter() - self.begin

    def ask(self, action: str, patience: float = PATIENCE, **fields: Any) -> dict[str, Any]:
        """What the worker found, and the seconds that it took."""
        assert self.process.stdin is not None
        request = json.dumps({"do": action, **fields}) + "\n"
        try:
            self.process.stdin.write(request.encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailedError(self._last_words()) from None
        line = self._line(patience)
        try:
            answer = json.loads(line)
        except ValueError:
            raise PeerFailedError(f"it answered `{line.decode(errors='replace')[:80]}`, which is no JSON") from None
        if "error" in answer:
            raise PeerFailedError(f"{_gist(answer['error'])} (see `{self.log}`)")
        return dict(answer)

    def complete(self, prompts: Sequence[Sequence[int]], tokens: int, width: int | None) -> Completed:
        answer = self.ask("complete", prompts=[list(prompt) for prompt in prompts], tokens=tokens, width=width)
        lengths = [len(text) for text in answer["found"]]
        if lengths != [tokens] * len(prompts):
            raise PeerFailedError(f"it wrote {lengths} tokens, and {tokens} for each of {len(prompts)} were asked")
        return Completed(answer["found"], answer["seconds"])

    def _line(self, patience: float) -> bytes:
        assert self.process.stdout is not None
        source, end = self.process.stdout.fileno(), time.monotonic() + patience
        while b"\n" not in self.unread:
            ready, _, _ = select.select([source], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise PeerFailedError(f"it did not answer within {patience:.0f} seconds (see `{self.log}`)")
            piece = os.read(source, CHUNK)
            if not piece:
                raise PeerFailedError(self._last_words())
            self.unread += piece
        line, _, self.unread = self.unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        code = self.process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        said = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"its process ended with {how}{': ' if said else ''}{''.join(said[-1:])[:200]} (see `{self.log}`)"

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it died: whoever asks it next will hear of that
            os.killpg(self.process.pid, number)

    def memory(self) -> dict[str, int] | None:
        """Bytes that it and its own children have in memory now, and had at most; None where nobody can tell."""
        members = [folder for folder in Path("/proc").glob("[0-9]*") if _session(folder) == self.process.pid]
        found = [_memory(folder) for folder in members]
        if not any(resident for resident, _ in found):
            return None
        return {"resident": sum(one[0] for one in found), "peak": sum(one[1] for one in found)}

    def close(self) -> None:
        """Also for one that hangs or is stopped."""
        self.resume()
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def _gist(error: str) -> str:
    """The last line of an error: what comes before says where it came through."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return (lines or ["it failed without a word"])[-1].rstrip(".")[:300]


def _session(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, ValueError, IndexError):  # it ended while we looked
        return 0


def _memory(folder: Path) -> tuple[int, int]:
    try:
        lines = (folder / "status").read_text().splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.partition(":")[::2] for line in lines)
    resident, peak = (int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return resident, peak
