"""Files that outlive a crash, and how JSON is written into them."""

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

from ...errors import UserError
from ...weights.shipped import CARD


def write_synced(file: Path, parts: Iterable[bytes | memoryview]) -> None:
    """What is written is on the disk when this returns; the name of a new file is once its folder is synced."""
    with file.open("wb") as out:
        for part in parts:
            out.write(part)
        out.flush()
        os.fsync(out.fileno())


def write_whole(file: Path, content: bytes | memoryview) -> None:
    """Other readers see the old content or the new one. Where the disk is full, the old one stays."""
    draft = file.with_name(file.name + ".new")
    try:
        write_synced(draft, [content])
        draft.replace(file)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """The name of a new file is safe only once its folder is."""
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
    """What JSON makes of it."""
    return json.loads(json.dumps(value))


CONFIG, WEIGHTS = "config.json", "model.safetensors"
Content = bytes | Iterable[bytes]
OURS = {CONFIG, WEIGHTS, CARD}


def write_folder(folder: Path, files: Mapping[str, Content]) -> None:
    """Put these files, and no others, where an older export may be."""
    draft, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{state}") for state in ("new", "old"))
    try:
        _refuse_strangers(folder, OURS | files.keys())
        _sweep(folder)
        draft.mkdir(parents=True)
        for name, content in files.items():
            write_synced(draft / name, [content] if isinstance(content, bytes) else content)
        _settle(draft)
        _swap(draft, folder, old)
        _settle(folder.parent)
    except OSError as error:
        raise UserError(
            f"cannot write `{folder}` ({error.strerror}): make room or pass another folder, what was there before is "
            "as it was"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Take away what a killed process left of its export; what it had just moved aside goes back."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        owner, _, state = left.name.removeprefix(f".{folder.name}.").partition(".")
        if state not in ("new", "old") or not owner.isdecimal() or _runs(int(owner)):
            continue
        if state == "old" and not folder.exists():
            left.rename(folder)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _runs(process: int) -> bool:
    """Whether another process of this number is there. Ours has only begun: the number is that of an earlier one."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()


def _swap(draft: Path, folder: Path, old: Path) -> None:
    if not folder.exists():
        draft.rename(folder)
        return
    folder.rename(old)
    try:
        draft.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _refuse_strangers(folder: Path, known: Iterable[str]) -> None:
    """Only an export may be replaced."""
    present = {each.name for each in folder.iterdir()} if folder.is_dir() else set()
    strangers = sorted(present.difference(known))
    if strangers or (folder.exists() and not folder.is_dir()):
        what = f"holds `{strangers[0]}`, which is of no export" if strangers else "is a file"
        raise UserError(f"`{folder}` {what}: pass another folder")


def _settle(folder: Path) -> None:
    """Not every file system knows how."""
    with contextlib.suppress(OSError):
        sync_folder(folder)


def as_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors that share memory are stored apart."""
    apart = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(apart, {"format": "pt"})
