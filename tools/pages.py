"""Pages of the reference that are written from the code: how each tool writes its own, or checks them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(pages: Mapping[Path, str]) -> None:
    """Write these pages, or, with --check, see that they are up to date."""
    for path, content in pages.items():
        if "--check" not in sys.argv:
            path.write_text(content, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != content:
            sys.exit(f"{path} is out of date: run `python tools/{Path(sys.argv[0]).name}`")
