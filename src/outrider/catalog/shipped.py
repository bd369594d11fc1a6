"""Draft heads that ship with the package: `heads/MODEL/METHOD`, listed with their hashes in `heads/index.json`.

A head is a folder; a draft model is a GGUF file in it. Heads are for models of the catalog, which may be given by name
or as a file anywhere on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from .entries import CATALOG
from .names import split_parts
from .pulling import known_hash
from .pulling import path as catalog_path

FOLDER = Path(__file__).parent.parent / "heads"
INDEX = "index.json"
CARD = "card.json"  # beside the weights: how the head was trained, and for which target
REINSTALL = "install outrider again"


@dataclass(frozen=True)
class ShippedFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShippedHead:
    model: str  # catalog name of the target
    target_bytes: int  # size of the target's file
    target_sha256: str
    method: str
    files: tuple[ShippedFile, ...]


def find(model: str | Path, method: str) -> Path | None:
    """Return the shipped head folder or draft model file of `method` for `model`, as the user names it; else None."""
    candidates = [entry for entry in entries() if entry.method == method]
    entry = next((entry for entry in candidates if _is_target(model, entry)), None)
    return None if entry is None else _checked(entry)


def methods_for(model: str | Path) -> tuple[str, ...]:
    """Return the methods for which a head or draft model of `model` ships."""
    return tuple(entry.method for entry in entries() if _is_target(model, entry))


def entries() -> tuple[ShippedHead, ...]:
    """List the shipped heads; empty if there is no index."""
    try:
        listed = json.loads((FOLDER / INDEX).read_text())["heads"]
        return tuple(
            ShippedHead(**{**each, "files": tuple(ShippedFile(**file) for file in each["files"])}) for each in listed
        )
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"`{FOLDER / INDEX}`, which lists the heads that ship, is damaged: {REINSTALL}") from None


def _is_target(model: str | Path, entry: ShippedHead) -> bool:
    """Return True if `model` is the target: by name, as the file in the cache, or as a copy with the same hash."""
    if str(model) in CATALOG:
        return str(model) == entry.model
    path = Path(model).expanduser()
    try:
        if not path.exists():
            return known_hash(str(model)) == entry.target_sha256
        if not path.is_file():
            return False
        if entry.model in CATALOG and path.resolve() == catalog_path(entry.model).resolve():
            return True
        return path.stat().st_size == entry.target_bytes and digest(path) == entry.target_sha256
    except OSError:  # the name is too long for a file, or the file is not readable
        return False


def _checked(entry: ShippedHead) -> Path:
    folder = FOLDER / entry.model / entry.method
    for file in entry.files:
        path = folder / file.name
        try:
            intact = path.stat().st_size == file.bytes and digest(path) == file.sha256
        except OSError as error:
            raise UserError(f"cannot read `{path}`, which ships with outrider: {error.strerror}; {REINSTALL}") from None
        if not intact:
            raise UserError(f"`{path}`, which ships with outrider, is damaged: {REINSTALL}")
    model = next((file.name for file in entry.files if file.name.endswith(".gguf")), "")
    return folder / model


def target_record(model: str | Path, path: Path) -> dict[str, Any]:
    """Return the target's entry in a card: name, size and hash of the weights at `path`, a file or a folder."""
    known = CATALOG.get(str(model))
    sha256 = (known.sha256 if known is not None else "") or digest(path)
    return {"model": str(model), "bytes": file_bytes(path), "sha256": sha256}


def file_bytes(path: Path) -> int:
    """Return the size of a model's weight files."""
    return sum(file.stat().st_size for file in _weights(path))


def digest(path: Path) -> str:
    """Return the sha256 of a file; for a folder, of the hashes of its weight files."""
    if path.is_dir():
        return hashlib.sha256("".join(map(digest, _weights(path))).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))
    return [Path(part) for part in split_parts(str(path))]


def write_index(folder: Path) -> None:
    """Write the index of the heads under `folder`, as MODEL/METHOD/files."""
    heads = [asdict(entry) for entry in _listed(folder)]
    text = json.dumps({"heads": heads}, indent=2) + "\n"
    (folder / INDEX).write_text(text)


def _listed(folder: Path) -> Iterator[ShippedHead]:
    for head in sorted(folder.glob("*/*/")):
        model = head.parent.name
        if model not in CATALOG:
            raise UserError(
                f"`{head}` is for a model that is not in the catalog: name its parent folder after one that is"
            )
        files = (ShippedFile(file.name, file.stat().st_size, digest(file)) for file in sorted(head.iterdir()))
        entry = CATALOG[model]
        yield ShippedHead(model, entry.size, entry.sha256, head.name, tuple(files))
