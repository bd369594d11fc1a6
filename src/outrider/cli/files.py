"""Files that the user names: read or written, or a sentence that says why not."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError
from . import say


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read `{path}`: {cause(error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read `{path}`: it is not UTF-8 text") from error


def write(path: Path, content: str | bytes, done: str) -> None:
    """done: what a note says has become of it."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"cannot write `{path}`: {cause(error)}") from error
    say.note(f"{done}: {path}")


def check_plot(path: Path) -> None:
    """Before hours are spent on what it shows."""
    if path.suffix != ".svg":
        raise UserError(f"`--plot` is `{path}`: figures are drawn as SVG, so let the name end in .svg")
    if not path.parent.is_dir():
        raise UserError(f"`--plot` is `{path}`, and there is no folder `{path.parent}`: make it first")


def cause(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
