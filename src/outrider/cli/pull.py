"""`outrider pull`: download a model."""

from __future__ import annotations

from typing import Annotated

import typer

from . import console, options


def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="Name in the catalog (see `outrider list --catalog`), hub name such as org/name:Q4_K_M, "
            "or URL of a GGUF file"
        ),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the hash of the file even if it was downloaded before")
    ] = False,
    revision: options.Revision = None,
    json: options.Json = False,
) -> None:
    """Download a model into the cache and check its hash. Files that are already there are not downloaded again."""
    from .. import catalog

    name = catalog.with_revision(name, revision)
    try:
        with console.download_bar(name, quiet=json) as progress:
            path = catalog.pull(name, progress=progress, verify=verify, refresh=True)
    except KeyboardInterrupt:
        console.note(f"interrupted: `outrider pull {name}` continues where it stopped")
        raise
    size = catalog.file_bytes(path)
    if json:
        console.json_line({"name": name, "path": str(path), "bytes": size})
    else:
        console.text(f"{name}: {path} ({console.size(size)})\n")
