"""What a run has reached, on disk: whole or as it was before, whatever happens while it is written."""

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
    """OSError: it could not be written, and what was saved before is still there."""
    held = io.BytesIO()  # torch's own writer would tell a full disk from a bug of ours by its words alone
    torch.save(dict(state), held)
    write_whole(folder / STATE, held.getbuffer())


def load(folder: Path, place: torch.device) -> dict[str, Any] | None:
    """What was last saved; None: nothing was."""
    file = folder / STATE
    return read(file, place, "delete it to train from the start") if file.exists() else None


def read(file: Path, place: torch.device, remedy: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(file, map_location=place, weights_only=True)
    except Exception as error:  # torch has no one class for a damaged file
        raise UserError(
            f"`{file}` is damaged and cannot be gone on from ({str(error).splitlines()[0]}): {remedy}"
        ) from error
    return found


def check(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Refuse to mix a run with another that is in the folder already; False: there is none."""
    file = folder / SETTINGS
    if not file.exists():
        return False
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"`{file}` is damaged: give another `--out`, or delete the folder") from error
    wanted = as_read(settings)
    differing = differences({key: found.get(key) for key in wanted}, wanted)
    if differing:
        raise UserError(
            f"`{folder}` holds a run with other settings ({'; '.join(differing)}): "
            "repeat those to go on with it, or give another `--out`"
        )
    return True


def agree(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check, and note down what this run is where it is the first."""
    if not check(folder, settings):
        try:
            write_whole(folder / SETTINGS, as_json(settings))
        except OSError as error:
            raise UserError(f"cannot write to `{folder}` ({error.strerror}): make room and run again") from error


def differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> list[str]:
    """What two runs disagree on, in words."""
    found: list[str] = []
    for key in sorted(before.keys() | now.keys()):
        name, old, new = f"{within}{key}", before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{name}.")
        elif isinstance(old, Mapping) or isinstance(new, Mapping):
            found.append(f"`{name}` is missing" if new is None else f"`{name}` is new")
        elif old != new:
            found.append(f"`{name}` was `{shown(old)}` and is `{shown(new)}`")
    return found


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
