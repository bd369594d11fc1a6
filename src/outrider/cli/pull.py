"""`outrider pull`: download a model of the catalog."""

from __future__ import annotations

from typing import Annotated

import typer

from . import console, options


def pull(
    name: Annotated[str, typer.Argument(help="Name in the catalog, such as smollm2-135m")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the hash of the file even if it was downloaded before")
    ] = False,
    json: options.Json = False,
) -> None:
    """Download a model into the cache and check its hash. Files that are already there are not downloaded again."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    from .. import catalog

    with console.bar(name, DownloadColumn(), TransferSpeedColumn(), quiet=json) as progress:
        path = catalog.pull(name, progress=progress, verify=verify)
    size = path.stat().st_size
    if json:
        console.json_line({"name": name, "path": str(path), "bytes": size})
    else:
        console.text(f"{name}: {path} ({console.size(size)})\n")
