"""`outrider rm`: remove models from the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from . import console, options


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names as `outrider list` shows them")],
    json: options.Json = False,
) -> None:
    """Remove models from the cache at once, with the rest of an interrupted download; other files are never touched."""
    from ..catalog import remove

    for name in names:
        freed = remove(name)
        if json:
            console.json_line({"name": name, "freed_bytes": freed})
        else:
            console.text(f"removed {name} ({console.size(freed)})\n")
