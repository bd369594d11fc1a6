"""The environment and the process of each peer.

A peer is installed into an environment in the cache folder, once for each version of its recipe. Its process gets
requests and sends replies as lines of JSON. A process is stopped with SIGSTOP between requests, spinning threads
included, so that only one computes at a time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...catalog import cache_folder
from ...errors import UserError
from .registry import Peer, PipStep

MARK = "outrider.json"  # in a finished environment: the recipe it was made from
LOG = "setup.log"
INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")  # refer to our own environment
GRACE = 5.0  # seconds that a process gets to exit after its input is closed
TIMEOUT = 1800.0  # seconds for one reply: exports and compilers are slow
CHUNK = 1 << 16  # bytes of one read from a process

# List the requirements of a package without some of them; run by the environment's own Python.
REST = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires(sys.argv[1]) or []:
    found = Requirement(line)
    if found.name.lower() not in sys.argv[2:] and (found.marker is None or found.marker.evaluate({"extra": ""})):
        found.marker = None
        print(found)
"""


class CannotInstallError(Exception):
    """A peer could not be installed; the message goes into the table."""


def folder_of(peer: Peer) -> Path:
    return cache_folder() / "peers" / peer.name


def install(peer: Peer, note: Callable[[str], None], again: bool = False) -> Path:
    """Return the Python that the peer's worker runs in; install the peer first if needed."""
    if not peer.recipe:
        if peer.module and importlib.util.find_spec(peer.module) is None:
            raise CannotInstallError(f"it is not installed beside Outrider: install `{peer.module}` for this torch")
        return Path(sys.executable)
    home = folder_of(peer)
    environment, recipe = home / "venv", recipe_text(peer)
    mark = environment / MARK
    if not again and mark.is_file() and mark.read_text() == recipe:
        return environment / "bin" / "python"
    compiles = any(step.compiled for step in peer.recipe)
    if compiles and not (shutil.which("c++") and shutil.which("cc")):
        raise CannotInstallError("it is compiled from source, and there is no C++ compiler: install one")
    note(f"setting up {peer.name} in {environment}" + (": compiling takes a while" if compiles else ""))
    try:
        shutil.rmtree(environment, ignore_errors=True)
        home.mkdir(parents=True, exist_ok=True)
        with (home / LOG).open("w") as log:
            run_logged([sys.executable, "-m", "venv", str(environment)], os.environ, log.fileno(), home)
            for step in peer.recipe:
                _install(step, environment, peer.build(), home, log.fileno())
        mark.write_text(recipe)
    except OSError as error:
        raise UserError(f"cannot write `{home}`: {(error.strerror or str(error)).lower()}") from error
    return environment / "bin" / "python"


def recipe_text(peer: Peer) -> str:
    """Return everything an environment depends on: the steps, the build options and the Python version."""
    made = {"python": sys.version, "steps": [asdict(step) for step in peer.recipe], "build": dict(peer.build())}
    return json.dumps(made, indent=1)


def _install(step: PipStep, environment: Path, build: Mapping[str, str], home: Path, log: int) -> None:
    python = environment / "bin" / "python"
    packages = list(step.packages)
    if step.rest_of:
        listed = subprocess.run(
            [str(python), "-c", REST, step.rest_of, *step.without], stdout=subprocess.PIPE, stderr=log, text=True
        )
        packages += listed.stdout.split("\n")[:-1]
    options = ["--disable-pip-version-check", "--no-input", *([] if step.dependencies else ["--no-deps"])]
    if step.compiled:
        # A wheel in pip's cache may have been compiled with other flags.
        options += ["--no-cache-dir", "--no-binary", ",".join(name.partition("=")[0] for name in packages)]
    options += ["--constraint", str(torch_constraint(environment, home))]
    run_logged([str(python), "-m", "pip", "install", *options, *packages], {**outside(), **build}, log, home)


def torch_constraint(environment: Path, home: Path) -> Path:
    """Write a constraints file that pins the installed torch, so that no requirement replaces its build."""
    installed = sorted(environment.glob("lib/python*/site-packages/torch-*.dist-info"))
    path = home / "constraints.txt"
    path.write_text(
        "".join(f"torch=={info.name.removesuffix('.dist-info').partition('-')[2]}\n" for info in installed[:1])
    )
    return path


