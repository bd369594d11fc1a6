"""Processes to be killed: they serve, train or pull, and tell how far they are.

Some die by themselves, at a chosen change of the disk. They come from a server of forks that has read torch already, so
that a life costs little.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import resource
import signal
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TIMEOUT = 120.0
PARTS = tuple(bytes([number]) * 3_000_000 for number in (1, 2))  # of a model to be pulled

forks = multiprocessing.get_context("forkserver")
# `torch._dynamo` is what an optimiser of torch reads when it is first made, and that takes longest.
READ = [
    "torch._dynamo",
    "outrider.train.run",
    "outrider.cli.serve",
    "outrider.server.app",
    "outrider.speculation.methods.suffix",
]
forks.set_forkserver_preload(READ)


@contextmanager
def life(work: Callable[..., None], *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that does the work, and the line on which it tells how far it is; dead when the block ends."""
    hears, tells = forks.Pipe(duplex=False)
    process = forks.Process(target=work, args=(tells, *arguments), daemon=True)
    process.start()
    tells.close()
    try:
        yield process, hears
    finally:
        process.kill()
        process.join(TIMEOUT)
        hears.close()


def news(hears: Connection) -> Iterator[Any]:
    """What a life tells until it is over; at last, if it came to its end, how often it changed the disk."""
    try:
        while hears.poll(TIMEOUT):
            yield hears.recv()
    except (EOFError, OSError):
        return


# ---- how it ends ----


@dataclass(frozen=True)
class Fate:
    """Death at a change of the disk, or never; or in the middle of the first long write from there on."""

    at: int = 0  # the number of the change; 0: never
    torn: bool = False


ENDS = (-signal.SIGKILL, -signal.SIGXFSZ)
CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"}
LONGEST = 64  # bytes that still can be written when a write is to be torn


class Doom:
    """Counts what this process changes below a folder, and ends it when its time has come."""

    def __init__(self, fate: Fate, folder: str) -> None:
        self.fate, self.folder, self.changes = fate, folder, 0
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python would make an error of it
        sys.addaudithook(self.watch)

    def watch(self, event: str, given: tuple[Any, ...]) -> None:
        if event not in CHANGES or not str(given[0]).startswith(self.folder):
            return
        if event == "open" and not given[2] & (os.O_WRONLY | os.O_RDWR):
            return
        self.changes += 1
        if self.changes == self.fate.at and self.fate.torn:
            appends = event == "open" and given[2] & os.O_APPEND
            known = Path(given[0]).stat().st_size if appends and Path(given[0]).exists() else 0
            resource.setrlimit(resource.RLIMIT_FSIZE, (known + LONGEST, resource.RLIM_INFINITY))
        elif self.changes == self.fate.at:
            os.kill(os.getpid(), signal.SIGKILL)


# ---- what is done there ----


def serve(tells: Connection, model: str, port: int, most: float) -> None:
    """most: tokens after which the engine stands still, so that streams are not finished when the kill comes."""
    from outrider.cli import app
    from outrider.engine import Engine

    quieten()
    step, made = Engine.step, dict[str, int]()

    def limited(self: Any, *arguments: Any) -> Any:
        if sum(made.values()) >= most:
            time.sleep(3600)
        outputs = step(self, *arguments)
        made.update({output.request_id: len(output.completions[0].token_ids) for output in outputs})
        return outputs

    Engine.step = limited  # type: ignore[method-assign]
    tells.send("begun")
    options = ["--backend", "cpu", "--max-requests", "3", "--served-model-name", "tiny", "--no-log-requests"]
    app(["serve", model, "--port", str(port), "--speculate", "suffix:adaptive=no", *options])


def train(tells: Connection, flags: dict[str, Any], methods: list[str], fate: Fate) -> None:
    import torch

    from outrider.train.data import answers
    from outrider.train.job import Job
    from outrider.train.loop import Cadence
    from outrider.train.methods import parse
    from outrider.train.progress import TextProgress
    from outrider.train.run import run

    quieten()
    torch.set_num_threads(1)
    doom = Doom(fate, str(flags["out"]))
    answers.FLUSH_SECONDS = 0.0  # what is written is on the disk at once, and so is every step
    cadence = Cadence(log_every=1, evaluate_every=4, save_every=0.0)
    assert run(Job(methods=parse(methods), **flags), TextProgress(), cadence).finished
    tells.send(doom.changes)


def pull(tells: Connection, cache: str, fate: Fate) -> None:
    from outrider import catalog

    def fetch(package: str, version: str, folder: Path, tick: Callable[[int], None]) -> None:
        """Writes the wheel piece by piece, as a download does."""
        number = int(package[-1])
        made = folder / "tmp" / "wheel"
        made.parent.mkdir()
        with zipfile.ZipFile(made, "w") as wheel:
            wheel.writestr(f"part{number}", PARTS[number])
        content = made.read_bytes()
        with (folder / f"{package}-{version}-py3-none-any.whl").open("wb") as out:
            for at in range(0, len(content), 500_000):
                out.write(content[at : at + 500_000])
                time.sleep(0.001)

    os.environ["OUTRIDER_CACHE"] = cache
    tells.send("begun")
    doom = Doom(fate, cache)
    catalog.pull("tiny", fetch=fetch, entries={"tiny": entry()}, progress=lambda done, total, label: None)
    tells.send(doom.changes)


def entry() -> Any:
    from outrider.catalog import CatalogEntry, WheelPart

    whole = b"".join(PARTS)
    parts = tuple(WheelPart(f"tiny-{number}", "1.0", f"part{number}", len(part)) for number, part in enumerate(PARTS))
    return CatalogEntry("tiny.gguf", len(whole), hashlib.sha256(whole).hexdigest(), parts)


def quieten() -> None:
    """Discard the output of a child process."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
