"""Draft heads that come with the package: `heads/MODEL/METHOD`, listed in `heads/index.json` with their hashes.

A head is a folder, a draft model a GGUF file in it. It is found for a model of the catalog, by its name or by its file,
wherever that lies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import catalog

FOLDER = Path(__file__).parent.parent / "heads"
INDEX = "index.json"
CARD = "card.json"  # beside the weights: how they were made, and for which target
AGAIN = "install outrider again"


@dataclass(frozen=True)
class File:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Shipped:
    model: str  # the target's name in the catalog
    target_bytes: int  # its file's
    target_sha256: str
    method: str
    files: tuple[File, ...]


def find(model: str | Path, method: str) -> Path | None:
    """What drafts for `model` by `method`: a head's folder, or a draft model's file; None where nothing ships.

    model: as the user named it.
    """
    candidates = [entry for entry in entries() if entry.method == method]
    entry = next((entry for entry in candidates if _is_target(model, entry)), None)
    return None if entry is None else _checked(entry)


def entries() -> tuple[Shipped, ...]:
    """All that ships; nothing where there is no index."""
    try:
        listed = json.loads((FOLDER / INDEX).read_text())["heads"]
        return tuple(Shipped(**{**each, "files": tuple(File(**file) for file in each["files"])}) for each in listed)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"`{FOLDER / INDEX}`, which lists the heads that ship, is damaged: {AGAIN}") from None


def _is_target(model: str | Path, entry: Shipped) -> bool:
    """By name; as the file that the catalog keeps; or as a copy of it, which has the same bytes."""
    if str(model) in catalog.CATALOG:
        return str(model) == entry.model
    path = Path(model).expanduser()
    try:
        if not path.is_file():
            return False
        if entry.model in catalog.CATALOG and path.resolve() == catalog.path(entry.model).resolve():
            return True
        return path.stat().st_size == entry.target_bytes and digest(path) == entry.target_sha256
    except OSError:  # a name too long to be a file's, or a file that may not be read
        return False


def _checked(entry: Shipped) -> Path:
    folder = FOLDER / entry.model / entry.method
    for file in entry.files:
        path = folder / file.name
        try:
            sound = path.stat().st_size == file.bytes and digest(path) == file.sha256
        except OSError as error:
            raise UserError(f"cannot read `{path}`, which ships with outrider: {error.strerror}; {AGAIN}") from None
        if not sound:
            raise UserError(f"`{path}`, which ships with outrider, is damaged: {AGAIN}")
    model = next((file.name for file in entry.files if file.name.endswith(".gguf")), "")
    return folder / model


def target_record(model: str | Path, path: Path) -> dict[str, Any]:
    """What a card says of the target: its name, and the size and hash of its weights at `path`, a file or a folder."""
    known = catalog.CATALOG.get(str(model))
    sha256 = known.sha256 if known is not None else digest(path)
    return {"model": str(model), "bytes": weigh(path), "sha256": sha256}


def weigh(path: Path) -> int:
    """Bytes of the weights of a model."""
    return sum(file.stat().st_size for file in _weights(path))


def digest(path: Path) -> str:
    """sha256 of a file; of a folder's weights: of the hashes of its files."""
    if path.is_dir():
        return hashlib.sha256("".join(map(digest, _weights(path))).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def write_index(folder: Path) -> None:
    """List what lies under `folder`, MODEL/METHOD/files, for models of the catalog."""
    heads = [asdict(entry) for entry in _listed(folder)]
    text = json.dumps({"heads": heads}, indent=2) + "\n"
    (folder / INDEX).write_text(text)


def _listed(folder: Path) -> Iterator[Shipped]:
    for place in sorted(folder.glob("*/*/")):
        model = place.parent.name
        if model not in catalog.CATALOG:
            raise UserError(f"`{place}` is for a model that the catalog does not have: name its folder after one")
        files = (File(file.name, file.stat().st_size, digest(file)) for file in sorted(place.iterdir()))
        entry = catalog.CATALOG[model]
        yield Shipped(model, entry.size, entry.sha256, place.name, tuple(files))
