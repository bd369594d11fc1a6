"""Files and folders that survive a crash: a reader finds the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from ...catalog.shipped import CARD
from ...errors import UserError


def write_synced(file: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file and sync its content. The name of a new file is safe once its folder is synced."""
    with file.open("wb") as out:
        for part in parts:
            out.write(part)
        out.flush()
        os.fsync(out.fileno())


def write_whole(file: Path, content: bytes | memoryview) -> None:
    """Replace a file atomically. If the disk is full, the old content stays."""
    temporary = file.with_name(file.name + ".new")
    try:
        write_synced(temporary, [content])
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Sync the names of the files in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def as_json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def as_read(value: Any) -> Any:
    """Return a value as it is after a round trip through JSON."""
    return json.loads(json.dumps(value))


CONFIG, WEIGHTS = "config.json", "model.safetensors"
Content = bytes | Iterable[bytes]
EXPORT_FILES = {CONFIG, WEIGHTS, CARD}


def write_folder(folder: Path, files: Mapping[str, Content]) -> None:
    """Write a folder with exactly these files, and replace an older export once all are on the disk."""
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{state}") for state in ("new", "old"))
    try:
        _refuse_other_files(folder, EXPORT_FILES | files.keys())
        _sweep(folder)
        new.mkdir(parents=True)
        for name, content in files.items():
            write_synced(new / name, [content] if isinstance(content, bytes) else content)
        _try_sync(new)
        _swap(new, folder, old)
        _try_sync(folder.parent)
    except OSError as error:
        raise UserError(
            f"cannot write `{folder}` ({error.strerror}), its old content is intact: make room, or pass another folder"
        ) from None
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove leftovers of a killed process; restore the old export if it had just been moved aside."""
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        owner, _, state = leftover.name.removeprefix(f".{folder.name}.").partition(".")
        if state not in ("new", "old") or not owner.isdecimal() or _runs(int(owner)):
            continue
        if state == "old" and not folder.exists():
            leftover.rename(folder)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _runs(process: int) -> bool:
    """Return whether another process with this id runs. Our own id in a leftover is that of an earlier process."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()


def _swap(new: Path, folder: Path, old: Path) -> None:
    if not folder.exists():
        new.rename(folder)
        return
    folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _refuse_other_files(folder: Path, known: Iterable[str]) -> None:
    """Refuse to replace a folder that is not an export."""
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(present.difference(known))
    if others or (folder.exists() and not folder.is_dir()):
        problem = f"holds `{others[0]}`, which no export has" if others else "is a file"
        raise UserError(f"`{folder}` {problem}: pass another folder")


def _try_sync(folder: Path) -> None:
    """Sync a folder where the file system supports it."""
    with contextlib.suppress(OSError):
        sync_folder(folder)


def as_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialize tensors; those that share memory are stored twice."""
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(copies, {"format": "pt"})
