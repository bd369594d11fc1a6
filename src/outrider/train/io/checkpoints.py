"""The saved state and the settings of a run on disk, each replaced atomically."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError
from .disk import as_json, as_read, write_whole

STATE, SETTINGS = "state.pt", "settings.json"


def save(folder: Path, state: Mapping[str, Any]) -> None:
    """Save a state. On OSError the earlier one is intact."""
    buffer = io.BytesIO()  # a full disk then raises OSError; torch would raise a RuntimeError
    torch.save(dict(state), buffer)
    write_whole(folder / STATE, buffer.getbuffer())


def load(folder: Path, device: torch.device) -> dict[str, Any] | None:
    """Return the saved state; None: there is none."""
    file = folder / STATE
    return read(file, device, "delete it to train from the start") if file.exists() else None


def read(file: Path, device: torch.device, remedy: str) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many classes for a damaged file
        raise UserError(
            f"`{file}` is damaged and cannot be resumed from ({str(error).splitlines()[0]}): {remedy}"
        ) from error
    return state


def check(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Refuse a run whose settings differ from those of the run in the folder. Return False if there is no run."""
    file = folder / SETTINGS
    if not file.exists():
        return False
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"`{file}` is damaged: pass another `--out`, or delete the folder") from error
    current = as_read(settings)
    differing = differences({key: saved.get(key) for key in current}, current)
    if differing:
        raise UserError(
            f"`{folder}` holds a run with other settings ({'; '.join(differing)}): "
            "pass those to resume it, or another `--out`"
        )
    return True


def agree(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check the settings, and write them if this run is the first in the folder."""
    if not check(folder, settings):
        try:
            write_whole(folder / SETTINGS, as_json(settings))
        except OSError as error:
            raise UserError(f"cannot write to `{folder}` ({error.strerror}): make room and run again") from error


def differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> list[str]:
    """Describe the settings that differ between two runs."""
    texts: list[str] = []
    for key in sorted(before.keys() | now.keys()):
        name, old, new = f"{within}{key}", before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            texts += differences(old, new, f"{name}.")
        elif isinstance(old, Mapping) or isinstance(new, Mapping):
            texts.append(f"`{name}` is missing" if new is None else f"`{name}` is new")
        elif old != new:
            texts.append(f"`{name}` was `{shown(old)}` and is `{shown(new)}`")
    return texts


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
