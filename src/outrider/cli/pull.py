"""`outrider pull`: fetch a model of the catalog."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from . import options, say


def pull(
    name: Annotated[str, typer.Argument(help="Name in the catalog, such as smollm2-135m")],
    verify: Annotated[bool, typer.Option("--verify", help="Hash the file again, even when it is there")] = False,
    json: options.Json = False,
) -> None:
    """Fetch a model into the cache, check its hash; what is there already is left alone."""
    from ..weights import catalog

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = json or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=hidden, transient=True) as bar:
        task = bar.add_task(name, total=None)

        def progress(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total or None, description=label)

        path = catalog.pull(name, progress=progress, verify=verify)
    size = path.stat().st_size
    if json:
        say.json_line({"name": name, "path": str(path), "bytes": size})
    else:
        say.text(f"{name}: {path} ({say.size(size)})\n")
