"""The run card: the data and the settings that a head was made with, so that it can be reproduced; no local paths."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ... import __version__, catalog
from ...catalog.shipped import CARD, target_record
from ...device import Device
from ...errors import UserError
from ...weights import locate
from ...weights.random import is_random
from ..progress import curve
from .disk import as_json, write_whole


def target(model: str) -> dict[str, Any]:
    """Describe the target: its name, and the size and hash of its weights if it has files."""
    if is_random(model):
        return {"model": model}
    return target_record(model, locate(model)) | {"model": model_name(model)}


def model_name(model: str) -> str:
    """Return the name of a model without its folder."""
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
    """Summarize the log: the loss curve and the last metrics on held-out documents."""
    train = [line for line in lines if line["kind"] == "train"]
    held_out = [line for line in lines if line["kind"] == "held out" and line["figures"]]
    points = [
        {"step": line["step"], "loss": {name: metrics["loss"] for name, metrics in line["figures"].items()}}
        for line in curve(train)
    ]
    return {"losses": points, "held_out": held_out[-1]["figures"] if held_out else {}}


def of_head(card: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the card of one head of a run."""
    losses = [{"step": point["step"], "loss": point["loss"].get(name)} for point in card["losses"]]
    head = {**card["heads"][name], "held_out": card["held_out"].get(name), "losses": losses}
    shared = {key: value for key, value in card.items() if key not in ("heads", "held_out", "losses")}
    return {**shared, "head": head, "trained_beside": [other for other in card["heads"] if other != name]}


def write(folder: Path, card: Mapping[str, Any]) -> None:
    try:
        write_whole(folder / CARD, as_json(card))
    except OSError as error:
        raise UserError(f"cannot write `{folder / CARD}` ({error.strerror}): make room and run again") from error


def read(folder: Path) -> dict[str, Any]:
    """Return the card in a folder; empty if there is none that can be read."""
    try:
        content = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
