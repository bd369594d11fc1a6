"""Files that outlive a crash, and how JSON is written into them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


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
