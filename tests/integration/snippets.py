"""Read the fenced blocks of the documents, and run them on a machine with a tiny model."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
HOST = Path(__file__).with_name("snippet_host.py")
FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- not run: ([^>]+?) -->\s*\Z")
RUNNING = ("bash", "python")
COMMANDS = ("outrider", "python")
# Client program: sends its command line and its three standard files to the host, and exits with the command's code.
CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as link:
    link.connect({address!r})
    message = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(link, [len(message).to_bytes(4, "big")], [0, 1, 2])
    link.sendall(message)
    sys.exit(link.recv(1)[0])
"""


@dataclass(frozen=True)
class Block:
    document: Path
    line: int
    language: str
    text: str
    reason: str  # why it is not run; empty if it runs

    @property
    def runs(self) -> bool:
        return self.language in RUNNING and not self.reason

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> list[Block]:
    """Return the fenced blocks of a document; a comment `<!-- not run: REASON -->` may precede one."""
    text = document.read_text()
    found = []
    for match in FENCE.finditer(text):
        mark = MARK.search(text[: match.start()])
        indent, language, inner = match.groups()
        content = re.sub(rf"^{indent}", "", inner, flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(document, line, language, content, mark[1] if mark else ""))
    return found


class Machine:
    """A shell whose `outrider` and `python` run in forks of a host process, so that they start at once."""

    def __init__(self, host: subprocess.Popen[bytes], path: str, environment: Mapping[str, str]) -> None:
        self.host = host
        self.environment = {**os.environ, **environment, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}

    def run(self, block: Block, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
        assert self.host.poll() is None, f"the host of the snippets ended with {self.host.returncode}"
        command = ["bash", "-euo", "pipefail", "-c", text] if block.language == "bash" else ["python", "-c", text]
        return subprocess.run(
            command,
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@contextmanager
def machine(folder: Path, models: Mapping[str, Path], heads: Path, **environment: str) -> Iterator[Machine]:
    """Start a host that has imported everything once and forks for each command.

    models: the entries of its catalog; heads: the folder of shipped heads.
    """
    address, programs = str(folder / "host"), folder / "bin"
    programs.mkdir()
    for name in COMMANDS:
        client = programs / name
        client.write_text(CLIENT.format(python=sys.executable, address=address, name=name))
        client.chmod(0o755)
    arguments = [address, str(heads), *(f"{name}={path}" for name, path in models.items())]
    quiet = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OUTRIDER_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables = {**os.environ, **quiet, **environment}
    log = folder / "host.log"
    with log.open("wb") as errors:
        process = subprocess.Popen([sys.executable, str(HOST), *arguments], env=variables, stderr=errors)
    try:
        while not Path(address).exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        yield Machine(process, str(programs), {**quiet, **environment})
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def copy_tree(source: Path, destination: Path) -> None:
    shutil.copytree(source, destination, dirs_exist_ok=True)
