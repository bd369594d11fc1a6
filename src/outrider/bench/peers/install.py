"""Install each peer into an environment in the cache folder, once for each version of its recipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from ...errors import UserError
from ...weights.catalog import cache_folder
from .registry import Peer, PipStep

MARK = "outrider.json"  # in a finished environment: the recipe it was made from
LOG = "setup.log"
INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")  # refer to our own environment

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
        return Path(sys.executable)
    home = folder_of(peer)
    environment, recipe = home / "venv", _recipe(peer)
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
            _run([sys.executable, "-m", "venv", str(environment)], os.environ, log.fileno(), home)
            for step in peer.recipe:
                _install(step, environment, peer.build(), home, log.fileno())
        mark.write_text(recipe)
    except OSError as error:
        raise UserError(f"cannot write `{home}`: {(error.strerror or str(error)).lower()}") from error
    return environment / "bin" / "python"


def _recipe(peer: Peer) -> str:
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
    options += ["--constraint", str(_constraint(environment, home))]
    _run([str(python), "-m", "pip", "install", *options, *packages], {**outside(), **build}, log, home)


def _constraint(environment: Path, home: Path) -> Path:
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


def _run(command: list[str], environment: Mapping[str, str], log: int, home: Path) -> None:
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
