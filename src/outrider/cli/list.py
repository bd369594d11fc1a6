"""`outrider list`: the models in the cache, or in the catalog."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from . import console, options

UNITS = (("day", 86_400), ("hour", 3600), ("minute", 60))  # name and seconds


def list(
    catalog: Annotated[
        bool, typer.Option("--catalog", help="List the models that have a short name, pulled or not")
    ] = False,
    json: options.Json = False,
) -> None:
    """List the models in the cache: name, size, quantization, heads that fit, time of the download."""
    rows = catalog_rows() if catalog else cache_rows()
    if json:
        for row in rows:
            console.json_line(row)
    elif catalog:
        show_catalog(rows)
    elif rows:
        show_cache(rows)
    else:
        console.note(
            "no model is in the cache: `outrider pull smollm2-135m` fetches a small one, `outrider list --catalog` "
            "shows others"
        )


def cache_rows() -> Any:
    from ..catalog import pulled

    return [
        {
            "name": model.name,
            "path": str(model.path),
            "bytes": model.bytes,
            "format": model.format,
            "quantization": model.quantization,
            "heads": [*model.heads],
            "modified": datetime.fromtimestamp(model.modified, UTC).isoformat(timespec="seconds"),
        }
        for model in pulled()
    ]


def catalog_rows() -> Any:
    from ..catalog import CATALOG, is_pulled
    from ..catalog.names import quantization
    from ..catalog.shipped import methods_for

    return [
        {
            "name": name,
            "title": entry.title,
            "parameters": entry.parameters,
            "quantization": quantization(entry.file),
            "bytes": entry.size,
            "license": entry.license,
            "source": f"{entry.repository}:{entry.file}" if entry.repository else entry.parts[0].package,
            "heads": [*methods_for(name)],
            "pulled": is_pulled(name),
        }
        for name, entry in CATALOG.items()
    ]


def show_cache(rows: Any) -> None:
    cells = (
        (
            row["name"],
            console.size(row["bytes"]),
            row["quantization"] if row["format"] == "GGUF" else f"{row['format']}, {row['quantization']}",
            age(row["modified"]),
            ", ".join(row["heads"]) or "-",
        )
        for row in rows
    )
    console.columns([("NAME", "SIZE", "FORMAT", "MODIFIED", "HEADS"), *cells], numbers=(1,))


def show_catalog(rows: Any) -> None:
    cells = (
        (
            row["name"],
            console.size(row["bytes"]),
            row["quantization"],
            row["license"],
            "yes" if row["pulled"] else "-",
            ", ".join(row["heads"]) or "-",
        )
        for row in rows
    )
    console.columns([("NAME", "SIZE", "FORMAT", "LICENCE", "PULLED", "HEADS"), *cells], numbers=(1,))
    console.note("the size is about the memory that the weights need; `outrider pull NAME` fetches a model")


def age(moment: str) -> str:
    """Format a time in the past, such as `3 hours ago`."""
    seconds = time.time() - datetime.fromisoformat(moment).timestamp()
    for unit, length in UNITS:
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
