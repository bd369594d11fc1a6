"""Heads in folders, changed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

Config = dict[str, Any]
Tensors = dict[str, Tensor]


def change(folder: Path, edit: Callable[[Config], object]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config))


def change_tensors(folder: Path, edit: Callable[[Tensors], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def change_both(folder: Path, edit: Callable[[Config, Tensors], object]) -> None:
    change(folder, lambda config: change_tensors(folder, lambda tensors: edit(config, tensors)))
