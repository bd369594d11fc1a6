"""Open a model by catalog name, hub name, URL, folder, GGUF file or `random/NAME`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from .. import catalog
from ..catalog.names import is_hub_name, parse, suggestion
from ..errors import UserError
from ..types import Progress, unwatched
from .checkpoint import Checkpoint
from .gguf import open_gguf
from .gguf_parts import single_model
from .hf_folder import open_folder
from .random import HOST, is_random, open_random


def open_checkpoint(source: str | Path, progress: Progress = unwatched, device: torch.device = HOST) -> Checkpoint:
    """Map a model into memory, after downloading it if `source` names one that is not on disk.

    device: where random weights are made.
    """
    if is_random(source):
        return open_random(str(source), device)
    return open_path(locate(source, progress))


def open_path(path: Path) -> Checkpoint:
    """Map the model in a folder or a GGUF file into memory."""
    if path.is_dir():
        model = None if (path / "config.json").is_file() else single_model(path)
        return open_folder(path) if model is None else open_gguf(model)
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
    if (path := existing(source)) is not None:
        return path
    if kind != "model":
        if isinstance(source, str) and is_hub_name(name):
            return catalog.pull_hub(name, progress=progress)
        raise UserError(f"no {kind} at `{name}`: pass the folder of one, or a hub name `org/name`")
    if isinstance(source, str) and parse(name) is not None:
        return catalog.pull(name, progress=progress)
    raise UserError(
        f"no model at `{name}`: pass a folder, a GGUF file, its URL, a hub name `org/name`, or a name of the catalog "
        f"such as `smollm2-135m`; {suggestion(name, catalog.CATALOG)}"
    )


def existing(source: str | Path) -> Path | None:
    """Return the path of a file or folder that exists; None if there is none."""
    path = Path(source).expanduser()
    with contextlib.suppress(OSError):  # the name is too long for a file
        if path.exists():
            return path
    return None