def outside() -> dict[str, str]:
    """Return our environment variables without those that belong to our Python."""
    return {name: value for name, value in os.environ.items() if name not in INHERITED}


def run_logged(command: list[str], environment: Mapping[str, str], log: int, home: Path) -> None:
    """Run a command with its output in the log, and raise CannotInstallError if it fails."""
    begin = (home / LOG).stat().st_size
    done = subprocess.run(command, env=dict(environment), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    if done.returncode:
        output = (home / LOG).read_bytes()[begin:].decode(errors="replace")
        raise CannotInstallError(f"{reason(output.splitlines())} (see `{home / LOG}`)")


def reason(lines: list[str]) -> str:
    """Return pip's first error, else its last line of output."""
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    message = errors[:1] or [line.strip() for line in lines if line.strip()][-1:] or ["pip failed without a message"]
    return message[0].strip().rstrip(".")[:300]


class PeerFailedError(Exception):
    """A peer exited, reported an error or did not reply; the message goes into the table."""


@dataclass(frozen=True)
class Completed:
    tokens: list[list[int]]
    seconds: float


class Child:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start the process. log: file for its stderr."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.begin = log, time.perf_counter()
        self.unread = b""
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(environment),
                start_new_session=True,  # so that signals and memory accounting include its children
            )

    @property
    def age(self) -> float:
        """Return the seconds since the process was started."""
        return time.perf_counter() - self.begin

    def ask(self, action: str, timeout: float = TIMEOUT, **fields: Any) -> dict[str, Any]:
        """Send a request; return the worker's reply with its seconds."""
        assert self.process.stdin is not None
        request = json.dumps({"do": action, **fields}) + "\n"
        try:
            self.process.stdin.write(request.encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailedError(self._exit_reason()) from None
        line = self._line(timeout)
        try:
            reply = json.loads(line)
        except ValueError:
            raise PeerFailedError(f"it replied `{line.decode(errors='replace')[:80]}`, which is not JSON") from None
        if "error" in reply:
            raise PeerFailedError(f"{_last_line(reply['error'])} (see `{self.log}`)")
        return dict(reply)

    def complete(self, prompts: Sequence[Sequence[int]], tokens: int, width: int | None) -> Completed:
        reply = self.ask("complete", prompts=[list(prompt) for prompt in prompts], tokens=tokens, width=width)
        lengths = [len(text) for text in reply["found"]]
        if lengths != [tokens] * len(prompts):
            raise PeerFailedError(
                f"it generated {lengths} tokens instead of {tokens} for each of {len(prompts)} prompts"
            )
        return Completed(reply["found"], reply["seconds"])

    def _line(self, timeout: float) -> bytes:
        assert self.process.stdout is not None
        source, end = self.process.stdout.fileno(), time.monotonic() + timeout
        while b"\n" not in self.unread:
            ready, _, _ = select.select([source], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise PeerFailedError(f"it did not reply within {timeout:.0f} seconds (see `{self.log}`)")
            piece = os.read(source, CHUNK)
            if not piece:
                raise PeerFailedError(self._exit_reason())
            self.unread += piece
        line, _, self.unread = self.unread.partition(b"\n")
        return line

    def _exit_reason(self) -> str:
        code = self.process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"its process ended with {how}{': ' if lines else ''}{''.join(lines[-1:])[:200]} (see `{self.log}`)"

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it exited: the next request reports that
            os.killpg(self.process.pid, number)

    def memory(self) -> dict[str, int] | None:
        """Return current and peak resident bytes of the process and its children; None where /proc does not exist."""
        members = [folder for folder in Path("/proc").glob("[0-9]*") if _session(folder) == self.process.pid]
        sizes = [_memory(folder) for folder in members]
        if not any(resident for resident, _ in sizes):
            return None
        return {"resident": sum(size[0] for size in sizes), "peak": sum(size[1] for size in sizes)}

    def close(self) -> None:
        """End the process, also one that hangs or is stopped."""
        self.resume()
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def _last_line(error: str) -> str:
    """Return the last line of an error message: the lines before are a traceback."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return (lines or ["it failed without a message"])[-1].rstrip(".")[:300]


def _session(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, ValueError, IndexError):  # it exited meanwhile
        return 0


def _memory(folder: Path) -> tuple[int, int]:
    try:
        lines = (folder / "status").read_text().splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.partition(":")[::2] for line in lines)
    resident, peak = (int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return resident, peak
