"""Import the engine once, then fork for every command that a client sends: `outrider ...` and `python ...`.

Arguments: the address to listen at, the folder of shipped heads, NAME=PATH for each model of the catalog.
`outrider serve` is stopped as soon as it is healthy, unless SNIPPET_PORT is set: then other snippets use that server.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
import urllib.request
from pathlib import Path
from typing import Any

import outrider
import outrider.cli
from outrider import catalog
from outrider.catalog import shipped

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HEALTH_SECONDS = 30.0  # time for a server to become healthy
NOT_IMPORTED = ("outrider.kernels.cuda", "outrider.scale", "outrider.bench.peers.worker", "outrider.__main__")


def main(address: str, heads: str, *models: str) -> None:
    # An installed command does not find the modules of the repository: leave only the package importable.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() not in (ROOT, HERE)]
    known = {name: Path(path) for name, _, path in (model.partition("=") for model in models)}
    catalog.pull = lambda name, **options: known[name]  # type: ignore[assignment]
    shipped.FOLDER = Path(heads)
    import_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        while True:
            link, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                run_command(link)
            link.close()


def import_all() -> None:
    """Import every module once; no kernel runs, so that no thread is lost in a fork."""
    root = Path(outrider.__path__[0])
    for path in sorted(root.rglob("*.py")):
        module = ".".join(("outrider", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        if not module.startswith(NOT_IMPORTED):
            importlib.import_module(module)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert perform("outrider", ["pull", next(iter(catalog.CATALOG)), "--json"]) == 0


def run_command(link: socket.socket) -> None:
    """Run one command in a process of its own, and send its exit code back."""
    header, files, _, _ = socket.recv_fds(link, 4, 3)
    size, message = int.from_bytes(header, "big"), b""
    while len(message) < size:
        message += link.recv(size - len(message))
    name, arguments, folder, environment = json.loads(message)
    serves = name == "outrider" and arguments[:1] == ["serve"]
    port = environment.get("SNIPPET_PORT") or str(free_port())
    child = os.fork()
    if child == 0:
        link.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
        # The host may have written to a file: a new stream finds out that this one is a pipe, which cannot seek.
        sys.stdout = os.fdopen(1, "w", encoding=sys.stdout.encoding, closefd=False)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        os._exit(perform(name, [*without_port(arguments), "--port", port] if serves else arguments))
    if serves and "SNIPPET_PORT" not in environment:
        wait_until_healthy(port, child)
        os.kill(child, signal.SIGTERM)
    while not ended(child):
        if select.select([link], [], [], 0.01)[0]:  # the client is gone
            os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)
            os._exit(0)
    link.sendall(bytes([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255]))
    os._exit(0)


def ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def perform(name: str, arguments: list[str]) -> int:
    """Run a command line as a fresh process would, and return its exit code."""
    try:
        if name == "outrider":
            sys.argv = [name, *arguments]
            outrider.cli.main()
        else:
            interpret(arguments)
        code: Any = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code if isinstance(code, int) else int(code is not None)


def interpret(arguments: list[str]) -> None:
    kind, *rest = arguments
    sys.path.insert(0, "")
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "snippet", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


def without_port(arguments: list[str]) -> list[str]:
    if "--port" not in arguments:
        return arguments
    index = arguments.index("--port")
    return arguments[:index] + arguments[index + 2 :]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(port: str, child: int) -> None:
    end = time.monotonic() + HEALTH_SECONDS
    while time.monotonic() < end and not ended(child):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
