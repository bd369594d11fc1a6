"""The run card: what a head was made of and how, so that it can be made again. It names files, but no places."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...device import Device
from ...errors import UserError
from ...weights import catalog, locate
from ...weights.random import is_random
from ...weights.shipped import CARD, target_record
from ..metrics import curve
from .disk import as_json, write_whole


def target(model: str) -> dict[str, Any]:
    """The model that was learnt from: its name, and the size and hash of its weights where it has any."""
    if is_random(model):
        return {"model": model}
    return target_record(model, locate(model)) | {"model": called(model)}


def called(model: str) -> str:
    """A model's name without the place where it lies."""
    return model if model in catalog.CATALOG or not Path(model).expanduser().exists() else Path(model).name


def prompt_files(files: Sequence[Path]) -> list[dict[str, Any]]:
    return [{"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()} for file in files]


def machine(device: Device) -> dict[str, Any]:
    return {
        "outrider": __version__,
        "torch": torch.__version__,
        "device": getattr(device, "name", None) or f"CPU ({platform.machine()})",
    }


def progress(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the log: the curve of the losses, and what was found on held-out text at last."""
    train = [line for line in lines if line["kind"] == "train"]
    held_out = [line for line in lines if line["kind"] == "held out" and line["figures"]]
    points = [
        {"step": line["step"], "loss": {name: one["loss"] for name, one in line["figures"].items()}}
        for line in curve(train)
    ]
    return {"losses": points, "held_out": held_out[-1]["figures"] if held_out else {}}


def of_head(card: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The part of a run's card that is about one of its heads."""
    losses = [{"step": one["step"], "loss": one["loss"].get(name)} for one in card["losses"]]
    own = {**card["heads"][name], "held_out": card["held_out"].get(name), "losses": losses}
    shared = {key: value for key, value in card.items() if key not in ("heads", "held_out", "losses")}
    return {**shared, "head": own, "trained_beside": [other for other in card["heads"] if other != name]}


def write(folder: Path, card: Mapping[str, Any]) -> None:
    try:
        write_whole(folder / CARD, as_json(card))
    except OSError as error:
        raise UserError(f"cannot write `{folder / CARD}` ({error.strerror}): make room and run again") from error


def read(folder: Path) -> dict[str, Any]:
    """Empty: there is none that can be read."""
    try:
        found = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
