"""`outrider pull`: fetch a model of the catalog."""

from __future__ import annotations

from typing import Annotated

import typer

from . import console, options


def pull(
    name: Annotated[str, typer.Argument(help="Name in the catalog, such as smollm2-135m")],
    verify: Annotated[bool, typer.Option("--verify", help="Hash the file again, even when it is there")] = False,
    json: options.Json = False,
) -> None:
    """Fetch a model into the cache, check its hash; what is there already is left alone."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    from ..weights import catalog

    with console.bar(name, DownloadColumn(), TransferSpeedColumn(), quiet=json) as progress:
        path = catalog.pull(name, progress=progress, verify=verify)
    size = path.stat().st_size
    if json:
        console.json_line({"name": name, "path": str(path), "bytes": size})
    else:
        console.text(f"{name}: {path} ({console.size(size)})\n")
