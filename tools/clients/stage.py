"""Helpers for all clients: a server, a virtual environment, a record of checks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_SECONDS = 120.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True)
class Server:
    address: str
    model: str
    tokenizer: Path  # a folder that transformers can read

    @property
    def base(self) -> str:
        return f"{self.address}/v1"

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request without a client library, for comparison."""
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)


@dataclass
class Record:
    """The checks of one client."""

    client: str
    lines: list[tuple[str, bool, str]] = field(default_factory=list)

    def note(self, check: str, passed: bool, detail: object = "") -> None:
        self.lines.append((check, passed, " ".join(str(detail).split())))

    @property
    def passed(self) -> bool:
        return bool(self.lines) and all(passed for _, passed, _ in self.lines)

    def table(self) -> str:
        width = max((len(check) for check, _, _ in self.lines), default=0)
        rows = [f"{'ok' if passed else 'NO'}  {check:<{width}}  {detail}" for check, passed, detail in self.lines]
        return "\n".join([self.client, *(row.rstrip() for row in rows)])


@dataclass(frozen=True)
class Environment:
    """A virtual environment for clients, made when it is first needed."""

    folder: Path

    def install(self, *packages: str) -> None:
        if not self.folder.exists():
            subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
        stamp = self.folder / f".has-{'-'.join(packages)}"
        if not stamp.exists():
            subprocess.run([self.command("pip"), "install", "-q", *packages], check=True)
            stamp.touch()

    def command(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def run(self, *arguments: object, extra: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Return the output of the client; raise ClientError with its message if it fails."""
        environment = {**os.environ, **OFFLINE, "PYTHONUNBUFFERED": "1", **(extra or {})}
        name, *rest = map(str, arguments)
        done = subprocess.run([self.command(name), *rest], env=environment, cwd=cwd, capture_output=True, text=True)
        if done.returncode:
            raise ClientError(f"`{name}` ended with {done.returncode}: {done.stderr[-2000:] or done.stdout[-2000:]}")
        return done.stdout


class ClientError(Exception):
    """The client failed."""


@contextmanager
def serving(model: str, scratch: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """Run `outrider serve` in a process, on a free port."""
    tokenizer = export_tokenizer(model, scratch)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "outrider", "serve", model, "--port", str(port), "--no-log-requests", *flags]
    with (scratch / "server.log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    server = Server(f"http://127.0.0.1:{port}", model, tokenizer)
    try:
        wait_for(server, process)
        yield server
    finally:
        process.terminate()
        if process.wait(60) != 0:
            raise ClientError(f"the server ended with {process.returncode}: see {scratch / 'server.log'}")


def wait_for(server: Server, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.address}/health").close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise ClientError("the server did not start: see server.log")


def export_tokenizer(model: str, scratch: Path) -> Path:
    """Write the model's tokenizer to a folder, for clients that count tokens and cannot read GGUF."""
    folder = scratch / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        from outrider.tokenizer.loading import read_folder, read_gguf
        from outrider.weights import open_checkpoint

        source = open_checkpoint(model).tokenizer_source
        parts = read_folder(source) if isinstance(source, Path) else read_gguf(source)
        folder.mkdir(parents=True, exist_ok=True)
        parts.backend.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": parts.eos, "pad_token": parts.eos}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
