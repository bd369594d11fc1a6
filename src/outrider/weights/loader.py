"""Open a model by catalog name, hub name, folder, GGUF file or `random/NAME`."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

from ..errors import UserError
from ..types import Progress, unwatched
from . import catalog
from .checkpoint import Checkpoint
from .gguf import open_gguf
from .hf_folder import open_folder
from .random import HOST, is_random, open_random

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # so `./name`, `../name`, `/name` and `~/name` are paths
FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")


def open_checkpoint(source: str | Path, progress: Progress = unwatched, device: torch.device = HOST) -> Checkpoint:
    """Map a model into memory, after downloading it if `source` names one that is not on disk.

    device: where random weights are made.
    """
    if is_random(source):
        return open_random(str(source), device)
    path = locate(source, progress)
    if path.is_dir():
        return open_folder(path)
    if path.suffix == ".safetensors":
        raise UserError(f"`{path}` holds weights alone: pass its folder, with `config.json` and `tokenizer.json`")
    return open_gguf(path)


def locate(source: str | Path, progress: Progress = unwatched, kind: str = "model") -> Path:
    """Return the local folder or file of a model or draft head, after downloading it if needed.

    kind: what `source` should be, for errors.
    """
    name = str(source)
    if name in catalog.CATALOG:
        return catalog.pull(name, progress=progress)
    path = Path(source).expanduser()
    with contextlib.suppress(OSError):  # the name is too long for a file
        if path.exists():
            return path
    if isinstance(source, str) and is_hub_name(name):
        return catalog.pull_hub(name)
    if kind != "model":
        raise UserError(f"no {kind} at `{name}`: pass the folder of one, or a hub name `org/name`")
    known = ", ".join(f"`{known}`" for known in catalog.CATALOG)
    raise UserError(f"no model at `{name}`: pass a folder, a GGUF file, a hub name `org/name` or one of {known}")


def is_hub_name(name: str) -> bool:
    """Return True if a name that is no file or folder can be one of the hub; False if it is written as a path."""
    return HUB_NAME.fullmatch(name) is not None and not name.endswith(FILE_SUFFIXES)
