"""The cache of models: its folders, the record beside each file, locks, free space.

`models/NAME/FILE` are models of the catalog, `hub/ORG/NAME/FILE` GGUF files of the hub, `urls/HOST/KEY/FILE` those of
other addresses. Hub models with safetensors are in the cache of huggingface_hub, which other programs share.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..types import Progress

CHUNK = 1 << 20  # bytes read at once
MEGABYTE = 1_000_000
RECORD_SUFFIX = ".stamp"


class DiskFullError(UserError):
    """The disk is too full for a download."""


def cache_folder() -> Path:
    """Return the cache folder: OUTRIDER_CACHE, else the platform's."""
    chosen = os.environ.get("OUTRIDER_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "outrider"


def hub_path(repository: str) -> Path:
    """Return the folder of a hub repository's GGUF files, and of its lock."""
    return cache_folder() / "hub" / repository


@contextlib.contextmanager
def lock(folder: Path, progress: Progress | None = None, label: str = "") -> Iterator[None]:
    """Create `folder` and hold its lock. Without `progress`, do not wait: raise BlockingIOError if it is held."""
    path = folder / "lock"
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if progress is None:
                    raise
                progress(0, 0, f"waiting for another pull of {label}")
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_same_file(file.fileno(), path):
                yield
                return
            # The model was removed while this process waited: its lock file is gone, so lock the new one.


def _is_same_file(number: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except OSError:
        return False


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn errors of the disk into one of the user."""
    try:
        yield
    except OSError as error:
        where, advice = error.filename or folder, "make room, or " if error.errno == errno.ENOSPC else ""
        raise UserError(
            f"cannot write `{where}`: {error.strerror or error}; {advice}set `OUTRIDER_CACHE` to another folder"
        ) from None


def check_free_space(folder: Path, needed: int, what: str) -> None:
    """Refuse a download of `needed` bytes that the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DiskFullError(
            f"{what} needs {-(-needed // MEGABYTE):,} MB on the disk of `{folder}`, which has {free // MEGABYTE:,} MB "
            "free: make room, or set `OUTRIDER_CACHE` to a folder on another disk"
        )


def digest(path: Path, progress: Progress, label: str) -> str:
    """Return the sha256 of a file."""
    total, found = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
            progress(file.tell(), total, label)
    return found.hexdigest()


# ---- the record beside a file ----


def record_path(path: Path) -> Path:
    return path.with_name(path.name + RECORD_SUFFIX)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of a file; empty if there is none that can be read."""
    try:
        found = json.loads(record_path(path).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_record(path: Path, sha256: str, **facts: object) -> None:
    """Record that a file was checked: while size and time of change match, it is not hashed again."""
    facts = {key: value for key, value in facts.items() if value}
    pulled = datetime.now(UTC).isoformat(timespec="seconds")
    with contextlib.suppress(OSError):  # if it cannot be written, the file is hashed every time
        record_path(path).write_text(json.dumps({**_state(path), "sha256": sha256, "checked": pulled, **facts}))


def is_valid(path: Path, sha256: str, size: int, verify: bool, progress: Progress) -> bool:
    """Return whether a file is complete and has its hash. It is hashed if it changed since the last check, or `verify`.

    sha256: the hash it must have; empty: the recorded one. size: in bytes; 0: any.
    """
    if not path.is_file() or (size and path.stat().st_size != size):
        return False
    record = read_record(path)
    expected = sha256 or str(record.get("sha256", ""))
    if not expected:
        return False
    unchanged = {key: record.get(key) for key in ("size", "mtime_ns", "sha256")} == {
        **_state(path),
        "sha256": expected,
    }
    if unchanged and not verify:
        return True
    if digest(path, progress, f"checking {path.name}") != expected:
        return False
    facts = {key: value for key, value in record.items() if key not in ("size", "mtime_ns", "sha256", "checked")}
    write_record(path, expected, **facts)
    return True


def _state(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
